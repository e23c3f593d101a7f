"""The tokenizer of a GGUF file, from the tokenizer.json or tokenizer.model of a Hugging Face folder. No torch.

llama.cpp supports byte-level BPE, with a named split pattern, and sentencepiece's BPE, with scores of pieces. Refused
are patterns without a name, and sentencepiece's unigram, which llama.cpp segments differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, Keys, TokenType

from data_prep.tokenizer.fingerprint import NAMED_TEMPLATES
from data_prep.tokenizer.load import read_config, token_text
from foundation.foreign_json import read_json
from pipeline.models.folder.beside_weights import GENERATION, read_generation
from pipeline.models.split_names import refused, sentencepiece_bpe, split_name

_BPE, _SENTENCEPIECE = "gpt2", "llama"
_DEFAULT = "default"
_ENDS = ("eos", "eot", "eom")
"""Tokens at which llama.cpp stops: end of text, turn or message; it treats all alike (`llama_vocab_is_eog`)."""


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer as a GGUF file holds it.

    Attributes:
        model: "gpt2" (byte-level BPE) or "llama" (sentencepiece BPE).
        split: name of the split pattern; "default" with sentencepiece.
        tokens: text of every token by id; as many as the model's rows.
        types: type of every token, a number of `gguf.TokenType`.
        merges: merges of byte-level BPE, "left right"; empty for sentencepiece.
        scores: scores of sentencepiece's pieces; None for byte-level BPE.
        ids: "bos", "eos", "unknown", "padding" -> id; also "eot" and "eom", further tokens that end a generation.
        adds_bos: whether the Hugging Face tokenizer puts BOS in front.
        chat_templates: name -> template in Jinja; programs use "default".
    """

    model: str
    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float] | None
    ids: Mapping[str, int]
    adds_bos: bool
    chat_templates: Mapping[str, str]

    def write(self, writer: GGUFWriter) -> None:
        """Adds the tokenizer's keys to a file."""
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
            "eot": writer.add_eot_token_id,
            "eom": writer.add_eom_token_id,
            "unknown": writer.add_unk_token_id,
            "padding": writer.add_pad_token_id,
        }
        for name, number in self.ids.items():
            adders[name](number)
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(False)
        if _DEFAULT in self.chat_templates:
            writer.add_chat_template(self.chat_templates[_DEFAULT])
        others = sorted(self.chat_templates.keys() - {_DEFAULT})
        for name in others:
            writer.add_string(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name), self.chat_templates[name])
        if others:
            writer.add_array(Keys.Tokenizer.CHAT_TEMPLATES, others)


def read_tokenizer(folder: Path, *, vocabulary: int) -> GgufTokenizer:
    """Reads the tokenizer of a folder.

    Args:
        folder: folder with tokenizer.json, and with tokenizer.model where sentencepiece made it.
        vocabulary: V, rows of the embedding; ids without a token get filler tokens.

    Raises:
        ConfigError: there is no tokenizer, or llama.cpp has none that gives the same ids.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise refused(f"{folder} has no tokenizer.json", "save it with transformers' fast tokenizer")
    raw = read_json(file)
    about = read_config(folder)
    if (folder / "tokenizer.model").is_file():
        return _sentencepiece(folder, raw, about, vocabulary=vocabulary)
    tokens, types = _byte_level_tokens(raw, vocabulary)
    merges = [each if isinstance(each, str) else " ".join(each) for each in raw["model"]["merges"]]
    known = {token: number for number, token in enumerate(tokens)}
    ids, adds_bos = _special_ids(folder, about, known), _adds_bos(folder, about, known)
    templates = _chat_templates(folder, about)
    return GgufTokenizer(_BPE, split_name(raw), tokens, types, merges, None, ids, adds_bos, templates)


def _byte_level_tokens(raw: Mapping[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    tokens, types = _filled(vocabulary)
    for token, number in raw["model"]["vocab"].items():
        _place(tokens, types, number, token, TokenType.NORMAL)
    _place_added(tokens, types, raw)
    return tokens, types


def _place_added(tokens: list[str], types: list[int], raw: Mapping[str, Any], *, begin: int = 0) -> None:
    """Places a tokenizer.json's added tokens, from id `begin` on."""
    for added in raw.get("added_tokens") or ():
        if added["id"] >= begin:
            kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
            _place(tokens, types, added["id"], added["content"], kind)


