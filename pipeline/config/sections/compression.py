"""Schema of a run's sections `distill` and `quantization_aware`: trainings that make a smaller model.

No torch, no file access.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from foundation.paths import PathOrUrl
from foundation.section import Count, Index, Section

LayerMap = Literal["uniform", "last"] | dict[str, Index]
"""Rule that maps the student's layers to the teacher's; see `rules.distillation.layer_map`."""


class MatchingSection(Section):
    """Keys of both kinds of matching."""

    weight: PositiveFloat = Field(
        1.0, description="Factor on the matching loss, which is added to that of the distillation, e.g. 1.0"
    )


class HiddenStatesSection(MatchingSection):
    """Matching of hidden states: adds weight x loss, per target token, averaged over the mapped layers."""

    layers: LayerMap = Field(
        "uniform",
        description="Layer map: uniform (every layer of the student, with the teacher's at the same share of the"
        " depth), last, or an object from the student's layers to the teacher's, counted from 0, e.g."
        ' {"0": 1, "1": 2}',
    )
    loss: Literal["similarity", "mse", "cosine"] = Field(
        "similarity",
        description="similarity: squared difference of the cosine similarities between a token and those before it,"
        " for models of any width (the default); mse or cosine: of the hidden states themselves, of models of one"
        " hidden_size",
    )


class AttentionsSection(MatchingSection):
    """Matching of self-attention relations (MiniLMv2): adds weight x KL, per target token, averaged."""

    layers: LayerMap = Field(
        "last",
        description="Layer map: last (the last layers of both), uniform, or an object from the student's layers to the"
        ' teacher\'s, counted from 0, e.g. {"1": 1}',
    )
    relations: tuple[Literal["query", "key", "value"], ...] = Field(
        ("query", "key", "value"),
        min_length=1,
        description="Which vectors are related with themselves: query, key and value, or some of them",
        strict=False,
    )
    relation_heads: Count | None = Field(
        None,
        description="Relation heads that the features of all attention heads are divided into, in both models, e.g. 8;"
        " the student's num_attention_heads when absent",
    )


class OnPolicySection(Section):
    """On-policy distillation: in some samples the student writes the text, and the teacher judges every token of it."""

    fraction: float = Field(
        gt=0.0, le=1.0, description="Share of a step's samples that the student continues, above 0 to 1, e.g. 0.25"
    )
    prompt_tokens: Count = Field(
        description="Tokens at the beginning of a sample that the student is given, e.g. 64; it samples those after"
    )
    new_tokens: Count | None = Field(
        None, description="Maximum number of tokens the student samples, e.g. 128; null: to the end, label included"
    )
    temperature: float = Field(
        1.0, ge=0.0, description="Temperature of the sampling, e.g. 1.0: the student's own distribution; 0 is greedy"
    )
    batch: Count | None = Field(
        None,
        description="Samples that a rank continues at a time, e.g. 16: fewer need less memory and more forward passes;"
        " null: all of its share",
    )
    kv_cache: bool = Field(
        True,
        description="Keep keys and values of the tokens before; false: every new token is a forward pass over all of"
        " them, for architectures that cannot keep them",
    )

    def length(self, sequence_length: int) -> int:
        """Returns the number of tokens that the student samples if no token ends the text."""
        return self.new_tokens or sequence_length + 1 - self.prompt_tokens


class DistillSection(Section):
    """Knowledge distillation: loss = alpha t^2 D(teacher, student) + (1 - alpha) cross-entropy."""

    teacher: PathOrUrl | None = Field(
        None,
        description="Hugging Face folder of the teacher model, or its URL, e.g. out/demo/teacher; its weights stay"
        " frozen. With logits it is not loaded, only compared with the one that made them",
    )
    logits: PathOrUrl | None = Field(
        None,
        description="Directory of the teacher's cached logits, or its URL, made by headrace cache-logits, in place of a"
        " teacher in memory; e.g. out/demo/logits",
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="Divergence D: forward_kl, KL(teacher, student); reverse_kl, KL(student, teacher); or jsd, the"
        " generalized Jensen-Shannon divergence with beta",
    )
    beta: float = Field(
        0.5, gt=0.0, lt=1.0, description="Weight of the teacher in the mixture of jsd, between 0 and 1, e.g. 0.1"
    )
    temperature: PositiveFloat = Field(
        2.0, description="Softmax temperature t of teacher and student in the divergence; its loss is scaled by t^2"
    )
    alpha: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="Weight of the divergence from 0 to 1; the rest is cross-entropy with the data",
    )
    top_k: Count = Field(
        64, description="Log-probabilities per position that headrace cache-logits keeps, e.g. 64; besides, the rest"
    )
    shard_teacher: bool = Field(
        False,
        description="Shard the teacher's layers over the data-parallel ranks (FSDP2), gathering one at a time; false:"
        " every rank has all of it, or with parallel.tp its tensor-parallel shard",
    )
    hidden_states: HiddenStatesSection | None = Field(
        None, description="Match the student's hidden states with the teacher's, layer by layer; absent: not"
    )
    attentions: AttentionsSection | None = Field(
        None,
        description="Match relations between the tokens' queries, keys and values with the teacher's; absent: not",
    )
    on_policy: OnPolicySection | None = Field(
        None,
        description='On-policy distillation (GKD), e.g. {"fraction": 0.25, "prompt_tokens": 64}; null: the teacher is'
        " compared on the data alone",
    )


class QuantizationAwareSection(Section):
    """Quantization-aware training: linear layers compute with the weights that a quantization will store."""

    scheme: Literal["W4A16", "W8A16", "W8A8", "FP8"] = Field(
        description="Scheme that the model will be quantized to, e.g. W4A16; W8A8 and FP8 round activations, too"
    )
    group_size: Count | None = Field(
        None,
        description="Group size: weights of one row that share a scale, e.g. 64; null: 32 for W4A16, the row for W8A16",
    )
