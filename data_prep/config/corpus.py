"""The config of one data-prep job: what is read, how it is tokenised, how it is cut into shards.

`load` reads the file; everything else in this package takes the frozen `CorpusConfig`. Paths are relative to the
working directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from data_prep.config.cleaning import Steps
from data_prep.config.dedup import DedupSection
from data_prep.config.text_policy import TextPolicy
from headrace.base import configfile
from headrace.base.section import Section, parse

SourceType = Literal["text", "jsonl", "parquet", "datasets"]
EngineChoice = Literal["auto", "fastokens", "gigatoken", "tokenizers"]
TrainedKind = Literal["bpe", "sentencepiece-unigram", "sentencepiece-bpe"]

TOKENIZER_PARENT = "tokenizer"
"""Name of the given tokenizer among the parents in the manifest; no source may carry it."""


class Source(Section):
    """One named part of the corpus."""

    name: str | None = Field(None, min_length=1, description="a name for reports; default: the path as it is written")
    type: SourceType | None = Field(
        None, description='"text", "jsonl", "parquet" or "datasets"; inferred from the file names when omitted'
    )
    path: str | list[str] | None = Field(None, description="a file, a directory or a glob, or a list of them")
    include: list[str] | None = Field(
        None, description='globs of file names or relative paths to read in a directory, e.g. ["*.md", "src/*.py"]'
    )
    exclude: list[str] = Field([], description="globs of file names or relative paths to leave out")
    text_field: str = Field("text", min_length=1, description="the field or column that holds the text")
    messages_field: str | None = Field(
        None, min_length=1, description='for conversations: the field that holds the messages, e.g. "messages"'
    )
    tools_field: str | None = Field(None, description="for conversations: the field of the tools the template lists")
    learn: Literal["assistant", "everything"] = Field(
        "assistant", description='of conversations: what the loss is taken on, "assistant" or "everything"'
    )
    id_field: str | None = Field(None, description="field or column of an id; without one, a record's place is its id")
    split: str | None = Field(None, description='for "datasets": the split to read, e.g. "train"')
    builder: str | None = Field(
        None, description='for "datasets": a builder or hub name for datasets.load_dataset, instead of a path'
    )
    kwargs: dict[str, Any] = Field({}, description='further arguments of datasets.load_dataset, e.g. {"name": "en"}')

    @model_validator(mode="after")
    def _place(self) -> Source:
        if (self.path is None) == (self.builder is None):
            raise ValueError("a source has either a path or a builder")
        if self.builder is not None and (self.type != "datasets" or self.split is None):
            raise ValueError('a builder needs "type": "datasets" and a "split"')
        if self.kwargs and self.builder is None:
            raise ValueError("kwargs are the builder's, and there is no builder")
        if not self.paths and self.builder is None:
            raise ValueError("the list of paths is empty")
        if self.messages_field is None and (self.tools_field is not None or self.learn != "assistant"):
            raise ValueError("tools_field and learn are for conversations, and there is no messages_field")
        if self.messages_field is not None and self.type == "text":
            raise ValueError("a text file is no conversation: messages_field needs jsonl, parquet or datasets")
        if self.label == TOKENIZER_PARENT:
            raise ValueError(f"the name '{TOKENIZER_PARENT}' is taken by the tokenizer in the manifest")
        return self

    @property
    def paths(self) -> list[str]:
        """The paths as given; empty for a builder."""
        return [self.path] if isinstance(self.path, str) else list(self.path or [])

    @property
    def label(self) -> str:
        """The name by which reports and document ids call this source."""
        return self.name or (self.paths[0] if self.paths else str(self.builder))


class TokenizerSection(Section):
    """A tokenizer to train (`train`) or to take (`path`)."""

    train: TrainedKind | None = Field(
        None, description='"bpe" (byte-level), "sentencepiece-unigram" or "sentencepiece-bpe"'
    )
    path: str | None = Field(None, description="a Hugging Face tokenizer folder, or a sentencepiece .model file")
    engine: EngineChoice = Field(
        "auto",
        description='what turns text into ids: "auto" takes the fastest that is proven to give the ids of "tokenizers"',
    )
    vocab_size: int = Field(
        32_000, ge=300, le=2_000_000, description="tokens to train, special ones included; at least 300"
    )
    sample_bytes: int = Field(
        64 << 20, ge=1, description="bytes of training text to learn from, chosen by a hash of the document"
    )
    eos_token: str = Field("<|endoftext|>", min_length=1, description="the end-of-document token")
    chat_template: str | None = Field(
        None, description="a file with a chat template; default: the one that the given tokenizer has, if any"
    )
    special_tokens: list[str] = Field([], description="further special tokens, e.g. for a chat template")

    @model_validator(mode="after")
    def _one_way(self) -> TokenizerSection:
        if (self.train is None) == (self.path is None):
            raise ValueError('give either {"train": kind} or {"path": folder or .model file}')
        if self.path is not None and (extras := self.model_fields_set - {"path", "engine", "chat_template"}):
            extra = ", ".join(sorted(extras))
            raise ValueError(f"a given tokenizer is taken as it is; {extra} would have no effect")
        if len({self.eos_token, *self.special_tokens}) != 1 + len(self.special_tokens) or "" in self.special_tokens:
            raise ValueError("special tokens must differ from each other and must not be empty")
        return self


class CorpusConfig(Section):
    """A whole data-prep job."""

    output: str = Field(min_length=1, description="the tokens directory to make")
    sources: list[Source] = Field(min_length=1, description="what to read, in this order")
    tokenizer: TokenizerSection = Field(description='{"train": "bpe", "vocab_size": 8192} or {"path": "folder"}')
    clean: Steps = Field([], description='cleaning steps in order, e.g. [{"step": "unicode"}, {"step": "c4"}]')
    dedup: DedupSection | None = Field(None, description='null, or e.g. {"exact": true, "near": {}}')
    list_dropped: Literal["no", "reasons", "texts"] = Field(
        "no", description='whether dropped.jsonl lists what was dropped: "no", "reasons", or with its "texts"'
    )
    heldout_fraction: float = Field(
        0.01, gt=0, lt=1, description="share of documents kept out of training, between 0 and 1"
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="chooses the held-out documents and the tokenizer's sample")
    task_bytes: int = Field(32 << 20, ge=1, description="bytes of input per map task: what a crash can lose")
    shard_tokens: int = Field(1 << 26, ge=1, description="tokens per output shard, about")
    append_eos: bool = Field(True, description="end every document with the end-of-document token")
    prepend_bos: bool = Field(False, description="begin every document with the beginning-of-sequence token")
    parse_special_tokens: bool = Field(
        False, description='whether a literal "<|endoftext|>" in a document becomes the token; else it is text'
    )
    max_bad_records: int = Field(0, ge=0, description="records that may be skipped as unreadable before the job fails")
    max_bad_files: int = Field(0, ge=0, description="files that may be damaged before the job fails")

    @model_validator(mode="after")
    def _distinct(self) -> CorpusConfig:
        labels = [s.label for s in self.sources]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two sources are called '{twice[0]}': give one of them another \"name\"")
        return self

    @model_validator(mode="after")
    def _whole_conversations(self) -> CorpusConfig:
        lines = self.dedup is not None and self.dedup.lines is not None
        if self.has_conversations and (self.clean or lines):
            label = next(source.label for source in self.sources if source.messages_field is not None)
            which = "clean" if self.clean else "dedup.lines"
            raise ValueError(
                f"{which} works on texts, and '{label}' holds conversations, which would pass it by: "
                "prepare them in a job of their own, and blend the two at training"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """The config as the manifest records it: all but `output`, so that a directory may be moved or renamed."""
        return self.model_dump(exclude={"output"})

    @property
    def has_conversations(self) -> bool:
        """Whether tokens come with a loss mask."""
        return any(source.messages_field is not None for source in self.sources)

    def text_policy(self) -> TextPolicy:
        """How texts become ids."""
        return TextPolicy(bos=self.prepend_bos, eos=self.append_eos, special=self.parse_special_tokens)


def differing(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Which keys of two `CorpusConfig.identity` differ in a way that makes other bytes, as `config.KEY`.

    The limits on unreadable input decide whether there is an output, not what is in it: they may be raised on the way.
    """
    keys = (new.keys() | old.keys()) - {"max_bad_records", "max_bad_files"}
    return sorted(f"config.{key}" for key in keys if new.get(key) != old.get(key))


def load(path: str, overrides: Sequence[str] = ()) -> CorpusConfig:
    """Reads a config file with its `extends` and `--set` overrides.

    Raises:
        ConfigError: anything in it that cannot be run.
    """
    return parse(CorpusConfig, configfile.load(path, overrides))
