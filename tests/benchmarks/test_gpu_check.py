"""`make gpu-check`: every failure is a row with its reason, and the whole runs on a CPU with tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from benchmarks.gpu_check import machine, measure
from benchmarks.gpu_check.cases import Row, rows, selected, sizes, tiny_sizes
from benchmarks.gpu_check.meter import Meter
from benchmarks.gpu_check.page import append
from benchmarks.gpu_check.process import environment, install_wheels, missing_packages, on_one_gpu, run
from benchmarks.gpu_check.tests import gpu_test_files
from pipeline.models.construction.meta import build_meta
from pipeline.models.count import measure as count
from tests import warm_python
from tests.conftest import ROOT
from tests.support import output_of

CPU = torch.device("cpu")
ROW = Row("tiny", "torch", "eager")


@pytest.mark.parametrize("size", [*sizes(8192).values(), *tiny_sizes().values()])
def test_flops_and_parameters_are_those_that_training_reports(size: Any) -> None:
    config = AutoConfig.for_model(**size.model)
    model = build_meta(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    counted = count(model, config, sequence_length=size.sequence)
    assert size.parameters == counted.parameters
    assert size.flops_per_token(causal=False) == counted.flops_per_token


def test_8b_has_the_published_flops_per_token() -> None:
    size = sizes(8192)["8b"]
    assert f"{size.flops_per_token(causal=False) / 1e9:.1f}" == "57.9"
    assert f"{size.flops_per_token(causal=True) / 1e9:.1f}" == "51.5"


def test_only_selects_parts_and_rows() -> None:
    names = [row.name for row in rows(["1b", "8b"]) if selected(row.name, "speed", "tests,1b-torch-*")]
    assert names == ["1b-torch-compiled", "1b-torch-fp8", "1b-torch-eager", "1b-torch-gpus"]
    assert selected("tests", "tests", "tests,1b-torch-*")
    assert all(selected(row.name, "speed", "speed") for row in rows(["8b"]))


class Limited:
    """Stands in for a contestant that fits up to a micro-batch, or with activation checkpointing up to twice that."""

    fits = 1
    allocates = True

    def __init__(self, _size: object, _row: object, *, micro: int, checkpointing: str, device: torch.device) -> None:
        if not self.allocates:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 28 GiB")
        self._over = micro > self.fits * (2 if checkpointing == "full" else 1)
        assert device == CPU

    def train(self, meter: Meter) -> float:
        """As many steps as the meter wants, or too little memory."""
        if self._over:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        while not meter.done:
            meter.end_step()
        return 2.5

    @staticmethod
    def opened(_device: torch.device) -> Any:
        import contextlib  # noqa: PLC0415

        return contextlib.nullcontext()


def measured_with(monkeypatch: pytest.MonkeyPatch, attempts: list[str], **limits: object) -> dict[str, Any]:
    contestant = type("Contestant", (Limited,), limits)
    module = type("Module", (), {"Contestant": contestant, "opened": Limited.opened})
    monkeypatch.setattr(measure, "module_of", lambda _row: module)
    return measure.measured(tiny_sizes()["tiny"], ROW, {"trace": None, "warmup": 1, "steps": 2}, attempts)


@pytest.mark.parametrize(("fits", "micro", "checkpointing"), [(4, 4, "none"), (1, 1, "none"), (0.5, 1, "full")])
def test_the_largest_micro_batch_that_fits_is_found(
    monkeypatch: pytest.MonkeyPatch, fits: float, micro: int, checkpointing: str
) -> None:
    attempts: list[str] = []
    found = measured_with(monkeypatch, attempts, fits=fits)
    assert (found["micro_batch"], found["activation_checkpointing"]) == (micro, checkpointing)
    assert len(found["step_s"]) == 2
    assert all("Tried to allocate 2 GiB" in text for text in attempts)


def test_a_model_that_does_not_fit_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []
    found = measured_with(monkeypatch, attempts, allocates=False)
    assert found["reason"].startswith("out of memory before the first step: weights and optimizer do not fit")
    assert len(attempts) == 1  # a smaller micro-batch would not help


def test_a_missing_package_is_a_row_that_names_it() -> None:
    assert measure.reason(ModuleNotFoundError("No module named 'x'", name="x")) == "the package x is missing"


def test_a_process_over_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    words = [sys.executable, "-c", code]
    ended = run(words, log=tmp_path / "log", limit_s=3, env=dict(os.environ))
    assert ended.code is None
    status, until = Path("/proc", ended.last_line, "status"), time.monotonic() + 120
    while status.exists() and "State:\tZ" not in status.read_text():  # gone, or not yet collected
        assert time.monotonic() < until, "the child lives"
        time.sleep(0.1)


def test_packages_that_are_missing_are_listed_with_what_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu_check import process  # noqa: PLC0415

    monkeypatch.setattr(process, "_installed", lambda name: name not in ("deepspeed", "pydantic", "datasets"))
    assert missing_packages(None) == {
        "deepspeed": "rows and tests of engine deepspeed",
        "datasets": "GPU tests that use it",
        "pydantic": "rows of both engines, and the GPU tests",
    }


def test_a_folder_without_wheels_is_reported(tmp_path: Path) -> None:
    told = install_wheels(tmp_path, tmp_path / "site", log=tmp_path / "log", env=dict(os.environ))
    assert told == f"{tmp_path} has no wheels"


def test_what_a_torch_lacks_is_found_by_name() -> None:
    assert machine.has("torch.distributed.fsdp.fully_shard")
    assert not machine.has("torch.nn.functional.no_such_function")
    assert not machine.has("torch.no_such_module.function")


def test_the_page_has_a_line_for_every_row_and_every_file_of_gpu_tests() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    keys = ["sdpa-order", *gpu_test_files(), *(row.name for row in rows(["1b", "8b"]))]
    assert [key for key in keys if f"\n| `{key}` | " not in text] == []
    assert "tests/gpu/test_attention.py" in keys


def test_a_run_is_appended_and_answers_its_lines(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    tests = [
        {"name": "tests/gpu/test_training.py::a", "outcome": "passed", "seconds": 1.0, "reason": ""},
        {"name": "tests/gpu/test_attention.py::b", "outcome": "passed", "seconds": 1.0, "reason": ""},
        {"name": "tests/gpu/test_attention.py::c", "outcome": "failed", "seconds": 1.0, "reason": "a | b"},
    ]
    measured = {
        "samples": 16, "sequence": 4096, "micro_batch": 8, "activation_checkpointing": "none", "median_s": 1.5,
        "tokens_per_s": 43690.7, "mfu": 0.5, "mfu_causal": 0.45, "peak_allocated_bytes": 2**36, "mean_loss": 10.5,
    }  # fmt: skip
    own, peer, failed = rows(["1b"])[0], rows(["1b"])[2], rows(["8b"])[0]
    result = {
        "date": "2027-01-02",
        "tiny": False,
        "missing": {"deepspeed": "rows"},
        "machine": {
            "device": "NVIDIA H200", "torch": "2.11.0", "memory_bytes": 2**37, "packages": {"triton": "3.6"},
            "sdpa_ms": {"MATH": 9.0, "FLASH_ATTENTION": 1.0, "CUDNN_ATTENTION": "no"}, "torch_lacks": {"x": "use"},
        },
        "tests": {"tests": tests, "passed": 2, "failed": 1, "skipped": 0, "ended": "finished"},
        "rows": [
            {"name": own.name, "title": own.title, **measured},
            {"name": peer.name, "title": peer.title, **measured, "tokens_per_s": 21845.35},
            {"name": failed.name, "title": failed.title, "reason": "out of memory"},
        ],
    }  # fmt: skip
    append(page, result)
    text = page.read_text()
    assert f"| `{own.name}` | {own.title} | run of 2027-01-02 |" in text
    assert f"| `{failed.name}` | {failed.title} | not yet run |" in text
    assert "where they are installed, compiled too | not yet run |" in text  # one of its tests failed
    assert text.count("| run of 2027-01-02 |") == 4  # two rows, a file of tests, the order of backends
    assert f"| {own.title} | 16 x 4096 | 8; none | 1.500 | 43,691 | 50.0 % | 45.0 % | 64.0 | 10.500 |" in text
    assert f"| {failed.title} | not measured: out of memory |" in text
    assert "| `tests/gpu/test_attention.py::c` | failed | 1 | a / b |" in text
    assert "FLASH_ATTENTION 1.00, MATH 9.00, CUDNN_ATTENTION does not run" in text
    assert f"`{own.name}` makes 2.00 times the tokens/s of `{peer.name}`." in text


@pytest.mark.parametrize(
    ("compiled", "tests", "passed"),
    # in CI without those files of GPU tests that take long: the session has them itself, too
    [
        pytest.param([], "test_attention", 4, marks=pytest.mark.integration, id="eager"),
        pytest.param(["torch-compiled", "torch-gpus"], "", 11, marks=pytest.mark.sweep, id="all"),
    ],
)
def test_the_whole_check_runs_on_a_cpu_with_tiny_sizes(
    compiled: list[str], tests: str, passed: int, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n")
    chosen = ",".join(["environment", "tests", "tiny-*-eager", *(f"tiny-{name}" for name in ("torch-fp8", *compiled))])
    env = {**os.environ, "PYTEST_ADDOPTS": f"-k '{tests}'"}
    options = ["--tiny", "--steps", "3", "--warmup", "1", "--profile", "--only", chosen, "--minutes", "60"]
    words = [warm_python.python(), "-m", "benchmarks.gpu", *options, "--out", str(tmp_path), "--page", str(page)]
    output_of(subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False))
    result = json.loads((tmp_path / "result.json").read_text())
    found = {row["name"]: row for row in result["rows"]}
    for name in (*compiled, "torch-eager", "deepspeed-eager", "trainer-eager"):
        row = found[f"tiny-{name}"]
        assert len(row["step_s"]) == 3, row
        assert row["samples"] == (8 if name == "torch-gpus" else 4)
        # ln 512 is 6.24; the same first weights for all, and tokens (two processes have more), but the Trainer has no
        # last target of a sample
        assert row["mean_loss"] == pytest.approx(found["tiny-torch-eager"]["mean_loss"], rel=2e-3)
        assert (tmp_path / "rows" / f"tiny-{name}.trace.json.gz").stat().st_size > 1000
    assert result["tests"]["failed"] == 0, result["tests"]
    assert result["tests"]["passed"] >= passed
    reasons = {test["reason"] for test in result["tests"]["tests"] if test["outcome"] == "skipped"}
    assert "Skipped: needs a CUDA device" in reasons
    assert "TINY, Hugging Face Trainer, bf16 | 4 x 64" in page.read_text()


def test_tests_of_the_check_get_all_gpus_a_row_of_one_process_the_first_and_nothing_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    env = environment(None, tiny=False)
    assert (env["CUDA_VISIBLE_DEVICES"], env["HF_HUB_OFFLINE"], env["HEADRACE_GPU_TESTS_ON"]) == ("3,5", "1", "cuda")
    assert on_one_gpu(env)["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert on_one_gpu(environment(None, tiny=False))["CUDA_VISIBLE_DEVICES"] == "0"
    tiny = environment(None, tiny=True)
    assert (tiny["CUDA_VISIBLE_DEVICES"], on_one_gpu(tiny)["CUDA_VISIBLE_DEVICES"]) == ("", "")


def test_the_check_runs_with_the_environments_python_unless_another_is_given(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())

    def command(*words: str) -> str:
        make = ["env", "-u", "PYTHON", "make", "-n", "--no-print-directory", "-C", str(tmp_path), "gpu-check", *words]
        return subprocess.run(make, capture_output=True, text=True, check=True).stdout.split()[0]

    assert command() == "python3"
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert command() == ".venv/bin/python"
    assert command("PYTHON=/opt/python3") == "/opt/python3"
