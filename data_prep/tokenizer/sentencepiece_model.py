"""Conversion of a sentencepiece model (unigram or BPE) to a `tokenizers` tokenizer.

The converted tokenizer encodes the shards, and `AutoTokenizer` loads the same one, so the two agree by construction.
`check_conversion` compares it with sentencepiece itself on adversarial texts, for every model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace.base.errors import DataError

MODEL_FILE = "tokenizer.model"

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_SPACE_MARK = "▁"
_UNREACHABLE = -1e6
"""Score of pieces that no text may become (`<s>`, `<0x0A>`): a unigram model would encode their literal text as them,
since tokenizers looks up every piece, sentencepiece only normal ones. It suffices if the characters of that text are
pieces themselves; a model where they are not fails `check_conversion`."""


def convert(model: bytes) -> Any:
    """Builds the equivalent `tokenizers.Tokenizer`.

    Raises:
        DataError: it is not a sentencepiece model, or neither a unigram nor a BPE one.
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
    processor = _processor(model)
    ids = (processor.eos_id(), processor.bos_id())
    eos, bos = (processor.id_to_piece(i) if i >= 0 else None for i in ids)
    return eos, bos


def check_conversion(tokenizer: Any, model: bytes, *, texts: Iterable[str]) -> None:
    """Compares the converted tokenizer with sentencepiece itself.

    A unigram model can segment a text, such as a run of spaces, in several ways of equal score; sentencepiece adds
    scores in single precision, tokenizers in double, so that they may choose different ones. That is not counted as a
    mismatch.

    Args:
        tokenizer: from `convert`; its `encode_special_tokens` is set.
        model: bytes of the .model file.
        texts: to compare on.

    Raises:
        DataError: a text gets different ids with another score or another decoding; names the first such text.
    """
    processor = _processor(model)
    tokenizer.encode_special_tokens = True
    for text in texts:
        ours, theirs = tokenizer.encode(text, add_special_tokens=False).ids, processor.encode(text)
        if ours != theirs and not _equivalent(processor, ours, theirs):
            why = f"for {text[:60]!r} sentencepiece gives the ids {theirs[:12]}, and its conversion {ours[:12]}"
            raise DataError(
                f"{why}\n  try: name a Hugging Face folder with a tokenizer.json instead of the .model file"
            )


def _equivalent(processor: Any, ours: list[int], theirs: list[int]) -> bool:
    scores = [sum(processor.get_score(i) for i in ids) for ids in (ours, theirs)]
    same_text = processor.decode(ours) == processor.decode(theirs)
    return same_text and math.isclose(
        *scores, rel_tol=1e-5
    )  # rounding in single precision adds up to about 1e-6 over a text


def read_model(path: Path) -> bytes:
    """Reads and validates a .model file.

    Returns:
        its bytes.

    Raises:
        DataError: it is not a sentencepiece model.
    """
    model = path.read_bytes()
    try:
        _parse(model)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return model


def _processor(model: bytes) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


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
    """Sentencepiece merges the pair whose joined piece scores best, so every split of a piece into two is a merge."""
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
        # sentencepiece removes only U+0020; Strip would also remove line ends
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE_MARK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])


def _splitter(pieces: Iterable[str]) -> Any:
    """Pre-tokenizer that splits where no piece spans the boundary: the same ids, and equal words hit the cache."""
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
