"""Estimates the duration of a job: times training and mapping on a few megabytes of input in a temporary directory."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.config.corpus import CorpusConfig
from data_prep.job.finish import name_long_words
from data_prep.sources.units import Plan, Unit, is_divisible
from data_prep.tasks.make_tokenizer import TokenizerTask, tokenizer_folder
from data_prep.tasks.map import MapTask
from data_prep.tasks.tokenizer_sample import SPREAD, sample_texts
from foundation.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from data_prep.tokenizer.store import SpooledTexts

_WARM_UP_BYTES, _TIMED_BYTES, _LARGEST_UNIT = 4 << 20, 16 << 20, 64 << 20
_LEAST_BYTES, _PLACES = 1 << 19, 8
"""Stored bytes that are measured of a small source, and the number of places in a source."""
_TOO_MUCH = 0.5
_MIN_BYTES = 2 << 20
_SAMPLE_BYTES = 4 << 20
"""Bytes of text for the two trainings of the estimate, on all of it and on a quarter. With 32,000 ids, the line through
the two times gives 10 to 30 % less than the time for 16 MiB: docs/log.md, Data prep."""
_SMALL_SHARE = 4
_FEW_IDS = 4096


@dataclass(frozen=True)
class TrainingTimes:
    """Measured parts of the training of a tokenizer.

    Attributes:
        read_s: seconds per byte of stored input, for reading it and cleaning the part that the sample takes.
        small, large: (bytes of text, seconds) of two trainings.
    """

    read_s: float
    small: tuple[int, float]
    large: tuple[int, float]

    def seconds(self, *, read_bytes: int, text_bytes: int) -> float:
        """Seconds to read the input and to train on the text, by the line through the two trainings.

        Args:
            read_bytes: bytes of stored input from which the sample is selected.
            text_bytes: bytes of text in the sample.
        """
        more_text = max(1, self.large[0] - self.small[0])
        per_byte = max(0.0, (self.large[1] - self.small[1]) / more_text)
        return self.read_s * read_bytes + max(0.0, self.large[1] + per_byte * (text_bytes - self.large[0]))


@dataclass(frozen=True)
class Drop:
    """The share of a source's documents that a cleaning step drops, measured on a part of the source.

    Attributes:
        share: from 0 to 1.
        documents: documents in the measured part.
    """

    source: str
    step: str
    share: float
    documents: int

    def line(self) -> str:
        """The share; above one half with a warning."""
        text = f"{self.source}: {self.step} drops {self.share:.0%} of {self.documents:,} documents measured"
        if self.share <= _TOO_MUCH:
            return text
        remedy = "other steps for this source alone: sources.N.clean"
        return f"warning: {text}; is it made for such text? For {remedy}"


@dataclass(frozen=True)
class Estimate:
    """A measurement on a part of the input.

    Attributes:
        mb_per_s: 10^6 bytes of stored input per second and worker.
        stored_bytes: stored size of the whole input, in bytes.
        tokens: tokens that the job writes, without deduplication, if the corpus resembles the measured part.
        training_s: seconds to train the tokenizer, on one machine before the map phase; 0 for a given tokenizer.
        long_words: documents of the measured part with very long words (`finish.name_long_words`).
        drops: share of each source's documents that each cleaning step drops.
    """

    mb_per_s: float
    stored_bytes: int
    tokens: int
    training_s: float = 0.0
    long_words: tuple[dict[str, Any], ...] = ()
    drops: tuple[Drop, ...] = ()

    def map_seconds(self, workers: int) -> float:
        """Duration of the map phase in seconds, on `workers` workers of this speed."""
        return self.stored_bytes / 1e6 / self.mb_per_s / workers

    def seconds(self, workers: int) -> float:
        """Duration of the training and of the map phase, in seconds."""
        return self.training_s + self.map_seconds(workers)


def estimate(config: CorpusConfig, plan: Plan) -> Estimate | None:
    """Maps some of every source and times it; None if too little of the input can be read in parts.

    Sources are measured in proportion to their size, at several places each, and small ones at least a little. A
    tokenizer that is still to be trained is replaced by one trained on less text, which is about as fast.
    """
    labels = [source.label for source in config.sources]
    units = {source.label: [u for task in plan for u in task if u.source == source.label] for source in config.sources}
    seen_bytes = sum(_bytes_of(units[source.label]) for source in config.sources if source.seen)
    sizes = np.array([0 if source.seen else _bytes_of(units[source.label]) for source in config.sources], np.int64)
    total = int(sizes.sum())
    parts = [_sampled(units[name], int(size), total=total) for name, size in zip(labels, sizes, strict=True)]
    sampled, timed = np.array(list(map(_bytes_of, parts))), [unit for part in parts for unit in part]
    if (stored := int(sampled.sum())) < _MIN_BYTES:
        return None
    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as directory:
        work = Path(directory)
        small_config, training = _estimate_config(config), None
        if config.tokenizer.train is not None:
            small_config, training = _time_training(small_config, config, timed, total=total, work=work)
        TokenizerTask(timed, small_config, work / "tokenizer", work / "store").run(lambda _counts: None)
        folder, first = tokenizer_folder(work / "tokenizer"), list(_take_bytes(timed, _WARM_UP_BYTES))
        MapTask(0, first, small_config, folder, work / "warm-up").run(lambda _counts: None)
        began = time.perf_counter()
        marker = MapTask(1, timed, small_config, folder, work / "timed").run(lambda _counts: None)
        seconds = time.perf_counter() - began
    counted = np.array(marker["counts"], np.int64).sum(1)  # [sources, 3]
    _, tokens, text = (counted * (sizes / np.maximum(1, sampled))[:, None]).sum(0)
    training_s = 0.0
    if training is not None:
        wanted = config.tokenizer.sample_bytes
        train_text = int(text * (1 - config.heldout_fraction))
        training_s = training.seconds(read_bytes=_read_bytes(wanted, total), text_bytes=min(wanted, train_text))
    return Estimate(
        mb_per_s=stored / 1e6 / seconds,
        stored_bytes=total + seen_bytes,
        tokens=round(tokens),
        training_s=training_s,
        long_words=tuple(name_long_words([marker])),
        drops=tuple(_drops(marker["dropped_by_source"], dict(zip(labels, counted[:, 0].tolist(), strict=True)))),
    )


def _drops(dropped: dict[str, dict[str, int]], kept: dict[str, int]) -> Iterator[Drop]:
    """Yields the share of each source's documents that each filter drops, by source and the largest share first."""
    for source, reasons in dropped.items():
        whole = kept[source] + sum(reasons.values())
        by_step: Counter[str] = Counter()
        for reason, count in reasons.items():
            by_step[reason.rpartition(": ")[0]] += count
        yield from (Drop(source, step, count / whole, whole) for step, count in by_step.most_common())


