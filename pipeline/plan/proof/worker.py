"""Runs many small training runs, each on its own processes, while importing all libraries only once.

    python -m pipeline.plan.proof.worker CASES.json DIRECTORY

The parent imports everything, which takes seconds, and then forks the ranks of one case after another, which takes
milliseconds. Every case starts with fresh library state: DeepSpeed keeps its process groups in globals, and two layouts
in one process would interfere. The parent never computes and never has a second thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from foundation.configfile import ConfigTree
from foundation.errors import ConfigError, DataError
from pipeline.plan.proof.case import Case, CaseResult, read_cases, read_result, write_result
from pipeline.run.preload import preload
from pipeline.runtime.launch.group import free_port

REFUSAL = "refusal.txt"
"""File in a case's directory with the error with which one of its ranks refused the run."""

TIMEOUT_S = 240.0
"""Seconds after which a case counts as hung. The slowest case in the tests takes about a tenth."""


def run_cases(
    cases: Sequence[Case],
    directory: Path,
    *,
    timeout_s: float = TIMEOUT_S,
    on_result: Callable[[Case, CaseResult], None] | None = None,
    gpus: bool = False,
) -> dict[str, CaseResult]:
    """Runs cases one after another and returns their results by name. A failed case has a result with an error.

    Call it in a process that has no threads and no process group.

    Args:
        cases: cases in order; each may resume from an earlier one.
        directory: directory that gets a subdirectory per case.
        timeout_s: seconds after which a case is killed.
        on_result: function called after each case.
        gpus: whether every rank computes on a GPU of this machine; this process must not have used them.
    """
    if not gpus:
        use_cpu()
    _preload_for(cases)
    results: dict[str, CaseResult] = {}
    for case in cases:
        source = results.get(case.resume_from[0]) if case.resume_from else None
        if source is not None and source.error is not None:  # the failure of one case must not fail another
            case = replace(case, resume_from=None)  # noqa: PLW2901
        results[case.name] = _run(case, directory, timeout_s, gpus=gpus)
        if on_result is not None:
            on_result(case, results[case.name])
    return results


def use_cpu() -> None:
    """Hides the GPUs of this machine from a proof, which tests the layout, not the kernels."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _preload_for(cases: Sequence[Case]) -> None:
    model_types = {case.config["model"].get("config", {}).get("model_type") for case in cases} - {None}
    preload(["pipeline.plan.proof.rank"], {case.config.get("engine", "deepspeed") for case in cases}, model_types)
    if any(case.config.get("engine", "deepspeed") == "deepspeed" and _offloads_to_disk(case.config) for case in cases):
        from pipeline.engines.deepspeed.operators import compile_async_io  # noqa: PLC0415

        compile_async_io()  # the time limit is for a case, not for a compiler


def _offloads_to_disk(config: ConfigTree) -> bool:
    zero = config.get("zero_optimization", {})
    return any(zero.get(name, {}).get("device") == "nvme" for name in ("offload_optimizer", "offload_param"))


def _run(case: Case, directory: Path, timeout_s: float, *, gpus: bool) -> CaseResult:
    started = time.monotonic()
    case_directory = directory / case.name
    case_directory.mkdir(parents=True)
    port = free_port()
    ranks = {_fork(case, case_directory, rank=rank, port=port, gpu=gpus): rank for rank in range(case.processes)}
    cpu: list[float] = []
    error = _wait(ranks, case_directory, cpu, deadline=started + timeout_s)
    refusal = case_directory / REFUSAL
    refused = refusal.read_text() if refusal.exists() else None
    failed = CaseResult(case_directory, error=error, refusal=refused)
    result = read_result(case_directory) if error is None else failed
    result = replace(result, seconds=time.monotonic() - started, cpu_seconds=sum(cpu))
    write_result(result)
    return result


def _fork(case: Case, case_directory: Path, *, rank: int, port: int, gpu: bool) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with _output_to(case_directory / f"rank-{rank}.log"):
            try:
                from pipeline.plan.proof.rank import run_rank  # noqa: PLC0415

                run_rank(case, case_directory, rank=rank, port=port, gpu=gpu)
                code = 0
            except BaseException as error:  # the parent must see any error
                traceback.print_exc()
                if isinstance(error, ConfigError | DataError):
                    (case_directory / REFUSAL).write_text(str(error))
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    yield


def _wait(ranks: dict[int, int], case_directory: Path, cpu: list[float], *, deadline: float) -> str | None:
    """Waits for all ranks. If one fails, kills the others and returns the last lines of its output."""
    running = dict(ranks)
    while running:
        for child in list(running):
            done, status, usage = os.wait4(child, os.WNOHANG)
            if not done:
                continue
            rank = running.pop(child)
            cpu.append(usage.ru_utime + usage.ru_stime)
            code = os.waitstatus_to_exitcode(status)
            if code:
                _kill(running)
                return _last_lines(case_directory, rank, f"rank {rank} exited with code {code}")
        if time.monotonic() > deadline:
            rank = min(running.values())
            _kill(running)
            return _last_lines(
                case_directory, rank, f"ranks {sorted(running.values())} were still running at the time limit"
            )
        time.sleep(0.02)
    return None


def _kill(running: dict[int, int]) -> None:
    # the other ranks wait for the failed one; half a second lets ranks that failed themselves write their error
    time.sleep(0.5)
    for child in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _last_lines(case_directory: Path, rank: int, what: str) -> str:
    lines = (case_directory / f"rank-{rank}.log").read_text(errors="replace").splitlines()
    return "\n".join([what, *lines[-12:]])


def main() -> int:
    """Runs the cases of a file."""
    path, directory = sys.argv[1:]
    run_cases(read_cases(Path(path)), Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
