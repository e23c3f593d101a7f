"""Checkpoint copies in a node's memory (`run.in_memory_checkpoints`), which outlive its ranks, not its agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from pipeline.checkpoint.memory.memory_folder import MemoryFolder, remove, used
from pipeline.config.sections.run import RunSection


@contextmanager
def kept_while_here(section: RunSection | None) -> Iterator[None]:
    """Keeps the copies for the starts of this job; removes them when the agent leaves it. No torch.

    An agent that is killed leaves them: the next one on this node, or the next start of the run, uses or removes them.

    Args:
        section: `run` of the ranks' config; None where that is refused.
    """
    memory = _folder(section)
    with ExitStack() as stack:
        if memory is not None:
            stack.callback(remove, memory)
            with suppress(OSError):  # the ranks report it
                stack.enter_context(used(memory))
        yield


def _folder(section: RunSection | None) -> MemoryFolder | None:
    """The run's folder; None where the config names none, or is refused."""
    if section is None or section.in_memory_checkpoints is None:
        return None
    return MemoryFolder.of(section.in_memory_checkpoints, section.local_dir)