def _sampled(units: list[Unit], size: int, *, total: int) -> list[Unit]:
    """Selects units of a source, or beginnings of them, at even distances: its share of `_TIMED_BYTES`."""
    wanted = min(size, max(_LEAST_BYTES, _TIMED_BYTES * size // max(1, total)))
    if wanted <= 0:
        return []
    stride = max(1, len(units) // _PLACES)
    ordered = [unit for first in range(stride) for unit in units[first::stride]]
    return list(_take_bytes(ordered, wanted, each=-(-wanted // min(_PLACES, len(units)))))


def estimate_or_reason(config: CorpusConfig, plan: Plan) -> Estimate | str:
    """The `estimate`, or the reason why there is none."""
    try:
        return estimate(config, plan) or "too little input to estimate the time from"
    except HeadraceError as error:
        return f"no estimate of the time: {str(error).splitlines()[0]}"


def _time_training(
    small_config: CorpusConfig, config: CorpusConfig, units: list[Unit], *, total: int, work: Path
) -> tuple[CorpusConfig, TrainingTimes]:
    """Trains on two sizes of text; returns the config whose tokenizer is then in `work/store`, and the times."""
    from data_prep.tokenizer.store import spool  # noqa: PLC0415 - only for tokenizers that are trained

    with spool(sample_texts(units, small_config), work) as texts:
        some = list(_first_bytes(texts, texts.text_bytes // _SMALL_SHARE))
        began, worked = time.perf_counter(), time.process_time()
        with spool(some, work) as fewer:
            try:
                small, large = (_train(part, small_config, work) for part in (fewer, texts))
            except ConfigError:  # a vocabulary of this size needs more text
                small_config = _with_tokenizer(small_config, vocab_size=min(_FEW_IDS, config.tokenizer.vocab_size))
                small, large = (_train(part, small_config, work) for part in (fewer, texts))
        # the two differ in CPU time: other processes may slow one of them down more than the other
        slowed = (time.perf_counter() - began) / max(1e-9, time.process_time() - worked)
    small, large = ((size, seconds * slowed) for size, seconds in (small, large))
    share = config.tokenizer.sample_bytes / max(1, _read_bytes(config.tokenizer.sample_bytes, total))
    wanted = max(1, int(min(1.0, share) * _bytes_of(units)))
    return small_config, TrainingTimes(_reading_seconds(units, config, wanted) / _bytes_of(units), small, large)


def _train(texts: SpooledTexts, config: CorpusConfig, work: Path) -> tuple[int, float]:
    """Trains in a store in `work`; returns the bytes of text and the CPU seconds."""
    from data_prep.tokenizer.store import TokenizerStore, train_or_reuse  # noqa: PLC0415

    with tempfile.TemporaryDirectory(dir=work) as folder:
        began = time.process_time()
        train_or_reuse(texts, Path(folder), config.tokenizer, TokenizerStore(work / "store"))
        return texts.text_bytes, time.process_time() - began


def _reading_seconds(units: list[Unit], config: CorpusConfig, wanted: int) -> float:
    """Seconds to read the sample from all units, from its first text on: without loading cleaning models."""
    texts = iter(sample_texts(units, _with_tokenizer(config, sample_bytes=wanted)))
    next(texts, None)
    began = time.perf_counter()
    for _ in texts:
        pass
    return time.perf_counter() - began


def _first_bytes(texts: Iterable[str], wanted: int) -> Iterator[str]:
    for text in texts:
        if wanted <= 0:
            return
        wanted -= len(text.encode())
        yield text


def _read_bytes(sample_bytes: int, total: int) -> int:
    """Bytes of stored input that are read for a sample."""
    return min(total, SPREAD * sample_bytes)


def _bytes_of(units: list[Unit]) -> int:
    return sum(unit.end - unit.start for unit in units)


def _with_tokenizer(config: CorpusConfig, **fields: int) -> CorpusConfig:
    return config.model_copy(update={"tokenizer": config.tokenizer.model_copy(update=fields)})


def _estimate_config(config: CorpusConfig) -> CorpusConfig:
    limits = {"max_bad_records": 1 << 40, "max_bad_files": 1 << 40}
    small = config.model_copy(update=limits)
    if config.tokenizer.train is None:
        return small
    return _with_tokenizer(small, sample_bytes=min(_SAMPLE_BYTES, config.tokenizer.sample_bytes))


def _take_bytes(units: list[Unit], wanted: int, *, each: int | None = None) -> Iterator[Unit]:
    """Yields units of about `wanted` bytes; of uncompressed jsonl only the first `each` bytes of a unit."""
    for unit in units:
        size, most = unit.end - unit.start, min(wanted, each or wanted)
        if wanted <= 0:
            return
        if size > most and is_divisible(unit.type, unit.path):
            yield replace(unit, end=unit.start + most, parts=max(2, unit.parts))
            wanted -= most
            continue
        if size <= _LARGEST_UNIT:
            yield unit
            wanted -= size
