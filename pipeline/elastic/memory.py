"""The checkpoint copies in a node's memory (`run.in_memory_checkpoints`) outlive its ranks, and go with its agent."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from headrace.base.cli import add_config_arguments
from headrace.base.errors import HeadraceError
from pipeline.checkpoint.memory_folder import MemoryFolder, remove, used


@contextmanager
def kept_while_here(arguments: Sequence[str]) -> Iterator[None]:
    """Keeps the copies for the starts of this job; removes them when the agent leaves it. No torch.

    An agent that is killed leaves them: the next one on this node, or the next start of the run, uses or removes them.

    Args:
        arguments: of the ranks, --config and --set.
    """
    memory = _folder(arguments)
    with ExitStack() as stack:
        if memory is not None:
            stack.callback(remove, memory)
            with suppress(OSError):  # the ranks report it
                stack.enter_context(used(memory))
        yield


def _folder(arguments: Sequence[str]) -> MemoryFolder | None:
    """The run's folder; None where the config names none, or is refused, which the ranks report."""
    from pipeline.config.load import load_config  # noqa: PLC0415  half a second, which other commands need not wait for

    parser = argparse.ArgumentParser(exit_on_error=False)
    add_config_arguments(parser)
    with suppress(HeadraceError, OSError, argparse.ArgumentError, SystemExit):
        given, _ = parser.parse_known_args(list(arguments))
        section = load_config(given.config, given.overrides).run
        if section.in_memory_checkpoints is not None:
            return MemoryFolder.of(section.in_memory_checkpoints, Path(section.dir))
    return None
