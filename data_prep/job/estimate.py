"""Estimates the duration of a job: maps a few megabytes of its input in a temporary directory and times that."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.config.corpus import CorpusConfig
from data_prep.sources.units import Plan, Unit
from data_prep.task import Counts
from data_prep.tasks.make_tokenizer import TokenizerTask, tokenizer_folder
from data_prep.tasks.map import MapTask
from headrace.base.errors import HeadraceError

_WARM_UP_BYTES, _TIMED_BYTES, _LARGEST_UNIT = 8 << 20, 16 << 20, 64 << 20
_MIN_BYTES = 2 << 20
_SMALL_VOCABULARY, _SMALL_SAMPLE = 4096, 1 << 20
"""Limits for a tokenizer that is trained for the estimate: encoding is about as fast as with the full one."""


@dataclass(frozen=True)
class Estimate:
    """A measurement on a part of the input.

    Attributes:
        mb_per_s: 10^6 bytes of input as stored, per second and worker.
        stored_bytes: of the whole input.
        tokens_per_byte: of input as stored.
    """

    mb_per_s: float
    stored_bytes: int
    tokens_per_byte: float

    def seconds(self, workers: int) -> float:
        """Duration of the map phase on so many workers of this speed."""
        return self.stored_bytes / 1e6 / self.mb_per_s / workers

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole corpus, if it is like the measured part."""
        return round(self.tokens_per_byte * self.stored_bytes)


def estimate(config: CorpusConfig, plan: Plan) -> Estimate | None:
    """Maps some of the input and times it; None if there is too little that can be read in parts.

    A tokenizer that is still to be trained is replaced by a smaller one, which is about as fast.
    """
    total = sum(unit.end - unit.start for task in plan for unit in task)
    units = [unit for task in plan for unit in task]
    warm_up, timed = list(_take_bytes(units, _WARM_UP_BYTES)), list(_take_bytes(list(reversed(units)), _TIMED_BYTES))
    stored = sum(unit.end - unit.start for unit in timed)
    if not warm_up or stored < _MIN_BYTES:
        return None
    counted = Counts()

    def count(counts: Counts) -> None:
        nonlocal counted
        counted = counted + counts

    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as directory:
        work = Path(directory)
        small_config = _estimate_config(config)
        TokenizerTask(warm_up, small_config, work / "tokenizer").run(lambda _counts: None)
        folder = tokenizer_folder(work / "tokenizer")
        MapTask(0, warm_up, small_config, folder, work / "warm-up").run(lambda _counts: None)
        began = time.perf_counter()
        MapTask(1, timed, small_config, folder, work / "timed").run(count)
        seconds = time.perf_counter() - began
    return Estimate(stored / 1e6 / seconds, total, counted.tokens / stored)


def estimate_or_reason(config: CorpusConfig, plan: Plan) -> Estimate | str:
    """The `estimate`, or the reason why there is none."""
    try:
        return estimate(config, plan) or "too little input to estimate the time from"
    except HeadraceError as error:
        return f"no estimate of the time: {str(error).splitlines()[0]}"


def _estimate_config(config: CorpusConfig) -> CorpusConfig:
    section = config.tokenizer
    if section.train is not None:
        size = min(section.vocab_size, _SMALL_VOCABULARY)
        section = section.model_copy(update={"vocab_size": size, "sample_bytes": _SMALL_SAMPLE})
    limits = {"max_bad_records": 1 << 40, "max_bad_files": 1 << 40}
    return config.model_copy(update={"tokenizer": section, **limits})


def _take_bytes(units: list[Unit], wanted: int) -> Iterator[Unit]:
    """Yields units of about `wanted` bytes; a long one of uncompressed jsonl is shortened."""
    for unit in units:
        size = unit.end - unit.start
        if wanted <= 0:
            return
        if unit.type == "jsonl" and not unit.path.endswith((".gz", ".zst")) and size > wanted:
            yield replace(unit, end=unit.start + wanted, parts=max(2, unit.parts))
            return
        if size <= _LARGEST_UNIT:
            yield unit
            wanted -= size
