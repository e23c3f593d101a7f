"""Steps to execute on the fake device, and the process that executes them. No torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.load import load_config
from pipeline.config.rules.resolve import ResolvedRun, resolve

EAGER = "compile.enabled=false"
"""Override that turns compilation off: operators are counted one by one, and a compiled layer counts as one."""

_WORKER = (sys.executable, "-m", "pipeline.plan.fake_gpu.worker")


@dataclass(frozen=True)
class StepCase:
    """A step to execute.

    Attributes:
        config: path of the config file.
        processes: world size.
        pp_rank: pipeline rank to execute; on every other axis its rank is 0.
        vocabulary: number of ids of the tokenizer, for a model whose config does not give it.
        overrides: overrides of the config, as texts of `--set`.
        steps: number of steps; the last one is reported.
        cpu: whether to count as on a CPU: offloaded tensors in the host's memory, and gloo's copies of the inputs of a
            reduce-scatter.
        begun: whether the run is resumed, in which case any number of processes is accepted (see `resolve`).
        imbalance: rows of the fullest expert-parallel rank over the mean; None for the load that `expert_load` assumes.
    """

    config: str
    processes: int
    pp_rank: int = 0
    vocabulary: int = 128_256
    overrides: tuple[str, ...] = ()
    steps: int = 1
    cpu: bool = False
    begun: bool = False
    imbalance: float | None = None

    def resolved(self) -> ResolvedRun:
        """Resolves the run of the case."""
        config = load_config(self.config, [EAGER, *self.overrides])
        return replace(resolve(config, world_size=self.processes, begun=self.begun), imbalance=self.imbalance)


def run_cases(
    cases: Sequence[StepCase], *, timeout_s: float | None = None, cwd: Path | None = None
) -> list[dict[str, Any]]:
    """Executes cases in a new process, because the fake device must be registered before torch is imported.

    A fork of that process executes each case, since several layouts in one process would share process groups.

    Args:
        cases: cases to execute, in order.
        timeout_s: time limit for all cases together, in seconds; None for no limit.
        cwd: directory to which paths of configs are relative; None for the present one.

    Returns:
        For each case "report" (`step.StepReport` as a dictionary), or "error" and "traceback", and of an
        error that breaks a contract of CUDA "contract", its name; and "seconds".

    Raises:
        RuntimeError: the process ended early; the message has the end of its output.

    An interrupt or the time-out kills the process.
    """
    lines = "".join(_line(case) for case in cases)
    done = subprocess.run(_WORKER, input=lines, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(results) != len(cases):
        raise _ended(done.returncode, done.stderr)
    return results


@contextmanager
def case_process() -> Iterator[Callable[[StepCase], dict[str, Any]]]:
    """Starts a process as `run_cases` does, for one case after another; kills it at the end of the block.

    Yields:
        a function that executes a case and returns its result.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(_WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        to_process, from_process = process.stdin, process.stdout

        def result(case: StepCase) -> dict[str, Any]:
            with suppress(BrokenPipeError):
                to_process.write(_line(case))
                to_process.flush()
            for line in from_process:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
            said.seek(0)
            raise _ended(process.wait(), said.read())

        try:
            yield result
        finally:
            process.kill()
            process.communicate()


def _line(case: StepCase) -> str:
    return json.dumps(asdict(case)) + "\n"


def _ended(code: int, said: str) -> RuntimeError:
    return RuntimeError(f"the process with the fake device ended early (code {code}):\n{said[-3000:]}")
