"""Config schema of a data-prep job: data sources, tokenizer, cleaning, deduplication, held-out split, token shards.

`load` reads the config file; the rest of the package takes the frozen `CorpusConfig`. Paths are relative to the working
directory.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from data_prep.config.cleaning import CleaningSteps, StepSection, parse_steps
from data_prep.config.dedup import DedupSection
from data_prep.config.text_policy import TextPolicy
from foundation import configfile
from foundation.errors import ConfigError
from foundation.paths import LocalPath, PathOrUrl
from foundation.section import Section, parse
from foundation.user_function import FunctionName

SourceType = Literal["text", "jsonl", "parquet", "datasets", "arrow", "warc", "webdataset", "function"]
EngineChoice = Literal["auto", "fastokens", "gigatoken", "tokenizers", "sentencepiece"]
TrainedKind = Literal["bpe", "sentencepiece-unigram", "sentencepiece-bpe"]

TOKENIZER_PARENT = "tokenizer"
"""Key of a given tokenizer among the manifest's parents; no source may have this name."""
_MAX_RECORD_BYTES = 256 << 20
"""Default of `max_record_bytes`: more than any real document; a worker with such a line takes about 1 GB."""


_OWN_ARGUMENTS = {
    "streaming": "the data is fetched once and saved in the job directory, not streamed: remove it, and name a part of "
    'the data by "split", e.g. "train[:1%]"',
    "split": 'name it as "split" of the source, and remove it here',
    "path": 'it is the "builder" of the source: remove it here',
}
"""Arguments of `datasets.load_dataset` that `kwargs` may not have, with the remedy."""


class Source(Section):
    """One named data source of the corpus: files, or a dataset that `datasets.load_dataset` downloads."""

    name: str | None = Field(
        None,
        min_length=1,
        description='name of the source in reports, document ids and the manifest, e.g. "web"; default: its first path '
        "as written",
    )
    type: SourceType | None = Field(
        None,
        description='file format: "text", "jsonl", "parquet", "datasets" (save_to_disk), "arrow" (IPC, Feather), '
        '"warc" (WARC, WET), "webdataset" (tar) or "function" (see "reader"); null infers it from the file names',
    )
    path: str | list[str] | None = Field(
        None,
        description='file, directory, glob or fsspec URL, or a list of them, e.g. "corpus/*.jsonl.zst" or '
        '"s3://bucket/web/**/*.parquet"',
    )
    include: list[str] | None = Field(
        None,
        description='globs of file names or relative paths to read in a directory, e.g. ["*.md", "src/*.py"]; null: '
        "the usual suffixes of the type",
    )
    exclude: list[str] = Field(
        [], description='globs of file names or relative paths to leave out, e.g. ["drafts/*", "*.min.js"]'
    )
    reader: FunctionName | None = Field(
        None,
        description='your own reader as module:function, e.g. "my_readers:read_mbox", for the type "function": it gets '
        "the path of a file and yields its records in order, as dicts; null: the reader of the type",
    )
    clean: CleaningSteps | None = Field(
        None,
        description='cleaning steps of this source instead of the global ones, e.g. [{"step": "unicode"}] for code; '
        '[]: none; null: those of the config\'s "clean"',
    )
    text_field: str = Field(
        "text",
        min_length=1,
        description='field (jsonl) or column (parquet, datasets) that holds the text, e.g. "content", or '
        '"meta.text" for a field of an object (struct)',
    )
    messages_field: str | list[str] | None = Field(
        None,
        min_length=1,
        description='field or column with the list of chat messages, e.g. "messages" or "conversations"; or the fields '
        'of what the user and, the last one, the assistant says, e.g. ["instruction", "input", "output"]; set it for a '
        "source of conversations",
    )
    tools_field: str | None = Field(
        None, description='for conversations: field with the tools that the chat template lists, e.g. "tools"'
    )
    learn: Literal["assistant", "everything"] = Field(
        "assistant",
        description='for conversations: tokens in the loss mask, "assistant" (its turns only) or "everything" (all '
        "tokens)",
    )
    id_field: str | None = Field(
        None,
        description='field or column of a document id that every record has, e.g. "id"; null: file and position are '
        "the id",
    )
    seen: bool = Field(
        False,
        description="true: documents that a model has seen, e.g. of an earlier corpus; they are not written, and the "
        "duplicates of them in other sources are dropped. For dedup.exact or dedup.near",
    )
    split: str | None = Field(None, description='for "datasets": split to read, e.g. "train"')
    builder: str | None = Field(
        None,
        description='for "datasets", instead of a path: name for datasets.load_dataset, e.g. "HuggingFaceFW/fineweb"',
    )
    kwargs: dict[str, Any] = Field(
        {}, description='further keyword arguments of datasets.load_dataset, e.g. {"name": "sample-10BT"}'
    )

    @model_validator(mode="after")
    def _check_fields(self) -> Source:
        if (self.path is None) == (self.builder is None):
            raise ValueError("a source needs either a path or a builder, and not both")
        if self.builder is not None and (self.type != "datasets" or self.split is None):
            raise ValueError('a source with a builder needs "type": "datasets" and a "split"')
        if self.kwargs and self.builder is None:
            raise ValueError("kwargs are arguments of the builder, and the source has no builder")
        for key, why in _OWN_ARGUMENTS.items() if self.builder is not None else ():
            if key in self.kwargs:
                raise ValueError(f"kwargs.{key}: {why}")
        if (self.reader is None) == (self.type == "function"):
            raise ValueError('a source with a reader needs "type": "function", and one of that type a reader')
        if not self.paths and self.builder is None:
            raise ValueError("the list of paths is empty: give at least one path")
        if self.label == TOKENIZER_PARENT:
            raise ValueError(f"the name '{TOKENIZER_PARENT}' is reserved for the tokenizer in the manifest")
        return self

    @model_validator(mode="after")
    def _check_conversation(self) -> Source:
        if self.messages_field is None and (self.tools_field is not None or self.learn != "assistant"):
            raise ValueError("tools_field and learn apply to conversations only, and the source has no messages_field")
        if isinstance(self.messages_field, list) and (len(self.messages_field) < 2 or "" in self.messages_field):
            raise ValueError('a list as messages_field names two fields or more, e.g. ["prompt", "completion"]')
        if self.messages_field is not None and self.type in ("text", "warc"):
            raise ValueError(
                f"messages_field needs records: the type must be jsonl, parquet or datasets, not {self.type}"
            )
        return self

    @property
    def paths(self) -> list[str]:
        """Paths as written in the config; empty for a builder."""
        return [self.path] if isinstance(self.path, str) else list(self.path or [])

    @property
    def label(self) -> str:
        """Name of the source in reports, document ids and the manifest."""
        return self.name or (self.paths[0] if self.paths else str(self.builder))


