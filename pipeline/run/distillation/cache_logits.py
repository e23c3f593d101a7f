"""`headrace cache-logits --config F`: runs a distillation's teacher once, and keeps its likeliest ids per position.

The config is that of `headrace distill`, with both `distill.teacher` and `distill.logits`, the directory to write.
Afterwards the same config distils without a teacher in memory. See docs/how-to/distillation.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from foundation.errors import ConfigError
from foundation.paths import is_store_url
from foundation.remote_output import local_output, upload_finished
from foundation.remote_publish import check_can_publish
from pipeline.config.batch import BatchSizes
from pipeline.config.load import read_config
from pipeline.config.rules.data import check_data
from pipeline.config.rules.distillation import check_distillation
from pipeline.config.rules.resolve import ResolvedRun, check_length, steps_of
from pipeline.config.schedule import make_schedule
from pipeline.config.sections.layout import ParallelSection
from pipeline.config.sections.run import Config
from pipeline.config.topology import Topology
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.arguments import add_arguments as add_run_arguments
from pipeline.runtime.launch.arguments import start_processes

if TYPE_CHECKING:
    from pipeline.data.mixture import DataMixture
    from pipeline.run.distillation.write_logits import LogitsPlan


def main() -> int:
    """Runs the command line of `headrace cache-logits`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run_arguments(parser)
    text = "compute the I-th part of N (from 0), e.g. of a job array; any process that finds all parts there finishes"
    parser.add_argument("--part", metavar="I/N", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Computes this process's part of the cached logits; returns the exit code."""
    start_processes(arguments)
    config = read_config(arguments.config, arguments.overrides).config
    resolved = _resolve(config)
    rank, processes = _part(arguments.part)

    from pipeline.data.mixing_weights import Extent  # noqa: PLC0415
    from pipeline.data.mixture import open_mixture  # noqa: PLC0415

    extent = Extent(resolved.steps, resolved.batch.samples)
    mixture = open_mixture(config.data, seed=config.run.seed, extent=extent)
    complete = _compute(resolved, mixture, rank=rank, processes=processes)
    assert config.distill is not None
    print(
        f"{config.distill.logits} is complete" if complete else "the parts of other processes are missing", flush=True
    )
    return 0


def _resolve(config: Config) -> ResolvedRun:
    """Resolves the run for one process, without the student's layout."""
    section, data = config.distill, config.data
    if section is None or section.teacher is None or section.logits is None:
        field = "distill.logits" if section is not None and section.teacher is not None else "distill.teacher"
        why = "the job reads distill.teacher and writes distill.logits"
        raise ConfigError(field, why=why, remedy='"distill": {"teacher": "models/teacher", "logits": "out/logits"}')
    check_distillation(section, data)
    check_data(data)
    if not isinstance(config.train_batch_size, int):
        why = "which samples a run draws depends on it, and here there is no layout to derive it from"
        raise ConfigError("train_batch_size", config.train_batch_size, why=why, remedy="give the number")
    samples, length = config.train_batch_size, data.sequence_length
    check_length(config.run)
    alone = config.model_copy(update={"engine": "torch", "parallel": ParallelSection()})
    micro = config.train_micro_batch_size_per_gpu or min(8, samples)
    batch = BatchSizes(samples, micro, -(-samples // micro), 1, length)
    steps = steps_of(config.run, batch)
    schedule = make_schedule(config.scheduler, lr=config.optimizer.params.lr, steps=steps)
    return ResolvedRun(alone, Topology(), batch, steps, schedule)


def _part(given: str | None) -> tuple[int, int]:
    """Returns (part, parts) of this process."""
    launch = detect()
    if given is None:
        return launch.rank, launch.world_size
    first, _, count = given.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise ConfigError("--part", given, why="it is not I/N with I from 0 to N - 1", remedy="e.g. --part 0/8")
    return int(first), int(count)


def _compute(run: ResolvedRun, mixture: DataMixture, *, rank: int, processes: int) -> bool:
    from pipeline.data.dataset import tokenizer_details  # noqa: PLC0415
    from pipeline.engines.build import pick_device  # noqa: PLC0415
    from pipeline.models.hf_config import resolve_hf_config  # noqa: PLC0415
    from pipeline.run.distillation.find_teacher import open_teacher  # noqa: PLC0415
    from pipeline.run.distillation.teacher import Teacher  # noqa: PLC0415
    from pipeline.run.distillation.write_logits import is_written, write_logits  # noqa: PLC0415
    from pipeline.run.prepare import check_tokenizer, folder_parents  # noqa: PLC0415

    section = run.config.distill
    assert section is not None
    assert section.teacher is not None
    assert section.logits is not None
    tokenizer = tokenizer_details(mixture.sources[0].manifest)
    check_tokenizer("distill.teacher", section.teacher, tokenizer)
    length = run.config.data.sequence_length
    vocabulary = resolve_hf_config(run.config.model, tokenizer=tokenizer, sequence_length=length).vocab_size
    found = open_teacher(run, vocab_size=vocabulary)  # the student's size, to compare the teacher's with
    # without `logits`, since the teacher's folder itself is to be named
    folders = folder_parents(run.config.model, section.model_copy(update={"logits": None}))
    plan = _plan(run, mixture, vocab_size=vocabulary, teacher=folders["distill.teacher"]["fingerprint"])
    if is_written(plan, section.logits):
        return True
    if is_store_url(section.logits):
        check_can_publish(section.logits)
    device = pick_device(detect(), run.config.launch)
    if rank == 0:
        size = plan.tokens * plan.format.bytes_per_token
        print(
            f"{plan.tokens:,} tokens, {plan.format.bytes_per_token} bytes each ({plan.format.top_k} ids and the rest):"
            f" {size / 1e9:,.3f} GB in {len(plan.tasks):,} files",
            flush=True,
        )
    teacher = Teacher(found, run, device=device, mesh=None)
    parents = {**mixture.parents, "distill.teacher": folders["distill.teacher"]}
    complete = write_logits(
        plan,
        local_output(section.logits),
        teacher.logits,
        batch=run.batch.micro,
        parents=parents,
        rank=rank,
        processes=processes,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if complete:
        upload_finished(section.logits)
    return complete


def _plan(run: ResolvedRun, mixture: DataMixture, *, vocab_size: int, teacher: str) -> LogitsPlan:
    from pipeline.data.dataset import tokenizer_details  # noqa: PLC0415
    from pipeline.engines.common import model_dtype  # noqa: PLC0415
    from pipeline.run.distillation.cached_logits import LogitsFormat  # noqa: PLC0415
    from pipeline.run.distillation.write_logits import LogitsPlan, drawn_windows, merged, records_per_file  # noqa: PLC0415

    config, section = run.config, run.config.distill
    assert section is not None
    length, top_k = config.data.sequence_length, min(section.top_k, vocab_size)
    layout = LogitsFormat(
        top_k=top_k,
        temperature=section.temperature,
        vocab_size=vocab_size,
        sequence_length=length,
        mask_documents=config.data.mask_documents,
        tokenizer=tokenizer_details(mixture.sources[0].manifest)["fingerprint"],
        teacher=teacher,
        records_per_file=records_per_file(length, top_k),
        dtype=str(model_dtype(config)).removeprefix("torch."),
    )
    return LogitsPlan(layout, *merged(mixture.sources, drawn_windows(mixture.order, run.steps * run.batch.samples)))
