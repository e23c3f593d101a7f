"""The large run that a ladder is for: its config without its layout, and its counts of parameters and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from foundation.configfile import ConfigTree
from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.deepspeed.file import translate
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.engines.common import model_dtype
from pipeline.models.construction.meta import build_meta
from pipeline.models.count import ModelSize, measure
from pipeline.plan.laws.law_warnings import Training, training_of
from pipeline.run.prepare import PreparedRun, prepare

_LAYOUT = (
    "parallel",
    "launch",
    "memory",
    "tensor_parallel",
    "expert_parallel",
    "pipeline",
    "activation_checkpointing",
)
"""Sections that spread a model over devices: small models need none."""
_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class ModelCounts:
    """Counts of a model.

    Attributes:
        body: parameters without input embedding and output head: N of the published laws. For a mixture of experts, the
            parameters that a token uses.
        multiplied: parameters in matrix products, i.e. the body and the head: N of the ladder's own fit. Leaving the
            head out bends the law of small models (Pearce and Song 2024, arXiv:2406.12907; Porian et al. 2024,
            arXiv:2406.19146).
        flops_per_token: FLOPs of one token, forward and backward.
    """

    body: int
    multiplied: int
    flops_per_token: float


@dataclass(frozen=True)
class LargeRun:
    """The run whose loss is predicted.

    Attributes:
        raw: config of the run, as the user gave it.
        flat: config without its layout, for one process.
        prepared: run of `flat`, after the checks of its data and model.
        model: Hugging Face config of the model.
        counts: parameters and FLOPs of the model.
    """

    raw: Mapping[str, Any]
    flat: Mapping[str, Any]
    prepared: PreparedRun
    model: PretrainedConfig
    counts: ModelCounts

    @property
    def run(self) -> ResolvedRun:
        """The run, resolved for one process."""
        return self.prepared.run

    @property
    def tokens(self) -> int:
        """Training tokens."""
        return self.run.accounts.tokens(self.run.steps)

    @property
    def flops(self) -> float:
        """FLOPs of the whole training."""
        return self.counts.flops_per_token * self.tokens

    @property
    def training(self) -> Training:
        """Hyperparameters of the run, for the published laws."""
        run, body = self.run, self.counts.body
        return training_of(
            run.batch, run.schedule, run.config.optimizer, tokens=self.tokens, parameters_non_embedding=body
        )

    def count(self, config: PretrainedConfig) -> ModelCounts:
        """Counts parameters and FLOPs of another model, at this run's dtype and sequence length."""
        given, dtype = self.run.config, model_dtype(self.run.config)
        model = build_meta(config, dtype=dtype, attn_implementation=given.model.attn_implementation)
        size = measure(model, config, sequence_length=self.run.batch.sequence_length)
        return _counts(size, tied=bool(config.tie_word_embeddings))


def read_large_run(raw: Mapping[str, Any]) -> LargeRun:
    """Checks the config of the large run and counts its model.

    Raises:
        ConfigError, DataError: the config cannot run, or a ladder of it would predict nothing.
    """
    section = raw.get("model") or {}
    if raw.get("distill"):
        remedy = "a ladder of the teacher's config, or of this one without the section"
        raise ConfigError("distill", why="a ladder predicts the next-token loss of a model alone", remedy=remedy)
    if section.get("path") and not section.get("fresh"):
        why = "it continues a trained model, and smaller ones of the same training do not exist"
        raise ConfigError("model.path", section["path"], why=why, remedy="model.config, or model.fresh true")
    if raw.get("stages") or isinstance(raw.get("train_batch_size"), Mapping):
        why = "the small runs of a ladder have steps that are all alike, and ends of stages do not scale"
        raise ConfigError("stages", why=why, remedy="use the config of the first stage alone, with its last batch size")
    if not raw.get("train_batch_size"):
        why = "without it the batch depends on the number of processes"
        raise ConfigError("train_batch_size", why=why, remedy='add "train_batch_size": samples per step')
    flat = flattened(raw)
    if (flat.get("evaluation") or {}).get("samples") == 0:
        why = "a ladder fits the held-out loss, and this is no evaluation"
        raise ConfigError("evaluation.samples", 0, why=why, remedy="leave it out, and name data.sources.0.heldout")
    prepared = prepare(resolve(_parsed(flat), world_size=1))
    config = prepared.model.config
    assert isinstance(config, PretrainedConfig)
    if (prepared.size.flops_per_token) is None:
        raise ConfigError("model.config.model_type", config.model_type, why="it has no heads", remedy="e.g. llama")
    return LargeRun(dict(raw), flat, prepared, config, _counts_of(prepared))


def flattened(raw: Mapping[str, Any]) -> ConfigTree:
    """A config without its layout over devices; each step keeps its samples."""
    return {key: value for key, value in raw.items() if key not in (*_LAYOUT, *_BATCH)}


def _counts_of(prepared: PreparedRun) -> ModelCounts:
    return _counts(prepared.size, tied=bool(prepared.hf_config.get("tie_word_embeddings")))


def _counts(size: ModelSize, *, tied: bool) -> ModelCounts:
    body = size.non_embedding(tied=tied)
    return ModelCounts(body, body + size.embedding, size.flops_per_token or 0.0)


def _parsed(raw: Mapping[str, Any]) -> Config:
    return parse(Config, translate(dict(raw)).raw)
