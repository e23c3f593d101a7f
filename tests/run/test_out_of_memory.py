"""A rank that runs out of memory says which setting would have fitted, and that setting does fit by `check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.run.before.memory_summary import memory_entries
from pipeline.run.out_of_memory import fitting_change, memory_of, own_peak
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.metrics.attempts_journal import read_events
from tests import warm
from tests.conftest import ROOT, tiny_config, write_config
from tests.plan.fake_gpu.cells import shipped_cases
from tests.plan.fake_gpu.document import built
from tests.support import refusal_of

CASE = "llama_8b_8gpu.json"


def test_a_smaller_micro_batch_comes_first_then_activation_checkpointing_and_each_fits_by_the_check() -> None:
    case = shipped_cases()[CASE]
    overrides = (*case.overrides, "memory.activation_checkpointing=none", "train_micro_batch_size_per_gpu=4")
    run, model = built(replace(case, overrides=overrides))
    peak = own_peak(run, model)
    assert peak is not None
    micro, checkpointing = "train_micro_batch_size_per_gpu", "memory.activation_checkpointing"
    expected = {0.95: {micro}, 0.4: {micro}, 0.3: {micro, checkpointing}, 0.2: {checkpointing}}
    for share, keys in expected.items():
        found = fitting_change(run, model, memory=share * peak)
        assert {key for key, _ in found.changes} == keys
        sets = tuple(f"{key}={value}" for key, value in found.changes)
        changed, same = built(replace(case, overrides=(*overrides, *sets)))
        fit = list(memory_entries(changed, same, memory=int(share * peak)))[1].values
        assert fit["fits"], sets


def test_nothing_fits_a_megabyte() -> None:
    run, model = built(shipped_cases()[CASE])
    assert fitting_change(run, model, memory=1e6) is None


def test_a_host_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = memory_of(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_of(torch.device("cpu")) == alone / 4


def test_an_allocation_that_fails_in_a_real_step_ends_with_what_would_have_fitted(tokens: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    data = {"sources": [{"path": str(tokens)}], "sequence_length": 1024}
    fields = {"data": data, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 64, "engine": "torch"}
    config = write_config(tmp_path / "c.json", tiny_config(tokens, run_dir, **fields))
    # the process may take 300 MB more than it has, and the logits of a micro-batch alone need 400 MB
    code = (
        "import os, resource, sys, pipeline.run.session\n"
        "from pathlib import Path\n"
        "from foundation.cli import guarded\n"
        "from pipeline import train\n"
        "held = int(Path('/proc/self/statm').read_text().split()[0]) * os.sysconf('SC_PAGE_SIZE')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held + 300_000_000,) * 2)\n"
        "sys.argv[1:] = ['--config', sys.argv[1]]\n"
        "os._exit(guarded(train.main))\n"
    )
    said = refusal_of(warm.run("-c", code, config, cwd=ROOT))
    assert "error: out of memory: " in said
    assert "by the formulas of 'headrace check'" in said
    assert "try: --set train_micro_batch_size_per_gpu=32 (a peak of " in said
    end = read_events(run_dir)[0][-1]
    assert (end["event"], end["code"]) == ("end", 2)
    assert end["reason"].startswith("out of memory: ")
    assert read_faults(run_dir)[0]["ranks"][0]["error"].startswith("out of memory: ")
    assert json.loads((run_dir / "manifest.json").read_text())["details"]["step"] == 0


CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(CGROUPS / "cgroup.procs", os.W_OK), reason="no memory cgroup (v1) to make")
def test_a_rank_that_the_kernel_kills_for_its_memory_is_reported_as_that(tmp_path: Path) -> None:
    group = CGROUPS / f"headrace-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(100 << 20))
        greedy = (
            "import os, time\n"
            f"if os.environ['RANK'] == '1': open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
            "kept = b'x' * (400 << 20) if os.environ['RANK'] == '1' else time.sleep(900)\n"
        )
        (tmp_path / "greedy.py").write_text(greedy)
        code = (
            "import sys; from pipeline.runtime.launch.local import supervise; "
            "sys.exit(supervise(sys.argv[1:], processes=2))"
        )
        command = [sys.executable, "-c", code, sys.executable, str(tmp_path / "greedy.py")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
    finally:
        group.rmdir()
    assert done.returncode == 137
    assert "rank 1 of 2 was ended by SIGKILL: the kernel's out-of-memory killer" in done.stderr
