"""The tokenizer of a GGUF file, from the tokenizer.json or tokenizer.model of a Hugging Face folder. No torch.

llama.cpp knows byte-level BPE by the name of its split pattern, and sentencepiece's BPE by scores of pieces. A pattern
without a name, and sentencepiece's unigram, whose segmentation llama.cpp computes in another way, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from pipeline.models.split_names import refused, sentencepiece_bpe, split_name

_BPE, _SENTENCEPIECE = "gpt2", "llama"


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer as a GGUF file holds it.

    Attributes:
        model: "gpt2" (byte-level BPE) or "llama" (sentencepiece BPE).
        split: name of the split pattern; "default" with sentencepiece.
        tokens: by id, as many as the model has.
        types: of each token, `gguf.TokenType`.
        merges: of byte-level BPE, "left right".
        scores: of sentencepiece's pieces.
        ids: "bos", "eos", "unknown", "padding" -> id.
        adds_bos: whether the Hugging Face tokenizer puts BOS in front.
        chat_template: in Jinja.
    """

    model: str
    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float] | None
    ids: Mapping[str, int]
    adds_bos: bool
    chat_template: str | None

    def write(self, writer: GGUFWriter) -> None:
        """Adds its keys."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(False)
        if self.merges:
            writer.add_token_merges(self.merges)
        adders = {
            "bos": writer.add_bos_token_id,
            "eos": writer.add_eos_token_id,
            "unknown": writer.add_unk_token_id,
            "padding": writer.add_pad_token_id,
        }
        for name, number in self.ids.items():
            adders[name](number)
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(False)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def read_tokenizer(folder: Path, *, vocabulary: int) -> GgufTokenizer:
    """The tokenizer of a folder.

    Args:
        folder: with tokenizer.json; with tokenizer.model, too, where sentencepiece made it.
        vocabulary: V, rows of the embedding; ids without a token are filled up.

    Raises:
        ConfigError: there is none, or llama.cpp has none that gives the same ids.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise refused(f"{folder} has no tokenizer.json", "save it with transformers' fast tokenizer")
    raw = json.loads(file.read_text(encoding="utf-8"))
    about = _tokenizer_config(folder)
    if (folder / "tokenizer.model").is_file():
        return _sentencepiece(folder, raw, about, vocabulary=vocabulary)
    tokens, types = _byte_level_tokens(raw, vocabulary)
    merges = [each if isinstance(each, str) else " ".join(each) for each in raw["model"]["merges"]]
    known = {token: number for number, token in enumerate(tokens)}
    ids, adds_bos = _special_ids(about, known), _adds_bos(folder, about, known)
    template = _chat_template(folder, about)
    return GgufTokenizer(_BPE, split_name(raw), tokens, types, merges, None, ids, adds_bos, template)


def _byte_level_tokens(raw: Mapping[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    tokens, types = _filled(vocabulary)
    for token, number in raw["model"]["vocab"].items():
        _place(tokens, types, number, token, TokenType.NORMAL)
    for added in raw.get("added_tokens") or ():
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        _place(tokens, types, added["id"], added["content"], kind)
    return tokens, types


def _sentencepiece(folder: Path, raw: Mapping[str, Any], about: Mapping[str, Any], *, vocabulary: int) -> GgufTokenizer:
    proto = sentencepiece_bpe(folder, raw)
    tokens, types = _filled(vocabulary)
    scores = [0.0] * vocabulary
    for number, piece in enumerate(proto.pieces):
        _place(tokens, types, number, piece.piece, TokenType(piece.type))  # the numbers of sentencepiece are gguf's
        scores[number] = piece.score
    known = {token: number for number, token in enumerate(tokens)}
    ids = {"unknown": proto.trainer_spec.unk_id, **_special_ids(about, known)}
    adds_bos, template = _adds_bos(folder, about, known), _chat_template(folder, about)
    return GgufTokenizer(_SENTENCEPIECE, "default", tokens, types, [], scores, ids, adds_bos, template)


def _filled(vocabulary: int) -> tuple[list[str], list[int]]:
    return [f"[PAD{number}]" for number in range(vocabulary)], [int(TokenType.UNUSED)] * vocabulary


def _place(tokens: list[str], types: list[int], number: int, token: str, kind: TokenType) -> None:
    if number >= len(tokens):
        why = f"token {token!r} has id {number}, and the model has a vocabulary of {len(tokens)}"
        raise refused(why, "use the tokenizer that the model was trained with")
    tokens[number], types[number] = token, int(kind)


def _special_ids(about: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, int]:
    keys = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
    found = {name: _content(about.get(key)) for name, key in keys.items()}
    return {name: known[token] for name, token in found.items() if token is not None and token in known}


def _adds_bos(folder: Path, about: Mapping[str, Any], known: Mapping[str, int]) -> bool:
    """Whether an empty text becomes BOS."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    bos = _content(about.get("bos_token"))
    made = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("").ids
    return bool(made) and bos is not None and made[0] == known.get(bos)


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def _chat_template(folder: Path, about: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = about.get("chat_template")
    return given if isinstance(given, str) else None