def _sentencepiece(folder: Path, raw: Mapping[str, Any], about: Mapping[str, Any], *, vocabulary: int) -> GgufTokenizer:
    proto = sentencepiece_bpe(folder, raw)
    tokens, types = _filled(vocabulary)
    scores = [0.0] * vocabulary
    for number, piece in enumerate(proto.pieces):
        _place(tokens, types, number, piece.piece, TokenType(piece.type))  # gguf uses sentencepiece's numbers
        scores[number] = piece.score
    _place_added(tokens, types, raw, begin=len(proto.pieces))
    known = {token: number for number, token in enumerate(tokens)}
    ids = {"unknown": proto.trainer_spec.unk_id, **_special_ids(folder, about, known)}
    adds_bos, templates = _adds_bos(folder, about, known), _chat_templates(folder, about)
    return GgufTokenizer(_SENTENCEPIECE, "default", tokens, types, [], scores, ids, adds_bos, templates)


def _filled(vocabulary: int) -> tuple[list[str], list[int]]:
    return [f"[PAD{number}]" for number in range(vocabulary)], [int(TokenType.UNUSED)] * vocabulary


def _place(tokens: list[str], types: list[int], number: int, token: str, kind: TokenType) -> None:
    if number >= len(tokens):
        why = f"token {token!r} has id {number}, and the model has a vocabulary of {len(tokens)}"
        raise refused(why, "use the tokenizer that the model was trained with")
    tokens[number], types[number] = token, int(kind)


def _special_ids(folder: Path, about: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, int]:
    keys = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
    found = {name: token_text(about.get(key)) for name, key in keys.items()}
    ids = {name: known[token] for name, token in found.items() if token is not None and token in known}
    ends = [number for number in _ends(folder) if number != ids.get("eos")]
    wrong = next((number for number in ends if not 0 <= number < len(known)), None)
    if wrong is not None:
        raise refused(f"{wrong} ends a generation, and the model has {len(known)} ids", f"remove it from {GENERATION}")
    names = [name for name in _ENDS if name not in ids]
    if len(ends) > len(names):
        why = f"{len(ends) + len(_ENDS) - len(names)} tokens end a generation, and a GGUF file names {len(_ENDS)}"
        raise refused(why, f"leave {len(_ENDS)} in eos_token_id of {GENERATION}")
    return ids | dict(zip(names, ends, strict=False))


def _ends(folder: Path) -> list[int]:
    """Reads the tokens that end a generation, from generation_config.json or else config.json, as transformers does."""
    given = read_generation(folder)
    if given is None and (folder / "config.json").is_file():
        given = read_json(folder / "config.json")
    ends = (given or {}).get("eos_token_id")
    return list(dict.fromkeys(ends)) if isinstance(ends, list) else [] if ends is None else [ends]


def _adds_bos(folder: Path, about: Mapping[str, Any], known: Mapping[str, int]) -> bool:
    """Whether an empty text becomes BOS."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    bos = token_text(about.get("bos_token"))
    made = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("").ids
    return bool(made) and bos is not None and made[0] == known.get(bos)


def _chat_templates(folder: Path, about: Mapping[str, Any]) -> dict[str, str]:
    """Maps names to templates; files take precedence over tokenizer_config.json, as in transformers."""
    given = about.get("chat_template")
    found = {_DEFAULT: given} if isinstance(given, str) else {each["name"]: each["template"] for each in given or ()}
    files = {file.stem: file for file in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[_DEFAULT] = folder / "chat_template.jinja"
    return {**({} if files else found), **{name: file.read_text(encoding="utf-8") for name, file in files.items()}}
