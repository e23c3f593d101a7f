"""Schema of a run's `stages`, and of a batch ramp. No torch, no file access. Rules are in `config/rules/stages.py`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from foundation.section import Count, Section

CHANGEABLE = (
    "data",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "scheduler",
    "optimizer",
    "model",
    "loss",
    "moe",
    "evaluation",
    "memory",
    "zero_optimization",
    "parallel",
)
"""Top-level config keys that a stage may change."""


class BatchRampSection(Section):
    """Batch ramp: the global batch size grows with the tokens of the stage, in equal increments."""

    model_config = ConfigDict(**{**Section.model_config, "serialize_by_alias": True})

    start: Count = Field(alias="from", description="Samples per step at the beginning, e.g. 256")
    to: Count = Field(description="Samples per step once the ramp has ended, e.g. 2048")
    over_tokens: Count = Field(description="Tokens over which the batch grows, e.g. 100e9, from the stage's beginning")
    by: Count | None = Field(
        None,
        description="Increment in samples, e.g. 256, a whole number of which leads from 'from' to 'to'; absent: their"
        " greatest common divisor",
    )


class UntilSection(Section):
    """End of a stage, counted from the beginning of the run."""

    steps: Count | None = Field(None, description="Optimizer steps of the run after which the stage ends, e.g. 40000")
    tokens: Count | None = Field(
        None, description="Tokens of the run after which the stage ends, e.g. 4e12: a whole number of steps"
    )

    @model_validator(mode="after")
    def _is_one_number(self) -> UntilSection:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("a stage ends after a number of steps or of tokens: give exactly one of the two")
        return self


class StageSection(Section):
    """One stage of the run: where it ends, and the config keys that differ from the stage before."""

    name: str = Field(
        pattern=r"^[\w-]+$",
        description="Name of the stage in messages, reports and the journal: letters, digits, _ and -, e.g. long",
    )
    until: UntilSection | Literal["rest"] = Field(
        "rest", description='End of the stage, e.g. {"tokens": 4e12} or {"steps": 40000}; rest: the end of the run'
    )
    optimizer_states: Literal["keep", "fresh"] = Field(
        "keep", description="Optimizer states at the stage's beginning: keep (they go on) or fresh (they start at zero)"
    )
    continue_sources: bool | None = Field(
        None,
        description="Whether the stage's sources go on where earlier stages stopped; true needs equal sequence length"
        " and packing; false: each is shuffled anew; absent: they go on where length and packing are equal",
    )
    implicit: bool = Field(
        False, description="true: a resume with run.allow_change made this stage; not for a config that a person writes"
    )
    train_batch_size: Count | BatchRampSection | None = Field(
        None, description='Global batch size of the stage: a number, or a ramp {"from": 256, "to": 2048, ...}'
    )
    train_micro_batch_size_per_gpu: Count | None = Field(None, description="Micro-batch size of the stage, e.g. 1")
    gradient_accumulation_steps: Count | None = Field(None, description="Gradient accumulation of the stage, e.g. 8")
    data: dict[str, Any] | None = Field(
        None, description='Keys of the section data that change, e.g. {"sequence_length": 32768}; sources replace all'
    )
    scheduler: dict[str, Any] | None = Field(
        None,
        description="Learning-rate scheduler from this stage to the next that names one; its steps are counted from the"
        " stage's first. When absent, the schedule of the stage before goes on; null: constant",
    )
    optimizer: dict[str, Any] | None = Field(
        None, description='Keys of the section optimizer that change, e.g. {"params": {"lr": 1e-4}}; not its type'
    )
    model: dict[str, Any] | None = Field(
        None,
        description='Keys of the Hugging Face config that change and keep all shapes, e.g. {"config": {"rope_parameters'
        '": {"rope_theta": 8e6}}}, also where the run has model.path',
    )
    loss: dict[str, Any] | None = Field(None, description="Keys of the section loss that change")
    moe: dict[str, Any] | None = Field(None, description="Keys of the section moe that change")
    evaluation: dict[str, Any] | None = Field(None, description="Keys of the section evaluation that change")
    memory: dict[str, Any] | None = Field(None, description="Keys of the section memory that change")
    zero_optimization: dict[str, Any] | None = Field(
        None, description="Keys of the section zero_optimization that change"
    )
    parallel: dict[str, Any] | None = Field(
        None, description="Keys of the section parallel that change: the run is laid out anew"
    )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Writes the given keys alone: a scheduler of null is another thing than none."""
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}

    @property
    def changes(self) -> dict[str, Any]:
        """The config keys that the stage names, with their values as plain JSON."""
        plain = self.model_dump(mode="json")
        return {key: plain[key] for key in CHANGEABLE if key in plain}
