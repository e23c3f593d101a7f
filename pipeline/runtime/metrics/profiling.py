"""Profile of some steps of a run: a trace of operators and kernels and, on a GPU, a memory snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.config.sections.run import ProfileSection

FOLDER = "profile"
_OPEN_TRACE = "open it in https://ui.perfetto.dev or chrome://tracing"
_OPEN_MEMORY = "open it in https://docs.pytorch.org/memory_viz"
_MEMORY_EVENTS = 1_000_000
"""Number of newest allocations and frees that a memory snapshot keeps; each has its Python stack."""


class StepProfiler:
    """Profiles the steps and ranks that the config names, and writes the result into the run's directory.

    The recorded steps are also written when the run ends within them, by a stop signal or an error such as a device
    that is out of memory. It is a context manager around the training.

    Args:
        section: profile section of the config; None for no profile.
        run_dir: the run's directory.
        rank: global rank of this process.
        gpu: whether this process computes on a GPU.
        say: prints a line on rank 0.
    """

    def __init__(
        self, section: ProfileSection | None, *, run_dir: Path, rank: int, gpu: bool, say: Callable[[str], None]
    ) -> None:
        self._section, self._folder, self._rank, self._say = section, run_dir / FOLDER, rank, say
        self._gpu = gpu
        self._profiler: profile | None = None
        self._first = self._newest = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            self._write()

    def begin(self, step: int) -> None:
        """Starts to record if the profile begins with this step; call it before each step."""
        section = self._section
        if section is None or not section.steps[0] <= step <= section.steps[1]:
            return
        self._first, self._newest = self._first or step, step
        if self._profiler is None and self._rank in section.ranks:
            self._start()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Marks a step in the trace; a context manager around its forward, backward and update."""
        with nullcontext() if self._profiler is None else record_function(f"step {step}"):
            yield

    def begins_with(self, step: int) -> bool:
        """Tells whether the profile begins with this step."""
        return self._section is not None and step == self._section.steps[0]

    def ends_with(self, step: int) -> bool:
        """Tells whether the profile ends with this step."""
        return self._section is not None and step == self._section.steps[1]

    def finish(self, step: int) -> None:
        """Writes the profile if it ends with this step; call it after each step."""
        if not self.ends_with(step) or not self._first:
            return
        assert self._section is not None
        if self._profiler is not None:
            self._write()
        if self._rank == 0 and 0 not in self._section.ranks:
            ranks = ", ".join(map(str, self._section.ranks))
            self._say(f"profile of steps {self._steps}, of ranks {ranks}: in {self._folder}; {_OPEN_TRACE}")

    @property
    def _steps(self) -> str:
        return f"{self._first}-{self._newest}"

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
        if self._gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def _write(self) -> None:
        """Stops recording and writes the files; a full disk is a warning. A file appears only when it is complete."""
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()  # waits for the GPU
        name = f"steps-{self._steps}-rank-{self._rank}"
        trace, memory = self._folder / f"{name}.trace.json.gz", self._folder / f"{name}.memory.pickle"
        try:
            self._folder.mkdir(exist_ok=True)
            _replace(trace, profiler.export_chrome_trace)
            said = f"profile of steps {self._steps}: {trace} ({_OPEN_TRACE})"
            if self._gpu:
                _replace(memory, torch.cuda.memory._dump_snapshot)
                said += f"; {memory} ({_OPEN_MEMORY})"
        except (OSError, RuntimeError) as error:
            said = f"warning: the profile of steps {self._steps} could not be written: {error}; training goes on"
        finally:
            if self._gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        self._say(said)


def _replace(path: Path, write: Callable[[str], None]) -> None:
    """Writes a temporary file and moves it into place. It keeps the suffix, from which torch tells the compression."""
    partial = path.with_name(f".partial-{path.name}")
    write(str(partial))
    partial.replace(path)
