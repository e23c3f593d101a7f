"""`headrace check` says what a rank needs and what would fit; a rank that runs out of memory says the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foundation.errors import ConfigError
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import peak_memory
from pipeline.run.before.memory_summary import memory_bytes, memory_entries
from pipeline.run.out_of_memory import fitting_change, memory_of, own_peak
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.metrics.attempts_journal import read_events
from tests import warm
from tests.conftest import ROOT, tiny_config, write_config
from tests.plan.fake_gpu.cells import shipped_cases
from tests.plan.fake_gpu.document import built
from tests.support import output_of, refusal_of

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


def test_a_size_has_a_unit_and_is_refused_without() -> None:
    assert memory_bytes("80GB") == 80 * 10**9
    assert memory_bytes("1.5 GiB") == 3 * 2**29
    for wrong in ("80", "0GB", "GB", "-1GB", "80 GPU"):
        with pytest.raises(ConfigError, match="80GB"):
            memory_bytes(wrong)


def test_8b_fits_one_h200_and_eight() -> None:
    fits = {}
    for name in ("llama_8b_h200.json", "llama_8b_8gpu.json"):
        run, model = built(shipped_cases()[name])
        fits[name] = list(memory_entries(run, model, memory=memory_bytes("141GB")))[1].values
    assert fits["llama_8b_h200.json"] == {"memory": 141 * 10**9, "fits": True, "largest_micro_batch": 4}
    assert fits["llama_8b_8gpu.json"]["fits"]
    assert fits["llama_8b_8gpu.json"]["largest_micro_batch"] == 4


def test_the_largest_micro_batch_fits_every_rank_of_the_pipeline() -> None:
    case = shipped_cases()["llama_70b_fsdp_3d.json pp 0"]
    schedule = ("parallel.schedule=1f1b", "parallel.virtual_stages=null", "loss.chunk=65536")
    overrides = (*schedule, "model.config.num_hidden_layers=8", "memory.activation_checkpointing=full")
    run, model = built(replace(case, overrides=overrides))
    peak, fit = memory_entries(run, model, memory=memory_bytes("12GB"))
    # of 1 sample the first rank needs most, with the micro-batches it keeps; of 8 the last one, with their logits
    assert peak.values["pp_rank"] == 0
    assert fit.values["largest_micro_batch"] == 4
    footprint = footprint_of(run, model)
    peaks = [peak_memory(run, footprint, pp_rank=rank, micro=8).total for rank in (0, 3)]
    assert peaks[0] < 12e9 < peaks[1]


@pytest.mark.integration
def test_check_prints_memory_by_kind_and_whether_it_fits(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    options = ("check", "--config", config, "--memory", "1GB", "--json")
    summary = json.loads(output_of(warm.run("-m", "pipeline", *options)))
    assert summary["memory"]["peak"] >= summary["memory"]["weights"] > 0
    assert summary["memory_fit"]["fits"] is True
    refused = warm.run("-m", "pipeline", "check", "--config", config, "--memory", "80", merged=True)
    assert refused.returncode == 2
    assert "80GB" in refused.stdout