class TokenizerSection(Section):
    """The tokenizer: either trained on a sample of the corpus (`train`) or an existing one (`path`)."""

    train: TrainedKind | None = Field(
        None, description='kind to train: "bpe" (byte-level), "sentencepiece-unigram" or "sentencepiece-bpe"'
    )
    path: PathOrUrl | None = Field(
        None,
        description="existing tokenizer to use: a Hugging Face tokenizer folder, e.g. base, or a sentencepiece .model "
        "file",
    )
    engine: EngineChoice = Field(
        "auto",
        description='tokenization library: "auto" takes the fastest installed one that was verified to give the ids of '
        'the reference ("sentencepiece" for a sentencepiece model, else "tokenizers"); "fastokens", "gigatoken", '
        '"tokenizers" and "sentencepiece" name one. The token ids are the same',
    )
    vocab_size: int = Field(
        32_000,
        ge=300,
        le=2_000_000,
        description="vocabulary size to train, in tokens, special tokens included, e.g. 32000; at least 300",
    )
    sample_bytes: int = Field(
        64 << 20,
        ge=1,
        description="bytes of text that the tokenizer is trained on, sampled by document hash from the train split, "
        "e.g. 67108864 (64 MiB)",
    )
    eos_token: str = Field(
        "<|endoftext|>", min_length=1, description='end-of-document token of a trained tokenizer, e.g. "</s>"'
    )
    bos_token: str | None = Field(
        None,
        min_length=1,
        description='beginning-of-sequence token of a trained tokenizer, e.g. "<s>"; for prepend_bos; null: none',
    )
    chat_template: LocalPath | None = Field(
        None,
        description="path of a Jinja chat template file, e.g. chat.jinja; null: the one of the given tokenizer, if it "
        "has one",
    )
    date: str | None = Field(
        None,
        description="date that the chat template prints as today's (strftime_now; Llama 3.2, gpt-oss), e.g. "
        '"2026-01-31"; null refuses such a template',
    )
    special_tokens: list[str] = Field(
        [],
        description='further special tokens of a trained tokenizer, e.g. ["<|im_start|>", "<|im_end|>"] for a chat '
        "template",
    )

    @field_validator("date")
    @classmethod
    def _check_date(cls, date: str | None) -> str | None:
        return None if date is None else datetime.date.fromisoformat(date).isoformat()

    @model_validator(mode="after")
    def _check_origin(self) -> TokenizerSection:
        if (self.train is None) == (self.path is None):
            raise ValueError('give either {"train": kind} or {"path": folder or .model file}, and not both')
        if self.path is not None and (extras := self.model_fields_set - {"path", "engine", "chat_template", "date"}):
            extra = ", ".join(sorted(extras))
            raise ValueError(f"an existing tokenizer is used as it is: {extra} would have no effect, remove it")
        tokens = self.all_special_tokens()
        if len(set(tokens)) != len(tokens) or "" in tokens:
            raise ValueError(
                "special tokens (eos_token and bos_token included) must be different from each other and not empty"
            )
        return self

    def all_special_tokens(self) -> list[str]:
        """The special tokens of a trained tokenizer, in the order of their ids: EOS, BOS if given, the others."""
        return [self.eos_token, *([self.bos_token] if self.bos_token is not None else []), *self.special_tokens]


