"""Runs many small training runs, each on its own processes, without paying for imports more than once.

    python -m pipeline.proof.worker CASES.json DIRECTORY

The parent imports everything, which takes seconds, and then forks the ranks of one case after another, which takes
milliseconds. Every case begins with clean libraries: DeepSpeed keeps its process groups in globals, so that two layouts
in one process would get in each other's way. The parent itself never computes, and never has a second thread.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.launch.group import free_port
from pipeline.proof.case import Case, CaseResult, read_cases, read_outcome, write_outcome

TIMEOUT_S = 240.0
"""After which a case counts as hanging. The slowest in the tests takes about a tenth of it."""


def run_cases(
    cases: Sequence[Case],
    directory: Path,
    *,
    timeout_s: float = TIMEOUT_S,
    told: Callable[[Case, CaseResult], None] | None = None,
) -> dict[str, CaseResult]:
    """Runs cases one after another and returns what each gave, by name. Failures are outcomes, too.

    To be called in a process that has no threads and no process group.

    Args:
        cases: in order; a case may resume from one before it.
        directory: gets a directory per case.
        timeout_s: seconds after which a case is killed.
        told: called after each case.
    """
    _on_cpu()
    _import_once(cases)
    outcomes: dict[str, CaseResult] = {}
    for case in cases:
        source = outcomes.get(case.again[0]) if case.again else None
        if source is not None and source.failed is not None:  # a failure stays where it happened
            case = replace(case, again=None)  # noqa: PLW2901
        outcomes[case.name] = _run(case, directory, timeout_s)
        if told is not None:
            told(case, outcomes[case.name])
    return outcomes


def _on_cpu() -> None:
    """Proofs run on CPU processes, on a machine with GPUs too: what is proven is the layout, not the kernel."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _import_once(cases: Sequence[Case]) -> None:
    kinds = {case.config["model"].get("config", {}).get("model_type") for case in cases} - {None}
    preload({case.config.get("engine", "deepspeed") for case in cases}, kinds)


def preload(engines: Collection[str], kinds: Iterable[str]) -> None:
    """Imports what the ranks would each import for themselves; some of it they would find only at the first step.

    Args:
        engines: torch, deepspeed.
        kinds: of models, as Hugging Face's `model_type` names them.
    """
    modules = ["pipeline.proof.trial", "transformers.generation.utils"]
    modules += [f"transformers.models.{kind}.modeling_{kind}" for kind in sorted(kinds)]
    for engine in engines:
        modules += _IMPORTS[engine]
    for name in modules:
        with contextlib.suppress(ImportError):  # whoever needs it says so better
            importlib.import_module(name)
    if "deepspeed" in engines:
        with contextlib.suppress(ImportError, RuntimeError):
            from pipeline.engines.deepspeed.operators import skip_shared_memory  # noqa: PLC0415

            skip_shared_memory()


_IMPORTS = {
    "torch": (
        "pipeline.engines.torch_native.reference",
        "pipeline.engines.torch_native.parallel",
        "pipeline.engines.torch_native.pipeline",
    ),
    "deepspeed": (
        "pipeline.engines.deepspeed.zero",
        "pipeline.engines.deepspeed.pipeline",
        # imported when a model is wrapped; the first brings torch's compiler along, which takes two seconds
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.module_inject.auto_ep_layer",
        "torch.utils.cpp_extension",
    ),
}


def _run(case: Case, directory: Path, timeout_s: float) -> CaseResult:
    started = time.monotonic()
    own = directory / case.name
    own.mkdir(parents=True)
    port = free_port()
    ranks = {_fork(case, own, rank=rank, port=port): rank for rank in range(case.processes)}
    cpu: list[float] = []
    failed = _wait(ranks, own, cpu, deadline=started + timeout_s)
    outcome = read_outcome(own) if failed is None else CaseResult(own, failed=failed)
    outcome = replace(outcome, seconds=time.monotonic() - started, cpu_seconds=sum(cpu))
    write_outcome(outcome)
    return outcome


def _fork(case: Case, own: Path, *, rank: int, port: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with _said_to(own / f"rank-{rank}.log"):
            try:
                from pipeline.proof.trial import go  # noqa: PLC0415

                go(case, own, rank=rank, port=port)
                code = 0
            except BaseException:  # whatever it is, the parent must hear of it
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _said_to(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    yield


def _wait(ranks: dict[int, int], own: Path, cpu: list[float], *, deadline: float) -> str | None:
    """Waits for all ranks. Returns what the first that failed said last, after ending the others."""
    left = dict(ranks)
    while left:
        for child in list(left):
            done, status, used = os.wait4(child, os.WNOHANG)
            if not done:
                continue
            rank = left.pop(child)
            cpu.append(used.ru_utime + used.ru_stime)
            code = os.waitstatus_to_exitcode(status)
            if code:
                _end(left)
                return _last_words(own, rank, f"rank {rank} ended with {code}")
        if time.monotonic() > deadline:
            rank = min(left.values())
            _end(left)
            return _last_words(own, rank, f"ranks {sorted(left.values())} were still running at the time limit")
        time.sleep(0.02)
    return None


def _end(left: dict[int, int]) -> None:
    # the others wait for the one that failed; a moment lets one that failed by itself say so first
    time.sleep(0.5)
    for child in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _last_words(own: Path, rank: int, what: str) -> str:
    lines = (own / f"rank-{rank}.log").read_text(errors="replace").splitlines()
    return "\n".join([what, *lines[-12:]])


def main() -> int:
    """Runs the cases of a file."""
    path, directory = sys.argv[1:]
    run_cases(read_cases(Path(path)), Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
