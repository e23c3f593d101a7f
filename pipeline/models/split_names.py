"""Finds llama.cpp's name for the pre-tokenizer of a tokenizer, or the reason why it has none. No torch.

llama.cpp supports byte-level BPE, with a named split pattern, and sentencepiece's BPE, with scores of pieces. Refused
are patterns without a name, and sentencepiece's unigram, which llama.cpp segments differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.foreign_json import read_json

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {_LLAMA3: "smaug-bpe", _QWEN2: "qwen2"}
"""Split pattern -> llama.cpp's name."""
LLAMA3 = "llama-bpe"
"""llama.cpp's name of Llama 3's pattern if whole words of the vocabulary precede merges (`ignore_merges`)."""
GPT2 = "gpt-2"
"""llama.cpp's name of the pattern inside ByteLevel of the package tokenizers."""
SENTENCEPIECE = "default"
"""llama.cpp's name for scores of pieces instead of a split pattern."""


@dataclass(frozen=True)
class Conversion:
    """The pre-tokenizer of llama.cpp that fits a tokenizer, if there is one.

    Attributes:
        name: llama.cpp's name of the pre-tokenizer; None if none gives the same ids.
        why: reason why there is none; None if there is one.
    """

    name: str | None
    why: str | None

    @property
    def text(self) -> str:
        """The result in one line, for the user."""
        if self.name is None:
            return f"transformers and vLLM take it, llama.cpp does not: {self.why}"
        kind = "sentencepiece BPE" if self.name == SENTENCEPIECE else f"pre-tokenizer {self.name}"
        return f"transformers, vLLM and llama.cpp ({kind}) take it"


def conversion(folder: Path) -> Conversion:
    """Checks whether GGUF files can hold the tokenizer of a folder."""
    try:
        return Conversion(pre_tokenizer(folder), None)
    except ConfigError as error:
        return Conversion(None, error.why)


def pre_tokenizer(folder: Path) -> str:
    """Returns llama.cpp's name for the pre-tokenizer of a folder.

    Args:
        folder: folder with tokenizer.json, and with tokenizer.model where sentencepiece made it.

    Raises:
        ConfigError: llama.cpp has no pre-tokenizer that gives the same ids, or the folder has no tokenizer.json.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise refused(f"{folder} has no tokenizer.json", "save it with transformers' fast tokenizer")
    raw = read_json(file)
    if not (folder / "tokenizer.model").is_file():
        return split_name(raw)
    sentencepiece_bpe(folder, raw)
    return SENTENCEPIECE


def split_name(tokenizer: Mapping[str, Any]) -> str:
    """Returns llama.cpp's name for the split pattern of a byte-level BPE tokenizer.json.

    Raises:
        ConfigError: llama.cpp has no such pattern.
    """
    if (tokenizer.get("model") or {}).get("type") != "BPE":
        raise refused("it is no BPE tokenizer: llama.cpp segments unigram models otherwise, so that ids would differ")
    if tokenizer.get("normalizer"):
        raise refused("it normalizes text before it splits it, and llama.cpp's byte-level BPE does not")
    steps = tokenizer.get("pre_tokenizer") or {}
    listed = steps.get("pretokenizers", [steps])
    byte_level = [step for step in listed if step.get("type") == "ByteLevel"]
    splits = [step for step in listed if step.get("type") == "Split"]
    if len(byte_level) != 1 or len(splits) > 1 or len(listed) != 1 + len(splits) or byte_level[0]["add_prefix_space"]:
        raise refused("llama.cpp does not have its pre-tokenizer")
    _refuse_other_bpe(tokenizer["model"])
    if not splits:
        return _by_merges(tokenizer, GPT2)
    pattern = splits[0]["pattern"].get("Regex")
    if byte_level[0].get("use_regex") or splits[0].get("behavior") != "Isolated" or pattern not in SPLITS:
        raise refused(f"llama.cpp has no name for its split pattern: {str(pattern)[:80]}")
    if pattern == _LLAMA3 and tokenizer["model"].get("ignore_merges"):
        return LLAMA3
    return _by_merges(tokenizer, SPLITS[pattern])


def _refuse_other_bpe(model: Mapping[str, Any]) -> None:
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise refused(f"its model has {key} {model[key]!r}, which llama.cpp's byte-level BPE does not")


def _by_merges(tokenizer: Mapping[str, Any], name: str) -> str:
    """Returns `name`, a pattern for which llama.cpp finds words only by merges.

    Raises:
        ConfigError: the tokenizer finds a word of the vocabulary before merges, which would give other ids.
    """
    unmade = words_without_merges(tokenizer)
    if unmade:
        why = f"{len(unmade)} words of its vocabulary, e.g. {unmade[0]!r}, come before merges (ignore_merges)"
        raise refused(f"{why}, which llama.cpp does for Llama 3's split pattern alone")
    return name


def words_without_merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Tokens that a tokenizer.json with `ignore_merges` finds as whole words and that merges do not make."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    if not tokenizer["model"].get("ignore_merges"):
        return []
    added = {each["content"] for each in tokenizer.get("added_tokens") or ()}
    plain = {"version": "1.0", "added_tokens": [], "model": {**tokenizer["model"], "ignore_merges": False}}
    merged = Tokenizer.from_str(json.dumps(plain)).model
    words = (word for word in tokenizer["model"]["vocab"] if word not in added)
    return [word for word in words if [each.value for each in merged.tokenize(word)] != [word]]


def sentencepiece_bpe(folder: Path, raw: Mapping[str, Any]) -> Any:
    """Parses the tokenizer.model of a sentencepiece BPE that llama.cpp supports.

    Raises:
        ConfigError: the model is a unigram model, changes white space, or differs from tokenizer.json.
    """
    from sentencepiece import sentencepiece_model_pb2  # noqa: PLC0415 - only sentencepiece models need protobuf

    if raw["model"]["type"] != "BPE":
        raise refused("it is a sentencepiece unigram model, which llama.cpp segments otherwise, so that ids differ")
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((folder / "tokenizer.model").read_bytes())
    if proto.normalizer_spec.add_dummy_prefix or proto.normalizer_spec.remove_extra_whitespaces:
        raise refused("it changes white space (add_dummy_prefix, remove_extra_whitespaces)")
    _refuse_other_pieces(raw, [piece.piece for piece in proto.pieces])
    return proto


def _refuse_other_pieces(raw: Mapping[str, Any], pieces: list[str]) -> None:
    """Refuses a tokenizer.model that differs from tokenizer.json: programs read one or the other.

    Raises:
        ConfigError: they differ; names the first id that stands for two pieces.
    """
    tokens = {number: token for token, number in raw["model"]["vocab"].items()}
    for number, piece in enumerate(pieces):
        if tokens.get(number, piece) != piece:
            why = f"id {number} is {tokens[number]!r} in tokenizer.json and {piece!r} in tokenizer.model"
            raise refused(why, "copy the tokenizer.model that belongs to tokenizer.json, or remove the wrong one")


def refused(why: str, remedy: str = "serve the Hugging Face folder with vLLM or transformers") -> ConfigError:
    """Makes the error for a tokenizer that llama.cpp does not support."""
    return ConfigError("tokenizer", why=why, remedy=remedy)
