"""The text a tokenizer learns from: train documents, chosen by a hash, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_prep.config import CorpusConfig
from data_prep.plan import Unit
from data_prep.readers.records import Document
from data_prep.readers.unit import read_unit
from data_prep.split import split_of, unit_hash

_SPREAD = 8
"""Of a large corpus, units of this many times the sample are read: the sample then holds text from many places at the
cost of reading 8 bytes for each that is kept."""


def sample_texts(units: Sequence[Unit], config: CorpusConfig) -> Iterator[str]:
    """Yields about `tokenizer.sample_bytes` of train texts: a pure function of the corpus and the config.

    Units are drawn by the hash of their name, documents by the hash of their id, until the sample is full. Unreadable
    records are passed over; the map tasks report them.
    """
    wanted = config.tokenizer.sample_bytes
    sources = {source.label: source for source in config.sources}
    drawn = _draw(units, wanted * _SPREAD, config.seed)
    share = min(1.0, wanted / max(1, sum(unit.end - unit.start for unit in drawn)))
    for unit in drawn:
        for record in read_unit(unit, sources[unit.source]):
            if not isinstance(record, Document) or not _chosen(record, share, config):
                continue
            if wanted <= 0:
                return
            wanted -= len(record.text.encode())
            yield record.text


def _draw(units: Sequence[Unit], wanted_bytes: int, seed: int) -> list[Unit]:
    def position(unit: Unit) -> float:
        name = f"{unit.source}/{unit.file}#{unit.part}".encode("utf-8", "surrogateescape")
        return unit_hash(name, seed=seed, purpose=b"sample units")

    drawn: list[Unit] = []
    for unit in sorted(units, key=position):
        if wanted_bytes <= 0:
            break
        drawn.append(unit)
        wanted_bytes -= unit.end - unit.start
    return drawn


def _chosen(document: Document, share: float, config: CorpusConfig) -> bool:
    name = document.id.encode("utf-8", "surrogateescape")
    if share < 1 and unit_hash(name, seed=config.seed, purpose=b"sample") >= share:
        return False
    split = split_of(document.text.encode(), seed=config.seed, heldout_fraction=config.heldout_fraction)
    return bool(document.text) and split == "train"
