"""Conversion of a sentencepiece model (unigram or BPE) to a `tokenizers` tokenizer.

`AutoTokenizer` and all programs that serve a model load the converted tokenizer. It gives sentencepiece's ids except in
the cases of `inexact_because`; sentencepiece itself encodes such models, see `engine_choice`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_prep.tokenizer.fingerprint import MODEL_FILE, MODEL_FILES
from data_prep.tokenizer.load import REFERENCE, TOKENIZER_CONFIG
from foundation.errors import DataError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_UNIGRAM, _BPE = 1, 2
_SPACE_MARK = "▁"
_PIECES_PER_TEXT = 50
_UNREACHABLE = -1e6
"""Score of pieces that no text may become (`<s>`, `<0x0A>`). A unigram model would otherwise encode their literal text
as these pieces, since tokenizers looks up every piece, and sentencepiece only normal ones. The score is low enough if
the characters of that text are pieces themselves; the texts that verify an engine find models where they are not."""


def convert(model: bytes) -> Any:
    """Builds the equivalent `tokenizers.Tokenizer`.

    Raises:
        DataError: the bytes are not a sentencepiece model, or it is neither unigram nor BPE.
    """
    proto = _parse(model)
    kind = proto.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise DataError("the sentencepiece model is a word or character model\n  try: a unigram or a BPE model")
    tokenizer = Tokenizer(_unigram(proto) if kind == _UNIGRAM else _bpe(proto))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    splitter = _splitter(p.piece for p in proto.pieces if p.type in (_NORMAL, _USER_DEFINED))
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = _decoder(proto.normalizer_spec)
    specials = [p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    defined = [p.piece for p in proto.pieces if p.type == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in defined])
    return tokenizer


def eos_and_bos(model: bytes) -> tuple[str | None, str | None]:
    """The model's (EOS, BOS) pieces; None for one that it lacks."""
    processor = open_processor(model)
    ids = (processor.eos_id(), processor.bos_id())
    eos, bos = (processor.id_to_piece(i) if i >= 0 else None for i in ids)
    return eos, bos


