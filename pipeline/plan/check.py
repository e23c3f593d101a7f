"""`python -m pipeline check --config F`: prints the resolved run and warnings, or what is wrong with the config.

The config's rules come first and need no torch; checks of data and model follow.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

from foundation.cli import add_config_arguments
from foundation.errors import ConfigError
from foundation.paths import is_url
from foundation.quick_imports import quick_imports
from foundation.remote_run import remote_checkpoints, up_to_date
from pipeline.checkpoint.format.naming import finished_checkpoints
from pipeline.config.load import LoadedConfig, read_config
from pipeline.config.past_stages import continued
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.optimizers import UpdateScope
from pipeline.plan.fake_gpu.requirements import check_exact
from pipeline.plan.imbalance import add_imbalance_argument, with_imbalance
from pipeline.run.before.summary import Entry, as_json, prepared_entries, resolved_entries
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.arguments import has_begun

if TYPE_CHECKING:
    from pipeline.run.prepare import PreparedRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `python -m pipeline check`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--processes", type=_at_least_one, metavar="N", help="number of processes (default: as started, or 1)"
    )
    parser.add_argument(
        "--rules-only", action="store_true", help="check the config alone, without data and model: takes under a second"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of a device, e.g. 80GB: whether a rank fits, and the micro-batch that does",
    )
    add_imbalance_argument(parser)
    parser.add_argument(
        "--exact",
        action="store_true",
        help="execute one step at the config's size and world on fake tensors for its peak memory, in place of the"
        " formulas: takes seconds to minutes, and a C++ compiler",
    )
    text = "print only the step of the run's newest checkpoint (0 without any) and its directory, for job scripts"
    verbose = f"print every line, in the place of the answer in {MOST_LINES} lines"
    parser.add_argument("--verbose", action="store_true", help=verbose)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, with the resolved config")
    parser.add_argument("--progress", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Prints the resolved run."""
    loaded = read_config(arguments.config, arguments.overrides)
    config = loaded.config
    if arguments.progress:
        run_dir = up_to_date(config.run.dir)
        steps = [step for step, _ in finished_checkpoints(run_dir)]
        if is_url(config.run.dir):
            steps += [each.step for each in remote_checkpoints(config.run.dir)]
        print(max(steps, default=0), run_dir)
        return 0
    entries = summary(loaded, arguments)
    if arguments.json:
        print(json.dumps({**as_json(entries), "config": config.model_dump(mode="json")}, indent=2))
        return 0
    for line in (_line(entry) for entry in entries) if arguments.verbose else answer_lines(entries):
        print(line)
    return 0


MOST_LINES = 20
"""Most lines of an answer."""
_WIDTH = 120
"""Most characters of a line that is no warning."""
_FIRST = ("layout", "batch", "length", "model", "memory", "memory fit", "start", "data")
_UNUSUAL = ("auto", "ignored", "note", "differs", "warnings")
_DETAILS = ("processes", "compile", "checkpointing", "samples", "tokenizer", "training state", "held-out", "stragglers")


def answer_lines(entries: Sequence[Entry]) -> list[str]:
    """The summary in at most `MOST_LINES` lines: what would run, its memory, then whole warnings; the rest is counted.

    Args:
        entries: entries of `summary`.
    """

    def place(entry: Entry) -> int:
        return _FIRST.index(entry.label) if entry.label in _FIRST else len(_FIRST)

    unusual = [each for each in entries if each.label in _UNUSUAL][: MOST_LINES - len(_FIRST) - 1]
    usual = [each for each in entries if each.label not in (*_UNUSUAL, *_DETAILS)]
    usual = sorted(usual, key=place)[: MOST_LINES - 1 - len(unusual)]
    lines = [_line(each, most=None if each.label == "data" else _WIDTH) for each in usual]  # paths may be long
    left = [each for each in entries if each not in usual and each not in unusual]
    warned = sum(each.label in _UNUSUAL for each in left)
    more = f"{len(left)} more lines{f', {warned} of them warnings' if warned else ''}; --json: all values"
    return [*lines, *map(_line, unusual), f"{'--verbose':>14}  {more}"]


