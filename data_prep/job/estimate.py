"""How long a job would take: a few megabytes of it are really done, in a temporary directory, and timed."""

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
_LEAST_BYTES = 2 << 20
_STAND_IN_VOCABULARY, _STAND_IN_SAMPLE = 4096, 1 << 20


@dataclass(frozen=True)
class Estimate:
    """What was measured. mb_per_s: 10^6 bytes of input as stored, per second and worker."""

    mb_per_s: float
    stored_bytes: int
    tokens_per_byte: float

    def seconds(self, workers: int) -> float:
        """Of the map phase on so many workers of this speed."""
        return self.stored_bytes / 1e6 / self.mb_per_s / workers

    @property
    def tokens(self) -> int:
        """Of the whole corpus, if it is like what was read."""
        return round(self.tokens_per_byte * self.stored_bytes)


def estimate(config: CorpusConfig, plan: Plan) -> Estimate | None:
    """Maps some of the input and times it; None where there is too little, or none that can be read in parts.

    A tokenizer that is still to be trained is stood in for by a smaller one, which is about as fast.
    """
    total = sum(unit.end - unit.start for task in plan for unit in task)
    units = [unit for task in plan for unit in task]
    warm_up, timed = list(_some(units, _WARM_UP_BYTES)), list(_some(list(reversed(units)), _TIMED_BYTES))
    stored = sum(unit.end - unit.start for unit in timed)
    if not warm_up or stored < _LEAST_BYTES:
        return None
    counted = Counts()

    def count(counts: Counts) -> None:
        nonlocal counted
        counted = counted + counts

    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as directory:
        work = Path(directory)
        sketch = _sketch(config)
        TokenizerTask(warm_up, sketch, work / "tokenizer").run(lambda _counts: None)
        folder = tokenizer_folder(work / "tokenizer")
        MapTask(0, warm_up, sketch, folder, work / "warm-up").run(lambda _counts: None)
        began = time.perf_counter()
        MapTask(1, timed, sketch, folder, work / "timed").run(count)
        seconds = time.perf_counter() - began
    return Estimate(stored / 1e6 / seconds, total, counted.tokens / stored)


def try_to_estimate(config: CorpusConfig, plan: Plan) -> Estimate | str:
    """As `estimate`, or why there is none."""
    try:
        return estimate(config, plan) or "too little input to estimate the time from"
    except HeadraceError as error:
        return f"no estimate of the time: {str(error).splitlines()[0]}"


def _sketch(config: CorpusConfig) -> CorpusConfig:
    section = config.tokenizer
    if section.train is not None:
        size = min(section.vocab_size, _STAND_IN_VOCABULARY)
        section = section.model_copy(update={"vocab_size": size, "sample_bytes": _STAND_IN_SAMPLE})
    limits = {"max_bad_records": 1 << 40, "max_bad_files": 1 << 40}
    return config.model_copy(update={"tokenizer": section, **limits})


def _some(units: list[Unit], wanted: int) -> Iterator[Unit]:
    """Units of about so many bytes; a long one of plain jsonl is cut."""
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