def inexact_because(model: bytes) -> str | None:
    """Names a feature that makes `convert` inexact for some texts; None if the model has no known one.

    `tokenizers` applies a character map to one grapheme at a time, sentencepiece to the longest match: decomposed (NFD)
    Korean and Vietnamese differ. `tokenizers` normalizes the text between two user-defined symbols as a text of its
    own, with a prefix space. It merges pieces of equal score by id, sentencepiece the leftmost. It adds the scores of a
    unigram model in double precision, sentencepiece in single: ties fall differently.
    """
    proto = _parse(model)
    normal = [p.score for p in proto.pieces if p.type == _NORMAL]
    reasons = (
        (proto.trainer_spec.model_type != _BPE, "its scores are added in single precision"),
        (bool(proto.normalizer_spec.precompiled_charsmap), "its normalizer maps characters"),
        (any(p.type not in (_NORMAL, _UNKNOWN, _CONTROL, _BYTE) for p in proto.pieces), "it has user-defined symbols"),
        (len(set(normal)) < len(normal), "some of its pieces have equal scores"),
        (proto.trainer_spec.treat_whitespace_as_suffix, "it puts the blank at the end of a word"),
        (not proto.normalizer_spec.escape_whitespaces, "it keeps blanks as they are"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def texts_of_pieces(model: bytes) -> list[str]:
    """Texts made of a model's own pieces, on which a conversion fails first.

    Pieces come in the order of their ids, then doubled; user-defined symbols come before, between and after words.
    """
    proto = _parse(model)
    pieces = [p.piece.replace(_SPACE_MARK, " ") for p in proto.pieces if p.type in (_NORMAL, _USER_DEFINED)]
    defined = [p.piece for p in proto.pieces if p.type == _USER_DEFINED]
    rows = [pieces[at : at + _PIECES_PER_TEXT] for at in range(0, len(pieces), _PIECES_PER_TEXT)]
    texts = ["".join(row) for row in rows] + ["".join(piece * 2 for piece in row) for row in rows]
    return texts + [text for s in defined for text in (s, f"a{s}b", f" {s} a", f"{s}{s}a  {s}\n")]


def read_beside(folder: Path) -> bytes | None:
    """Reads the sentencepiece model in a tokenizer folder, by transformers' names for it; None without one.

    Llama 3 has a `tokenizer.model` that is not sentencepiece's.
    """
    for name in MODEL_FILES:
        if (folder / name).is_file():
            model = (folder / name).read_bytes()
            with suppress(DataError):
                _parse(model)
                return model
    return None


def reference_model(folder: Path) -> bytes:
    """Reads the sentencepiece model of a folder whose ids come from it.

    Raises:
        DataError: the folder has lost its model.
    """
    model = read_beside(folder)
    if model is None:
        why = f"{TOKENIZER_CONFIG} says that documents have a sentencepiece model's ids, but the model is missing"
        remedy = f"copy {MODEL_FILE} beside it, or remove {REFERENCE} there for the ids of its tokenizer.json"
        raise DataError(f"{why}\n  try: {remedy}")
    return model


def open_processor(model: bytes) -> Any:
    """Opens a `sentencepiece.SentencePieceProcessor` for the bytes of a .model file."""
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def pieces_of(model: bytes) -> list[str]:
    """The pieces of a model, by id."""
    return [p.piece for p in _parse(model).pieces]


def read_model(path: Path) -> bytes:
    """Reads and validates a .model file.

    Returns:
        The bytes of the file.

    Raises:
        DataError: it is not a sentencepiece model.
    """
    model = path.read_bytes()
    try:
        _parse(model)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return model


def _parse(model: bytes) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # noqa: PLC0415 - only sentencepiece models need protobuf
    from sentencepiece import sentencepiece_model_pb2  # noqa: PLC0415

    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(model)
    except DecodeError:
        proto = None
    if proto is None or not proto.pieces:
        raise DataError("not a sentencepiece model\n  try: name a .model file that sentencepiece wrote")
    return proto


def _unigram(proto: Any) -> Any:
    scores = [(p.piece, p.score if p.type in (_NORMAL, _USER_DEFINED) else _UNREACHABLE) for p in proto.pieces]
    unknown = next(i for i, p in enumerate(proto.pieces) if p.type == _UNKNOWN)
    return models.Unigram(scores, unk_id=unknown, byte_fallback=proto.trainer_spec.byte_fallback)


def _bpe(proto: Any) -> Any:
    """Builds the BPE model: sentencepiece merges the best-scoring pair, so each split of a piece in two is a merge."""
    vocab = {p.piece: i for i, p in enumerate(proto.pieces)}
    normal = {p.piece: p.score for p in proto.pieces if p.type == _NORMAL}
    merges = [
        (-score, piece[:at], piece[at:])
        for piece, score in normal.items()
        for at in range(1, len(piece))
        if piece[:at] in normal and piece[at:] in normal
    ]
    ordered = [(left, right) for _, left, right in sorted(merges, key=lambda m: (m[0], vocab[m[1]], vocab[m[2]]))]
    unknown = next(p.piece for p in proto.pieces if p.type == _UNKNOWN)
    fallback = proto.trainer_spec.byte_fallback
    return models.BPE(vocab, ordered, unk_token=unknown, fuse_unk=True, byte_fallback=fallback)


def _normalizer(spec: Any) -> Any:
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # sentencepiece removes only U+0020; Strip would also remove line ends. Without the lookbehind, the search would
        # scan a long run of blanks within the text from each blank to the run's end
        steps += [normalizers.Replace(Regex(r"\A +|(?<! ) +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE_MARK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])


def _splitter(pieces: Iterable[str]) -> Any:
    """Pre-tokenizer that splits where no piece spans the boundary: ids stay the same, and equal words hit the cache."""
    listed = list(pieces)
    if any(re.search(f"[^{_SPACE_MARK}]{_SPACE_MARK}", piece) for piece in listed):
        return None
    newline = "" if any("\n" in piece and piece != "\n" for piece in listed) else "\n"
    lone = f"{newline}|" if newline else ""
    pattern = f"{lone}{_SPACE_MARK}+[^{_SPACE_MARK}{newline}]*|[^{_SPACE_MARK}{newline}]+"
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _decoder(spec: Any) -> Any:
    steps: list[Any] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
