"""Tasks on one rank of an engine: prompts of different lengths together, evaluations that end early, refusals.

Layouts are compared by `tests.engines.layout_worker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MambaConfig

from foundation.errors import ConfigError
from pipeline.config.sections.evaluation import TaskSection
from pipeline.evaluation.tasks.encode import EncodedTask
from pipeline.evaluation.tasks.rows import GeneratedQuestion, RankedQuestion
from pipeline.models.construction.meta import build_meta
from pipeline.run.task_evaluation import TaskEvaluation, check_tasks
from tests.engines.layout_worker import CPU, VOCABULARY, make_engine, resolved


@pytest.fixture(scope="module")
def evaluation() -> TaskEvaluation:
    run = resolved({"engine": "torch", "train_micro_batch_size_per_gpu": 4}, processes=1)
    return TaskEvaluation(run, (), make_engine(run), 0, CPU)


def task_of(*lengths: int, generated: bool) -> EncodedTask:
    generator = torch.Generator().manual_seed(1)
    ids = tuple(torch.randint(VOCABULARY, (length,), generator=generator).numpy() for length in lengths)
    question: Any = GeneratedQuestion(" ", (" ",)) if generated else RankedQuestion((("", " "),), 0)
    return EncodedTask(TaskSection(name="t", new_tokens=8), (question,), ids, np.ones(len(ids), np.int64), 0, None)


def test_a_prompt_is_continued_as_if_it_were_alone(evaluation: TaskEvaluation) -> None:
    task = task_of(3, 20, 11, 1, 7, 20, generated=True)
    together = evaluation.continued(task)
    assert together is not None
    assert len({*together.flatten().tolist()}) > 4
    for number, ids in enumerate(task.ids):
        alone = EncodedTask(task.section, task.questions, (ids,), task.targets[:1], 0, None)
        assert evaluation.continued(alone).tolist() == [together[number].tolist()]


@pytest.mark.parametrize("generated", [True, False])
def test_an_evaluation_that_ends_early_has_no_figures(evaluation: TaskEvaluation, generated: bool) -> None:
    task = task_of(*range(5, 21), generated=generated)

    def first(batches: Iterator[Any]) -> Iterator[Any]:
        return islice(batches, 1)

    assert evaluation.figures(task, first) is None


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"parallel": {"pp": 2}}, r"(?s)parallel.pp = 2.*not continued there.*remove the task t"),
        ({"parallel": {"cp": 2}}, r"(?s)parallel.cp = 2.*not continued there"),
        ({"engine": "torch", "fp8": {"enabled": True, "emulate": True}, "bf16": {"enabled": True}}, "fp8.enabled"),
    ],
)
def test_prompts_are_refused_by_name_where_a_layout_cannot_continue_them(case: dict[str, Any], message: str) -> None:
    case = {"train_micro_batch_size_per_gpu": 2, **case}
    run = resolved(case, processes=2 if "parallel" in case else 1)
    with pytest.raises(ConfigError, match=message):
        check_tasks(run, torch.nn.Module(), (task_of(5, generated=True),))
    check_tasks(run, torch.nn.Module(), (task_of(5, generated=False),))


def test_prompts_are_refused_for_a_model_without_keys_and_values() -> None:
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=8)
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    run = resolved({"engine": "torch"}, processes=1)
    with pytest.raises(ConfigError, match=r"(?s)evaluation.tasks = 't'.*a tiny mamba"):
        check_tasks(run, model, (task_of(5, generated=True),))
