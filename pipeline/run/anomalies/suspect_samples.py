"""`python -m pipeline samples RUN --step N`: prints the samples that a step was trained on. No torch, no GPU.

The text is shown as the model read it, after fill-in-the-middle. On a terminal, tokens that are in the loss are green
and other tokens dim; `--color always` keeps the colors in a pipe.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from data_prep.tokenizer.fingerprint import TOKENIZER_JSON
from foundation.directory import Manifest, read_manifest
from foundation.errors import DataError
from foundation.paths import RUN
from foundation.section import parse
from pipeline.checkpoint.checkpoint import BRANCH
from pipeline.config.batch import BatchSizes
from pipeline.config.past_stages import newest_manifest
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.data.mixture import DataMixture
from pipeline.data.skips import Skips, skips_of
from pipeline.data.stage_mixtures import open_mixtures
from pipeline.data.trained_sample import TrainedDocument, trained_documents
from pipeline.runtime.metrics.journal import read_rows

_RANGE = "N, or FIRST:LAST"
_IN_LOSS, _NOT_IN_LOSS, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `python -m pipeline samples`."""
    parser.add_argument("run", metavar="RUN", type=RUN.as_path(), help="a run directory")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", metavar="N", type=_range, help=f"the samples of a step: {_RANGE}")
    which.add_argument("--sample", metavar="I", type=_range, help=f"samples by global number, as in events: {_RANGE}")
    parser.add_argument("--rank-order", action="store_true", help="sort by data rank and micro-batch")
    parser.add_argument("--limit", metavar="n", type=int, help="print only the first n samples")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="green: tokens in the loss, dim: the others; default: auto, on a terminal",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the samples."""
    reader = RunSamples.open(arguments.run)
    chosen = list(reader.samples_of_steps(*arguments.step) if arguments.step else reader.samples(*arguments.sample))
    if arguments.rank_order:
        chosen.sort(key=lambda sample: (sample.step or 0, sample.micro_batch))
    color = {"always": True, "never": False, "auto": sys.stdout.isatty() and "NO_COLOR" not in os.environ}
    for sample in chosen[: arguments.limit]:
        print(reader.header(sample))
        for line in reader.text(sample, color=color[arguments.color]):
            print(line)
    return 0


@dataclass(frozen=True)
class Sample:
    """A sample of a run.

    Attributes:
        number: global number of the sample, from 0.
        step: step that trained on the sample; None for a sample chosen by its number.
        micro_batch: (data rank, micro-batch) that contained the sample.
        stage: number of the stage that trained on the sample, from 0.
    """

    number: int
    step: int | None
    micro_batch: tuple[int, int]
    stage: int = 0


@dataclass(frozen=True)
class RunSamples:
    """Reads the samples of a run.

    Attributes:
        run: the config, resolved for the number of processes that last started or resumed the run.
        mixtures: the data of every stage, verified to be unchanged; of the run itself without stages.
        skips: the data that the run skipped.
        tokenizer: the data's tokenizer.
        begun: last step of the other run with whose checkpoint the run began; 0 for a run of its own.
        parent: path or URL of that run.
    """

    run: ResolvedRun
    mixtures: list[DataMixture]
    skips: Skips
    tokenizer: Tokenizer
    begun: int = 0
    parent: str = ""

    @classmethod
    def open(cls, run_dir: Path) -> RunSamples:
        """Opens a run.

        Raises:
            DataError: the run does not exist, or its data is missing or has changed.
        """
        manifest = read_manifest(run_dir, kind="run")
        config = parse(Config, manifest.config)
        events = read_rows(run_dir, kind="event")
        worlds = [row["world_size"] for row in events if "world_size" in row]
        resolved = resolve(config, world_size=worlds[-1] if worlds else 1)
        mixtures = open_mixtures(resolved)
        for stage, mixture in zip(resolved.stages or (resolved,), mixtures, strict=True):
            _check_unchanged(mixture, manifest, stage=resolved.accounts.names[stage.stage])
        newest, branch = newest_manifest(run_dir), manifest.details.get(BRANCH, {"step": 0, "run": ""})
        skips = skips_of(branch if newest is None else newest.details, events, step=math.inf)
        tokenizer = Tokenizer.from_file(str(mixtures[0].sources[0].tokenizer / TOKENIZER_JSON))
        return cls(resolved, mixtures, skips, tokenizer, branch["step"], branch["run"])

    def samples_of_steps(self, first: int, last: int) -> Iterator[Sample]:
        """Yields the samples of the steps from first to last.

        Raises:
            DataError: the run does not have these steps.
        """
        if first <= self.begun:
            why = f"steps up to {self.begun} are those of {self.parent}, with whose state this run began"
            raise DataError(f"{why}\n  try: headrace samples {self.parent}")
        if not 1 <= first <= last <= self.run.steps:
            raise DataError(f"the run has steps 1 to {self.run.steps}, not {first} to {last}")
        for step in range(first, last + 1):
            stage, batch = self.run.accounts.stage(step), self.run.at(step).batch_of(step)
            for place, number in enumerate(self.skips.samples(step, self.run.accounts)):
                yield Sample(number, step, _micro_batch(batch, place), stage)

    def samples(self, first: int, last: int) -> Iterator[Sample]:
        """Yields the samples with the global numbers from first to last.

        Raises:
            DataError: the numbers are invalid.
        """
        if not 0 <= first <= last:
            raise DataError(f"samples are numbered from 0: there are no samples {first} to {last}")
        for number in range(first, last + 1):
            step, place = self.skips.place_of(number, self.run.accounts)
            batch = self.run.at(step).batch_of(step)
            yield Sample(number, None, _micro_batch(batch, place), self.run.accounts.stage(step))

    def header(self, sample: Sample) -> str:
        """Formats the sample's number, step, data rank, micro-batch and source."""
        mixture, name = self.mixtures[sample.stage], self.run.accounts.names[sample.stage]
        place = mixture.order.locate([sample.number])
        source = mixture.sources[int(place.source[0])]
        step = "" if sample.step is None else f", step {sample.step}"
        step += f", stage {name}" if name else ""
        rank, micro = sample.micro_batch
        known = self.run.topology.world_size > 1 and self.run.config.parallel.shares != "auto"  # measured shares change
        where = f" (data rank {rank}, micro-batch {micro})" if known else ""
        return f"== sample {sample.number}{step}{where}: {source.label}, window {int(place.window[0])}"

    def text(self, sample: Sample, *, color: bool = False) -> Iterator[str]:
        """Yields, for each document of the sample, a line that describes it and then the decoded text of its tokens.

        Args:
            sample: a sample of this run.
            color: whether to mark the tokens that are in the loss by ANSI colors.
        """
        stage = self.run.stages[sample.stage] if self.run.stages else self.run
        mask_documents = stage.config.data.mask_documents
        for part in trained_documents(self.mixtures[sample.stage], sample.number, mask_documents=mask_documents):
            origin, targets = part.origin, int(part.targets.sum())
            line = f"-- document {origin.document}, tokens {origin.first} to {origin.first + len(origin.tokens)}"
            line += f" of {origin.length}" + (", fill-in-the-middle" if part.rearranged else "")
            # the first token of a sample or document may have no context for a prediction: not worth a remark
            yield line + ("" if part.tokens.size - targets <= 1 else f", {targets} of {part.tokens.size} in the loss")
            yield self._colored(part) if color else self._decode(part.tokens)

    def _colored(self, part: TrainedDocument) -> str:
        """Formats a document's text in stretches of tokens that are, or are not, in the loss."""
        cuts = [0, *(np.flatnonzero(np.diff(part.targets)) + 1).tolist(), part.tokens.size]
        spans = [(part.targets[start], self._decode(part.tokens[start:end])) for start, end in pairwise(cuts)]
        return "".join(f"{_IN_LOSS if in_loss else _NOT_IN_LOSS}{text}{_PLAIN}" for in_loss, text in spans)

    def _decode(self, tokens: npt.NDArray[np.int64]) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def _micro_batch(batch: BatchSizes, place: int) -> tuple[int, int]:
    """Returns (data rank, micro-batch) of a sample by its index in the step (`StepLoader`)."""
    if batch.shares is not None:
        return batch.shares.place(place)
    micro, rest = divmod(place, batch.dp * batch.micro)
    return rest // batch.micro, micro


def _check_unchanged(mixture: DataMixture, manifest: Manifest, *, stage: str) -> None:
    for field, parent in mixture.parents.items():
        recorded = manifest.parents.get(f"stages.{stage}.{field}") or manifest.parents.get(field, {})
        expected = recorded.get("fingerprint")
        if expected != parent["fingerprint"]:
            raise DataError(
                f"{field}: {parent['path']} is not the data the run was trained on: its fingerprint was {expected},"
                f" and is {parent['fingerprint']}\n  try: restore the old tokens; the same corpus, config and tokenizer"
                f" give the same bytes again"
            )


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor FIRST:LAST") from None