def _line(entry: Entry, *, most: int | None = None) -> str:
    label = "warning" if entry.label == "warnings" else entry.label
    text = entry.text if most is None else shorten(entry.text, most - 16, placeholder=" ...")
    return f"{label:>14}  {text}"


def summary(loaded: LoadedConfig, arguments: argparse.Namespace) -> list[Entry]:
    """Checks a config, and returns the entries to print under the options that `add_arguments` declares.

    Raises:
        ConfigError, DataError: the config cannot run.
    """
    config = loaded.config
    processes = arguments.processes or detect().world_size
    run_dir = up_to_date(config.run.dir)
    config, begun = continued(config, run_dir), has_begun(run_dir, config=config)
    resolved = resolve(config, world_size=processes, begun=begun)
    resolved = with_imbalance(resolved, arguments.imbalance)
    if arguments.exact:
        if arguments.rules_only:
            raise ConfigError("--exact", True, why="--rules-only looks at no model", remedy="give one of the two")
        check_exact(
            config.engine,
            distils=config.distill is not None,
            matrices=config.optimizer.kind.scope is UpdateScope.MATRIX,
            exchange=expert_exchange(config) if resolved.topology.ep > 1 else "all_to_all",
        )
    entries = [Entry(label, ", ".join(texts), list(texts)) for label, texts in loaded.notes]
    entries += [Entry("differs", text, text) for text in loaded.differs]
    entries += resolved_entries(resolved)
    if not arguments.rules_only:
        _check_data(resolved)
        with quick_imports():
            from pipeline.run.before.advice import advice  # noqa: PLC0415  imports torch, which takes seconds
            from pipeline.run.before.generation_cost import generation_entries  # noqa: PLC0415
            from pipeline.run.before.memory_summary import memory_bytes, memory_entries  # noqa: PLC0415
            from pipeline.run.before.task_cost import task_entries  # noqa: PLC0415
            from pipeline.run.before.teacher_memory import teacher_entries  # noqa: PLC0415
            from pipeline.run.prepare import prepare  # noqa: PLC0415

            device_memory = None if arguments.memory is None else memory_bytes(arguments.memory)
            prepared = prepare(resolved)  # imports the model's class
        entries += prepared_entries(prepared)
        if arguments.exact:
            entries += _exact_entries(arguments, prepared, processes=processes, begun=begun, memory=device_memory)
        else:
            entries += memory_entries(resolved, prepared.model, memory=device_memory)
        entries += teacher_entries(prepared, memory=device_memory)
        entries += [*generation_entries(prepared), *task_entries(prepared)]
        warnings = dict.fromkeys(text for stage in prepared.stages or (prepared,) for text in advice(stage))
        entries += [Entry("warnings", text, text) for text in warnings]
    return entries


def _check_data(resolved: ResolvedRun) -> None:
    """Refuses missing or unfit data as `prepare` does, but before torch is imported, which takes seconds."""
    from pipeline.data.stage_mixtures import open_mixtures  # noqa: PLC0415  imports numpy

    open_mixtures(resolved, stat_files=False)


def _exact_entries(
    arguments: argparse.Namespace, prepared: PreparedRun, *, processes: int, begun: bool, memory: int | None
) -> Iterator[Entry]:
    """Entries for the memory and the work of an executed step."""
    from pipeline.data.dataset import tokenizer_details  # noqa: PLC0415  imports torch
    from pipeline.plan.fake_gpu.exact import RunInputs, execute, step_entries  # noqa: PLC0415
    from pipeline.run.before.memory_summary import Executed, memory_entries  # noqa: PLC0415

    vocabulary = tokenizer_details(prepared.mixture.sources[0].manifest)["vocab_size"]
    source = RunInputs(str(arguments.config), arguments.overrides, processes, begun, vocabulary, arguments.imbalance)
    steps: list[Executed] = []

    def executed(ranks: Sequence[int]) -> Executed:
        steps.append(execute(source, ranks=ranks, pp=prepared.run.topology.pp, engine=prepared.run.config.engine))
        return steps[-1]

    yield from memory_entries(prepared.run, prepared.model, memory=memory, execute=executed)
    for step in steps:
        yield from step_entries(step)


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number
