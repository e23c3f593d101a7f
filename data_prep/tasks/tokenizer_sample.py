"""The training sample of a tokenizer: cleaned documents of the train split, selected by a hash, streamed.

The sample does not depend on how the corpus is split into tasks: neither the pieces of files nor the documents selected
from them do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_prep.config.corpus import CorpusConfig, Source
from data_prep.hashing import HELDOUT, SAMPLE, U64, content_hashes, document_keys, select_fraction, unit_key
from data_prep.sources.bytesource import Digest
from data_prep.sources.conversation import ConversationError, message_text, parse_conversation
from data_prep.sources.read_unit import read_unit, unit_digest, wanted_fields
from data_prep.sources.records import TextBatch
from data_prep.sources.units import Unit, is_divisible
from data_prep.tasks.cleaning import Cleaner
from foundation.errors import DataError

SPREAD = 8
"""Multiple of the sample's size that is read from a large corpus. The sample then has text from many places, at the
cost of reading 8 bytes for each byte used."""
_PIECE_BYTES = 8 << 20
_ENOUGH = 7 / 8
"""Fraction of the wanted size that is enough; below it (documents were dropped), the pieces are read again."""
_PROOF_CHARACTERS = 1 << 17
_LONGEST_IN_PROOF = 1 << 14


def sample_texts(units: Sequence[Unit], config: CorpusConfig, digests: dict[Unit, str] | None = None) -> Iterator[str]:
    """Yields about `tokenizer.sample_bytes` of train texts: a pure function of the corpus and the config.

    Pieces of the corpus, and documents, are selected by the hash of their positions until the sample is full. Texts are
    cleaned and assigned to splits as in the map tasks, but before repeated lines are removed. Unreadable records are
    skipped; the map tasks report them.

    Args:
        units: all units of the job.
        config: config of the job.
        digests: mapping to fill with the pieces that were read and the XXH3-128 of each; None for no record.

    Raises:
        DataError: there are conversations, but no chat template, or a template that fails for all of them.
    """
    wanted = left = config.tokenizer.sample_bytes
    units = [unit for unit in units if not _source_of(unit, config).seen]
    pieces = _select_pieces(_split_into_pieces(units), wanted * SPREAD, config.seed)
    reader = _SampleReader(config, digests if digests is not None else {})
    low, high = 0.0, min(1.0, wanted / max(1, sum(piece.end - piece.start for piece in pieces)))
    while low < 1 and left > (1 - _ENOUGH) * wanted:
        for piece in pieces:
            for text, size in reader.train_texts(piece, low, high):
                if left <= 0:
                    return
                left -= size
                yield text
        low, high = high, min(1.0, 2 * high)
    if left == wanted and reader.failure is not None:
        why = f"no conversation can be rendered, so there is no text to train the tokenizer on: {reader.failure}"
        raise DataError(f"{why}\n  try: correct the conversations or the chat template")


def proof_texts(units: Sequence[Unit], config: CorpusConfig) -> list[str]:
    """The beginnings of some texts of a few files, about 130,000 characters, for verifying a tokenizer engine."""
    texts, left = list[str](), _PROOF_CHARACTERS
    for piece in _select_pieces(_split_into_pieces(units), 1 << 62, config.seed):
        for beginning in _beginnings(piece, config):
            texts.append(beginning)
            left -= len(beginning)
            if left <= _PROOF_CHARACTERS // 2:  # the next piece provides the other half
                break
        if left <= 0:
            break
    return texts


def _beginnings(piece: Unit, config: CorpusConfig) -> Iterator[str]:
    source = _source_of(piece, config)
    for batch in _batches(piece, config):
        for text in batch.texts:
            yield (message_text(text) if source.messages_field is not None else text)[:_LONGEST_IN_PROOF]


class _SampleReader:
    """Reads train documents in the form that map tasks will tokenize; `failure` is the first conversation's error."""

    def __init__(self, config: CorpusConfig, digests: dict[Unit, str]) -> None:
        self._config, self._digests = config, digests
        self._cleaner = Cleaner(config, None)
        self.failure: ConversationError | None = None
        self._render = _renderer(config) if config.has_conversations else None

    def train_texts(self, piece: Unit, low: float, high: float) -> Iterator[tuple[str, int]]:
        """Yields texts and their sizes in bytes, for documents whose hash, scaled to [0, 1), is in [low, high)."""
        source, digest = _source_of(piece, self._config), unit_digest(piece)
        try:
            for batch in _batches(piece, self._config, self._cleaner.fields, digest):
                yield from self._train_texts(batch, piece, source, low, high)
        finally:
            if piece not in self._digests:
                self._digests[piece] = digest.finish()

    def _train_texts(
        self, batch: TextBatch, piece: Unit, source: Source, low: float, high: float
    ) -> Iterator[tuple[str, int]]:
        if batch.texts:
            chosen = self._select(batch, piece, low, high)
            if source.messages_field is not None:
                texts, hashed = self._conversations([batch.texts[i] for i in chosen])
            else:
                texts = hashed = self._cleaned(batch, chosen, piece)
            raw = [text.encode() for text in texts]
            for i in np.flatnonzero(~self._heldout(hashed)):
                if raw[i]:
                    yield texts[i], len(raw[i])

    def _select(self, batch: TextBatch, piece: Unit, low: float, high: float) -> list[int]:
        seed = self._config.seed
        key: U64 = np.full(len(batch.at), unit_key(piece.source, piece.file, seed=seed), np.uint64)
        keys = document_keys(key, np.array(batch.at, np.int64))
        until_high, until_low = (
            select_fraction(keys, fraction=share, seed=seed, purpose=SAMPLE) for share in (high, low)
        )
        chosen: list[int] = np.flatnonzero((until_high | (high >= 1)) & ~until_low).tolist()
        return chosen

    def _cleaned(self, batch: TextBatch, chosen: list[int], piece: Unit) -> list[str]:
        texts = [batch.texts[i] for i in chosen]
        fields = [batch.fields[i] for i in chosen] if batch.fields else []
        cleaned = self._cleaner.clean(texts, fields, lambda i: (piece.source, piece.file, batch.at[chosen[i]]))
        return texts if cleaned is None else cleaned[0]

    def _conversations(self, lines: list[str]) -> tuple[list[str], list[str]]:
        """Contents of the conversations that the template can render, and rendered texts, which decide the split."""
        assert self._render is not None
        contents, rendered = list[str](), list[str]()
        for line in lines:
            try:
                rendered.append(self._render(line))
            except ConversationError as error:
                self.failure = self.failure or error
                continue
            contents.append(message_text(line))
        return contents, rendered

    def _heldout(self, texts: list[str]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        hashes = content_hashes(texts)[:, 0]
        return select_fraction(hashes, fraction=self._config.heldout_fraction, seed=self._config.seed, purpose=HELDOUT)


def _renderer(config: CorpusConfig) -> Callable[[str], str]:
    """Makes a function that renders conversations as map tasks do, from template and special tokens alone."""
    from data_prep.chat import encoder  # noqa: PLC0415 - brings jinja2 along

    section = config.tokenizer
    if section.chat_template is None:
        raise encoder.missing_template_error()
    source = Path(section.chat_template).read_text(encoding="utf-8")
    tokens = {"eos_token": section.eos_token} | ({"bos_token": section.bos_token} if section.bos_token else {})
    special = section.all_special_tokens()
    template = encoder.compile_template(source, encoder.template_tokens(tokens), special=special, date=section.date)
    forbidden = () if config.parse_special_tokens else special

    def render(line: str) -> str:
        read, tools = parse_conversation(line)
        messages = template.fit(read, tools=tools)
        encoder.check_no_special_tokens(messages, forbidden, where="a message")
        encoder.check_no_special_tokens(tools, forbidden, where="a tool")
        return template.render(messages, tools=tools).text

    return render


def _source_of(piece: Unit, config: CorpusConfig) -> Source:
    return next(source for source in config.sources if source.label == piece.source)


def _batches(
    piece: Unit, config: CorpusConfig, others: Sequence[str] = (), digest: Digest | None = None
) -> Iterator[TextBatch]:
    source = _source_of(piece, config)
    wanted = wanted_fields(source, others, max_bytes=config.max_record_bytes)
    return (record for record in read_unit(piece, wanted, digest) if isinstance(record, TextBatch))


def _select_pieces(pieces: Sequence[Unit], wanted_bytes: int, seed: int) -> list[Unit]:
    selected: list[Unit] = []
    for piece in sorted(pieces, key=lambda p: unit_key(p.source, f"{p.file}#{p.part}", seed=seed)):
        if wanted_bytes <= 0:
            break
        selected.append(piece)
        wanted_bytes -= piece.end - piece.start
    return selected


def _split_into_pieces(units: Sequence[Unit]) -> list[Unit]:
    """Splits the units' parts of files at multiples of `_PIECE_BYTES` instead of the plan's borders."""
    files: dict[tuple[str, str], list[Unit]] = {}
    for unit in units:
        files.setdefault((unit.source, unit.file), []).append(unit)
    return [piece for of_file in files.values() for piece in _split_file(of_file[0], of_file[-1])]


def _split_file(first: Unit, last: Unit) -> Iterator[Unit]:
    """Yields pieces of a file from the beginning of one unit to the end of another."""
    whole = replace(first, end=last.end, end_group=last.end_group)
    if is_divisible(first.type, first.path):
        parts = max(1, -(-first.file_bytes // _PIECE_BYTES))
        parts = max(parts, 2) if (whole.start, whole.end) != (0, whole.file_bytes) else parts
        for part in range(whole.start // _PIECE_BYTES, max(whole.start, whole.end - 1) // _PIECE_BYTES + 1):
            start, end = max(whole.start, part * _PIECE_BYTES), min(whole.end, (part + 1) * _PIECE_BYTES)
            yield replace(whole, start=start, end=end, part=part, parts=parts)
    elif last.end_group:
        yield from _split_row_groups(whole)
    else:
        yield whole


def _split_row_groups(whole: Unit) -> Iterator[Unit]:
    """Yields pieces of row groups, of about `_PIECE_BYTES` each if all row groups have the same size."""
    groups = whole.end_group - whole.first_group
    size = whole.end - whole.start
    step = max(1, groups * _PIECE_BYTES // max(1, size))
    for part, group in enumerate(range(0, groups, step)):
        until = min(groups, group + step)
        start, end = (whole.start + size * cut // groups for cut in (group, until))
        first_group, end_group = (whole.first_group + cut for cut in (group, until))
        parts = -(-groups // step)
        yield replace(whole, start=start, end=end, part=part, parts=parts, first_group=first_group, end_group=end_group)
