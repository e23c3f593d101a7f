"""`python -m pipeline samples RUN --step N`: the very text that a step was trained on. No torch, no GPU."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from data_prep.tokenizer.fingerprint import TOKENIZER_JSON
from headrace.base.directory import Manifest, read_manifest
from headrace.base.errors import DataError, HeadraceError
from headrace.base.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.renamed_keys import upgrade_keys
from pipeline.config.rules import ResolvedRun, resolve
from pipeline.config.schema import Config
from pipeline.data.document_slices import document_slices
from pipeline.data.mixing_weights import Extent
from pipeline.data.mixture import DataMixture, open_mixture
from pipeline.data.skips import Skips, skips_of
from pipeline.metrics.journal import read_rows

_NUMBERS = "N, or FIRST:LAST"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m pipeline samples`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", metavar="N", type=_span, help=f"the samples of a step: {_NUMBERS}")
    which.add_argument("--sample", metavar="I", type=_span, help=f"by global number, as events name them: {_NUMBERS}")
    parser.add_argument("--rank-order", action="store_true", help="sorted by data rank and micro-batch")
    parser.add_argument("--limit", metavar="n", type=int, help="print only the first n samples")


def run(arguments: argparse.Namespace) -> int:
    """Prints the samples."""
    looked = RunSamples.into(arguments.run)
    chosen = list(looked.of_steps(*arguments.step) if arguments.step else looked.numbered(*arguments.sample))
    if arguments.rank_order:
        chosen.sort(key=lambda sample: (sample.step or 0, sample.turn))
    for sample in chosen[: arguments.limit]:
        print(looked.header(sample))
        for line in looked.text(sample):
            print(line)
    return 0


@dataclass(frozen=True)
class Sample:
    """A sample of a run.

    Attributes:
        number: global, from 0.
        step: that trained on it; None where that is not asked.
        turn: (data rank, micro-batch) that had it.
    """

    number: int
    step: int | None
    turn: tuple[int, int]


@dataclass(frozen=True)
class RunSamples:
    """A run, opened for reading.

    Attributes:
        run: resolved for as many processes as began it or went on with it last.
        blend: its data, unchanged.
        skips: data that it passed over.
        tokenizer: of the data.
    """

    run: ResolvedRun
    blend: DataMixture
    skips: Skips
    tokenizer: Tokenizer

    @classmethod
    def into(cls, run_dir: Path) -> RunSamples:
        """Opens a run.

        Raises:
            DataError: there is no such run, or its data is gone or another.
        """
        manifest = read_manifest(run_dir, kind="run")
        config = parse(Config, upgrade_keys(manifest.config))
        events = read_rows(run_dir, kind="event")
        worlds = [row["world_size"] for row in events if "world_size" in row]
        resolved = resolve(config, world_size=worlds[-1] if worlds else 1)
        blend = open_mixture(config.data, seed=config.run.seed, extent=Extent(resolved.steps, resolved.batch.samples))
        _check_same(blend, manifest)
        skips = skips_of(_newest_details(run_dir), events, step=math.inf)
        tokenizer = Tokenizer.from_file(str(blend.sources[0].tokenizer / TOKENIZER_JSON))
        return cls(resolved, blend, skips, tokenizer)

    def of_steps(self, first: int, last: int) -> Iterator[Sample]:
        """The samples of some steps.

        Raises:
            DataError: there are no such steps.
        """
        if not 1 <= first <= last <= self.run.steps:
            raise DataError(f"the run has steps 1 to {self.run.steps}, not {first} to {last}")
        batch = self.run.batch
        for step in range(first, last + 1):
            for place, number in enumerate(self.skips.samples(step, per_step=batch.samples)):
                yield Sample(number, step, _turn(batch, place))

    def numbered(self, first: int, last: int) -> Iterator[Sample]:
        """Samples by their numbers.

        Raises:
            DataError: the numbers are none.
        """
        if not 0 <= first <= last:
            raise DataError(f"samples are numbered from 0: there is no {first} to {last}")
        for number in range(first, last + 1):
            yield Sample(number, None, _turn(self.run.batch, number % self.run.batch.samples))

    def header(self, sample: Sample) -> str:
        """Where a sample was: step, rank, source."""
        place = self.blend.order.locate([sample.number])
        source = self.blend.sources[int(place.source[0])]
        step = "" if sample.step is None else f", step {sample.step}"
        rank, micro = sample.turn
        turn = f" (data rank {rank}, micro-batch {micro})" if self.run.topology.world_size > 1 else ""
        return f"== sample {sample.number}{step}{turn}: {source.label}, window {int(place.window[0])}"

    def text(self, sample: Sample) -> Iterator[str]:
        """Its documents, each with a line that says which and the text of its tokens as they are."""
        place = self.blend.order.locate([sample.number])
        for part in document_slices(self.blend.sources[int(place.source[0])], int(place.window[0])):
            end = part.first + len(part.tokens)
            yield f"-- document {part.document}, tokens {part.first} to {end} of {part.length}"
            yield self.tokenizer.decode(part.tokens.tolist(), skip_special_tokens=False)


def _turn(batch: BatchSizes, place: int) -> tuple[int, int]:
    """Who has the sample at a place of a step: see `StepLoader`."""
    micro, rest = divmod(place, batch.dp * batch.micro)
    return rest // batch.micro, micro


def _check_same(blend: DataMixture, manifest: Manifest) -> None:
    for field, parent in blend.parents.items():
        was = manifest.parents.get(field, {}).get("fingerprint")
        if was != parent["fingerprint"]:
            raise DataError(
                f"{field}: {parent['path']} is not what the run was trained on: its fingerprint was {was}, and is"
                f" {parent['fingerprint']}\n  try: put the old tokens back; the same corpus, config and tokenizer make"
                f" them again, byte for byte"
            )


def _newest_details(run_dir: Path) -> dict[str, object]:
    """Details of the newest checkpoint that can be read; of damaged ones others tell."""
    for path in sorted((run_dir / "checkpoints").glob("step-*"), reverse=True):
        try:
            return read_manifest(path, kind="checkpoint").details
        except HeadraceError:
            continue
    return {}


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor FIRST:LAST") from None
