"""Schema of a run's `data` section: sources and their mixing weights, curriculum, packing, fill-in-the-middle.

No torch, no file access. Rules that involve several keys are in `rules/data.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from foundation.paths import LocalPath, PathOrUrl
from foundation.section import Count, Index, Section


class SourceSection(Section):
    """One dataset of the data mixture."""

    path: PathOrUrl = Field(
        description="Tokens directory written by data_prep or headrace import, e.g. out/demo/tokens, also in an object"
        " store (s3://BUCKET/tokens); or a dataset read in place: PREFIX of a Megatron-LM dataset (PREFIX.bin and"
        " PREFIX.idx), a folder or file of datatrove's .ds"
    )
    source: str | None = Field(
        None,
        description="Train on this named source of the tokens directory only, e.g. web; on all of them when absent",
    )
    name: str | None = Field(
        None, description="Name of the source in data.curriculum, e.g. code; default: 'source', or else 'path'"
    )
    weight: PositiveFloat | None = Field(
        None,
        description="Mixing weight: share of the samples drawn from this source, relative to the other sources, e.g."
        " 3; 1"
        " when absent. Give one of weight, epochs, tokens",
    )
    epochs: PositiveFloat | None = Field(
        None, description="Epochs of this source over the whole run, e.g. 2.5, in place of a mixing weight"
    )
    tokens: Count | None = Field(
        None, description="Tokens drawn from this source over the whole run, e.g. 5e9, in place of a mixing weight"
    )
    max_epochs: PositiveFloat | None = Field(
        None,
        description="Limit on repetition: a run that would take more epochs of this source is refused, e.g. 4; no limit"
        " when absent",
    )
    tokenizer: PathOrUrl | None = Field(
        None,
        description="Hugging Face folder of the tokenizer that a dataset which is read in place was made with, e.g."
        " tokens/tokenizer, since it has no copy of it",
    )
    heldout: PathOrUrl | None = Field(
        None,
        description="Held-out data of this source in place of its own held-out split: a tokens directory with one, e.g."
        " out/valid/tokens, or one that is read in place",
    )


class CurriculumStageSection(Section):
    """One stage of the data curriculum: mixing weights from a step on."""

    after_step: Index = Field(
        description="The stage begins after this many optimizer steps, e.g. 9000; 0 for the first stage"
    )
    weights: dict[str, NonNegativeFloat] = Field(
        description='Mixing weight of every source by name, e.g. {"web": 2, "books": 1}; 0 draws nothing from it'
    )


class FimSection(Section):
    """Fill-in-the-middle (FIM): the middle of some documents is moved behind their end."""

    rate: float = Field(
        0.5, gt=0.0, le=1.0, description="FIM rate: share of the documents in a sample that are rearranged, e.g. 0.5"
    )
    spm_rate: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="Share of rearranged documents in SPM order (suffix, prefix, middle); the others are in PSM order"
        " (prefix, suffix, middle)",
    )
    prefix: str = Field(
        "<|fim_prefix|>", description="Special token before the prefix; it has to be in the tokenizer's vocabulary"
    )
    middle: str = Field(
        "<|fim_middle|>", description="Special token before the middle; it has to be in the tokenizer's vocabulary"
    )
    suffix: str = Field(
        "<|fim_suffix|>", description="Special token before the suffix; it has to be in the tokenizer's vocabulary"
    )


class DataSection(Section):
    """Training data: the data mixture, sequence length, packing and masking."""

    sources: tuple[SourceSection, ...] = Field(
        min_length=1,
        description='Datasets of the data mixture: a list such as [{"path": "out/demo/tokens", "weight": 1.0}]',
        strict=False,
    )
    sequence_length: Count = Field(description="Sequence length: tokens per sample, e.g. 2048")
    curriculum: tuple[CurriculumStageSection, ...] | None = Field(
        None,
        min_length=1,
        description="Data curriculum: mixing weights that change at given steps,"
        ' [{"after_step": 0, "weights": {"web": 1, "code": 1}}, ...]; replaces the weights of the sources',
        strict=False,
    )
    packing: Literal["contiguous", "best_fit"] = Field(
        "contiguous",
        description="How documents become samples: contiguous (windows over the concatenated documents, the default) or"
        " best_fit (whole documents, packed beforehand by headrace prep pack)",
    )
    fim: FimSection | None = Field(None, description='Fill-in-the-middle training, e.g. {"rate": 0.5}; off when absent')
    prefetch: Count = Field(4, description="Steps whose batches the loader's thread reads ahead of the training")
    stage_to: LocalPath | None = Field(
        None,
        description="Directory on a disk of each node to which the tokens are copied before training, and from which"
        " they are read, e.g. /local/headrace; absent: they are read where they are",
    )
    stage_keep: bool = Field(
        True,
        description="true: the copies in stage_to stay for the next run; false: they are removed when the run has"
        " finished and no other run reads them",
    )
    cache_gb: PositiveFloat | None = Field(
        None,
        description="Limit in GB of the cache on each node for tokens that are read from object stores, e.g. 200;"
        " absent: 32, or half of what is free there if that is less",
    )
    cache_to: LocalPath | None = Field(
        None,
        description="Directory of that cache on a disk of each node, e.g. /local/headrace; absent: HEADRACE_CACHE, by"
        " default ~/.cache/headrace",
    )
    mask_documents: bool = Field(
        False,
        description="true: document mask. Attention stays within a document, positions restart in each, and no loss is"
        " taken across document boundaries",
    )

    @property
    def names(self) -> list[str]:
        """Names of the sources, in order."""
        return [source.name or source.source or source.path for source in self.sources]
