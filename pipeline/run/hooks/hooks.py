"""The hooks of a run: their list, in the order in which they are called, and the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.micro_batch import StepBatch
from pipeline.engines.base import StepResult
from pipeline.run.hooks.hook import Hook, HookContext, StepNumbers


def _always(_run: ResolvedRun) -> bool:
    return True


HOOKS: dict[str, Callable[[ResolvedRun], bool]] = {
    "memory": _always,
    "step_time": _always,
    "profile": lambda run: run.config.profile is not None,
    "stragglers": lambda run: run.topology.world_size > 1,
    "shares": lambda run: run.config.parallel.shares == "auto" and run.topology.dp > 1,
    "student_samples": lambda run: run.config.distill is not None and run.config.distill.on_policy is not None,
    "metrics": _always,
    "compilations": lambda run: run.config.compile.enabled is not False,
    "measured": _always,
    "garbage": lambda run: run.config.run.gc_every > 0,
    "log_rotation": _always,
}
"""Module of each hook in this folder -> whether a run has it. Hooks that a run lacks are not imported.

`memory` and `step_time` come first, since other hooks complete or report their numbers. `profile` is outside
`stragglers`, whose time would otherwise include the start of a profile. `metrics` writes the row that the hooks above
it have completed.
"""


def make_hooks(context: HookContext) -> Hooks:
    """Makes the hooks that the run's config asks for (each module has a function `make`), and its `callbacks`."""
    run = context.here.run
    names = [name for name, has in HOOKS.items() if has(run)]
    own = [import_module(f"pipeline.run.hooks.{name}").make(context) for name in names]
    return Hooks([*own, *_callbacks(context)])


def _callbacks(context: HookContext) -> list[Hook]:
    """Makes the user's hooks, which come last.

    Raises:
        ConfigError: a function of `callbacks` returned no hook.
    """
    functions = context.here.prepared.functions.callbacks
    made = [function.call(context) for function in functions]
    for i, (function, hook) in enumerate(zip(functions, made, strict=True)):
        if not isinstance(hook, Hook):
            remedy = "def make(context): return an object of a class derived from pipeline.run.hooks.hook.Hook"
            raise ConfigError(f"callbacks.{i}", function.name, why=f"it returned {hook!r}, no Hook", remedy=remedy)
    return made


class Hooks:
    """Calls every hook at the points of a step (`hook.Hook`).

    Args:
        hooks: the hooks, in the order in which they are called.
    """

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = hooks
        self._flagged = [hook for hook in hooks if type(hook).flag is not Hook.flag]

    def start(self, step: int) -> None:
        """Calls `Hook.start`."""
        for hook in self._hooks:
            hook.start(step)

    def batches(self, steps: Iterable[StepBatch]) -> Iterable[StepBatch]:
        """Wraps the iterable of batches by `Hook.batches`; the first hook is the outermost."""
        for hook in reversed(self._hooks):
            steps = hook.batches(steps)
        return steps

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[StepBatch]:
        """Enters the context managers of `Hook.step`; yields the last hook's batch."""
        with ExitStack() as stack:
            for hook in self._hooks:
                batch = stack.enter_context(hook.step(batch))
            yield batch

    def flags(self) -> list[bool]:
        """Returns this rank's flags, one for each hook that has a flag."""
        return [hook.flag() for hook in self._flagged]

    def needs_finished(self, step: int) -> bool:
        """Tells whether any hook needs a step finished before the next one begins."""
        return any(hook.needs_finished(step) for hook in self._hooks)

    def numbers(self, step: int, result: StepResult, flags: Sequence[bool], *, begun: int) -> None:
        """Calls `Hook.numbers`.

        Args:
            result: the numbers of a finished step, the same on all ranks.
            flags: whether any rank had set the flag, for each hook that has a flag; empty if no flag was set.
            begun: number of the step that was begun last.
        """
        numbers = StepNumbers(step, result, begun, result.parts)
        raised = {hook for hook, flag in zip(self._flagged, flags, strict=False) if flag}
        for hook in self._hooks:
            hook.numbers(numbers, raised=hook in raised)

    def after_step(self, step: int) -> None:
        """Calls `Hook.after_step`."""
        for hook in self._hooks:
            hook.after_step(step)

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """Enters the context managers of `Hook.outside_step`."""
        with ExitStack() as stack:
            for hook in self._hooks:
                stack.enter_context(hook.outside_step())
            yield

    def end(self, step: int) -> None:
        """Calls `Hook.end`."""
        for hook in self._hooks:
            hook.end(step)