class CorpusConfig(Section):
    """Config of a data-prep job."""

    output: PathOrUrl = Field(
        min_length=1,
        description='path of the tokens directory to write, e.g. "out/tokens", on a local or shared file system; or its'
        " URL, e.g. s3://bucket/tokens: then the job works below HEADRACE_CACHE, and uploads shards as they finish",
    )
    sources: list[Source] = Field(
        min_length=1, description='data sources, in input order, e.g. [{"name": "web", "path": "web/*.jsonl.zst"}]'
    )
    tokenizer: TokenizerSection = Field(
        description='tokenizer to train or to use, e.g. {"train": "bpe", "vocab_size": 8192} or {"path": "folder"}'
    )
    clean: CleaningSteps = Field(
        [], description='cleaning steps, in the order they are applied, e.g. [{"step": "unicode"}, {"step": "c4"}]'
    )
    dedup: DedupSection | None = Field(
        None, description='deduplication of documents: null for none, or e.g. {"exact": true, "near": {}}'
    )
    list_dropped: Literal["no", "reasons", "texts"] = Field(
        "no",
        description='whether to list dropped documents in dropped.jsonl: "no", "reasons" (place and reason) or "texts" '
        "(their texts too)",
    )
    heldout_fraction: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="fraction of the documents in the held-out split, from 0 (no held-out split) to below 1, e.g. 0.01",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=1 << 63,
        description="random seed of the held-out split, the document order and the tokenizer's training sample, e.g. 0",
    )
    task_bytes: int = Field(
        32 << 20,
        ge=1,
        description="input bytes per map task, as stored, e.g. 33554432 (32 MiB); a crash loses at most the running "
        "tasks",
    )
    shard_tokens: int = Field(
        1 << 26, ge=1, description="approximate number of tokens per output shard, e.g. 67108864 (2^26)"
    )
    append_eos: bool = Field(True, description="true ends every document with the end-of-document (EOS) token")
    prepend_bos: bool = Field(
        False, description="true begins every document with the tokenizer's beginning-of-sequence (BOS) token"
    )
    parse_special_tokens: bool = Field(
        False,
        description='whether a literal special token in a document, e.g. "<|endoftext|>", becomes that token; false: '
        "it is tokenized as plain text",
    )
    max_bad_records: int = Field(
        0, ge=0, description="unreadable records that may be skipped in the whole job before it fails, e.g. 100"
    )
    max_bad_files: int = Field(
        0, ge=0, description="damaged files that may be skipped in the whole job before it fails, e.g. 2"
    )

    max_record_bytes: int = Field(
        _MAX_RECORD_BYTES,
        ge=1,
        description="longest record that is read, in bytes: a line (jsonl), a file (text) or a text of a table; a "
        "longer one is skipped as unreadable, e.g. 268435456 (256 MiB)",
    )

    @field_validator("sources", mode="before")
    @classmethod
    def _check_steps(cls, raw: object) -> object:
        """Checks the cleaning steps of sources, so that an error names the source."""
        for i, source in enumerate(raw if isinstance(raw, list) else []):
            if isinstance(source, dict) and isinstance(steps := source.get("clean"), list):
                parse_steps([step for step in steps if isinstance(step, dict)], at=f"sources.{i}.clean")
        return raw

    @model_validator(mode="after")
    def _check_bos(self) -> CorpusConfig:
        if self.prepend_bos and self.tokenizer.train is not None and self.tokenizer.bos_token is None:
            raise ValueError(
                "prepend_bos is true, and the tokenizer to train has no beginning-of-sequence token: "
                'set tokenizer.bos_token, e.g. "<s>", or set prepend_bos to false'
            )
        return self

    @model_validator(mode="after")
    def _check_seen(self) -> CorpusConfig:
        seen = [source.seen for source in self.sources]
        if all(seen):
            raise ValueError("all sources are marked seen, so there is nothing to write: add a source that is not")
        if any(seen) and (self.dedup is None or not (self.dedup.exact or self.dedup.near)):
            raise ValueError('a source marked seen needs deduplication of documents: set "dedup": {"exact": true}')
        return self

    @model_validator(mode="after")
    def _check_names(self) -> CorpusConfig:
        labels = [s.label for s in self.sources]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two sources have the name '{twice[0]}': give one of them another \"name\"")
        return self

    @model_validator(mode="after")
    def _check_conversations(self) -> CorpusConfig:
        lines = self.dedup is not None and self.dedup.lines is not None
        chats = [source for source in self.sources if source.messages_field is not None]
        cleaned = [source for source in chats if self.steps_of(source)]
        if cleaned or (chats and lines):
            label = (cleaned or chats)[0].label
            which = "clean" if cleaned else "dedup.lines"
            raise ValueError(
                f"{which} applies to plain texts only, and source '{label}' holds conversations: "
                "prepare them in a separate job, and mix the two outputs in training"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """The config for the manifest, without `output`: the directory may be moved or renamed."""
        identity = self.model_dump(exclude={"output"})
        if self.max_record_bytes == _MAX_RECORD_BYTES:  # jobs and outputs of older versions lack these keys
            del identity["max_record_bytes"]
        if self.tokenizer.bos_token is None:
            del identity["tokenizer"]["bos_token"]
        if self.tokenizer.date is None:
            del identity["tokenizer"]["date"]
        for source in identity["sources"]:
            for key in ("clean", "reader"):
                if source[key] is None:
                    del source[key]
            if not source["seen"]:
                del source["seen"]
        if self.dedup is not None and self.dedup.near is not None and self.dedup.near.clusters == "connected":
            del identity["dedup"]["near"]["clusters"], identity["dedup"]["near"]["similarity"]
        return identity

    @property
    def has_heldout(self) -> bool:
        """Whether there is a held-out split; else all documents are in the train split."""
        return self.heldout_fraction > 0

    @property
    def has_conversations(self) -> bool:
        """Whether a source holds conversations; the token files then have loss masks."""
        return any(source.messages_field is not None for source in self.sources)

    def steps_of(self, source: Source) -> Sequence[StepSection]:
        """Cleaning steps of a source: its own, or those of the config."""
        return self.clean if source.clean is None else source.clean

    @property
    def all_steps(self) -> list[StepSection]:
        """Cleaning steps of the config and of all sources."""
        return [*self.clean, *(step for source in self.sources for step in source.clean or ())]

    def text_policy(self) -> TextPolicy:
        """The policy for BOS, EOS and special tokens."""
        return TextPolicy(
            prepend_bos=self.prepend_bos, append_eos=self.append_eos, parse_special_tokens=self.parse_special_tokens
        )


def changed_fields(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Keys that differ between two `CorpusConfig.identity` and change the output bytes, as `config.KEY`, sorted.

    `max_bad_records` and `max_bad_files` are ignored: they decide whether there is an output, not its contents, and a
    resumed job may change them.
    """
    keys = (new.keys() | old.keys()) - {"max_bad_records", "max_bad_files"}
    return sorted(f"config.{key}" for key in keys if new.get(key) != old.get(key))


_TRAINING_KEYS = frozenset({"model", "data", "run"})


def load(path: str, overrides: Sequence[str] = ()) -> CorpusConfig:
    """Reads a config file, resolving `extends` and applying `--set` overrides.

    Args:
        path: the JSON config file.
        overrides: "key=value" strings, e.g. "tokenizer.vocab_size=8192".

    Raises:
        ConfigError: an unknown or missing key, or an invalid value.
    """
    raw = configfile.load(path, overrides)
    if raw.keys() >= _TRAINING_KEYS:
        why = "it has model, data and run: it is the config of a training run"
        raise ConfigError("--config", str(path), why=why, remedy=f"headrace train --config {path}")
    return parse(CorpusConfig, raw)
