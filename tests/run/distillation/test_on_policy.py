"""On-policy distillation: which samples, what becomes of a batch, the loss by hand, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config.batch import BatchSizes
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.compression import DistillSection, OnPolicySection
from pipeline.config.sections.run import Config
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.models.construction.initial_values import InitByName
from pipeline.run.distillation.divergence import Divergence, Kind
from pipeline.run.distillation.on_policy import chosen_samples, passes_per_step, with_samples
from pipeline.run.distillation.on_policy_loss import OnPolicyDistillation, own_means
from pipeline.run.distillation.teacher import Teacher, TeacherModel
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import launch, start, write_config
from tests.models.architectures import batch_of, gradients, meta_of, plain_decoder, with_weights
from tests.run.distillation.test_divergence import by_formula
from tests.run.distillation.test_on_policy_layouts import NEW, PROMPT, on_policy
from tests.support import output_of, refusal_of


@pytest.mark.parametrize(("samples", "fraction"), [(8, 0.375), (8, 0.05), (7, 0.3), (5, 1.0)])
def test_over_many_steps_the_fraction_of_samples_is_chosen_in_other_orders(samples: int, fraction: float) -> None:
    steps = [chosen_samples(step, samples=samples, fraction=fraction, seed=7) for step in range(1, 401)]
    assert sum(len(each) for each in steps) == int(400 * samples * fraction)
    assert {len(each) for each in steps} <= {int(samples * fraction), -int(-samples * fraction // 1)}
    often = np.bincount(np.concatenate(steps), minlength=samples) / 400
    assert np.abs(often - fraction).max() < 0.1  # four standard deviations of a share of 400 steps
    other = [chosen_samples(step, samples=samples, fraction=fraction, seed=8) for step in range(1, 401)]
    assert fraction == 1 or any(a.tolist() != b.tolist() for a, b in zip(steps, other, strict=True))


def test_all_ranks_make_the_passes_of_the_one_with_most_samples() -> None:
    batch = BatchSizes(samples=8, micro=2, accumulation=2, dp=2, sequence_length=32)
    section = OnPolicySection(fraction=0.5, prompt_tokens=4)
    # rank 0 has the samples 0, 1, 4 and 5
    for size, chosen, expected in ((None, [0, 1, 4, 2], 1), (1, [0, 1, 4, 2], 3), (2, [0, 1, 4, 2], 2), (2, [], 0)):
        own = section.model_copy(update={"batch": size})
        assert passes_per_step(batch, own, chosen=np.array(chosen, dtype=np.int64)) == expected


def test_targets_end_with_the_text_and_a_sample_whose_prompt_ends_a_document_stays_data() -> None:
    ids = torch.arange(1, 25).view(3, 8)
    labels = torch.arange(101, 125).view(3, 8)
    labels[1, 2] = IGNORE
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 2, 3, 4], list(range(8))])
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2], [0, 0, 0, 1, 1, 1, 1, 1], [0] * 8])
    data = MicroBatch(ids, labels, positions, documents)
    tokens = torch.tensor([[50, 51, 0, 52, 0], [60, 61, 62, 63, 64]])
    made = with_samples(data, torch.tensor([0, 1]), tokens, prompt=3, end_id=0)
    assert made.sampled is not None
    assert made.positions is not None
    assert made.documents is not None
    assert made.input_ids[0].tolist() == [1, 2, 3, 50, 51, 0, 52, 0]
    assert made.labels[0].tolist() == [IGNORE, IGNORE, 50, 51, 0, IGNORE, IGNORE, IGNORE]
    assert made.positions[0].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert made.documents[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    for row in (1, 2):
        for field in ("input_ids", "labels", "positions", "documents"):
            assert getattr(made, field)[row].tolist() == getattr(data, field)[row].tolist()
    assert made.sampled.any(1).tolist() == [True, False, False]
    full = with_samples(data, torch.tensor([0]), torch.arange(50, 56)[None], prompt=3, end_id=None)
    assert full.labels[0].tolist() == [IGNORE, IGNORE, 50, 51, 52, 53, 54, 55]
    assert full.input_ids[0].tolist() == [1, 2, 3, 50, 51, 52, 53, 54]


def plain_loss(
    section: DistillSection, teacher: Tensor, student: Tensor, batch: MicroBatch
) -> tuple[Tensor, dict[str, float]]:
    """The loss from logits [B, T, V], position by position as the formula has it, and its parts."""
    assert batch.sampled is not None
    divergence = Divergence(section.divergence, section.temperature, section.beta)
    logs = (torch.log_softmax(each / section.temperature, -1) for each in (teacher, student))
    nats, square = by_formula(divergence, *logs), section.temperature**2
    total, parts = torch.zeros(()), {"ce": 0.0, "data": 0.0, "sampled": 0.0, "count": 0.0}
    for row, position in (batch.labels != IGNORE).nonzero().tolist():
        own = nats[row, position]
        if batch.sampled[row, position]:
            total = total + square * own
            parts["sampled"] += own.item()
            parts["count"] += 1
            continue
        ce = -torch.log_softmax(student[row, position], -1)[batch.labels[row, position]]
        total = total + section.alpha * square * own + (1 - section.alpha) * ce
        parts["ce"] += ce.item()
        parts["data"] += own.item()
    return total, parts


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_the_loss_and_its_gradient_are_those_of_the_formula_computed_by_hand(tmp_path: Path, divergence: Kind) -> None:
    meta = meta_of("llama", attention="eager")
    section = DistillSection(teacher="it", divergence=divergence, temperature=2.0, alpha=0.3, beta=0.3)
    raw = on_policy(tmp_path, tmp_path / "run", tmp_path)
    alone = {"engine": "reference", "zero_optimization": {"stage": 0}, "distill": {"teacher": "it"}}
    run = resolve(Config.model_validate({**raw, **alone}), world_size=1)
    teacher = Teacher(TeacherModel(meta, InitByName(meta, seed=5)), run, device=torch.device("cpu"), mesh=None)
    objective = OnPolicyDistillation(section, teacher)
    tokens = torch.tensor([[7, 8, 9, 0, 4]])
    batch = with_samples(batch_of(), torch.tensor([1]), tokens, prompt=6, end_id=0)

    theirs: Any = with_weights(meta_of("llama", attention="eager"))
    of_teacher = theirs.__class__(theirs.config)
    weights = InitByName(meta, seed=5)
    of_teacher.load_state_dict({name: weights.value(name) for name, _ in of_teacher.named_parameters()})
    with torch.no_grad():
        target = of_teacher(batch.input_ids).logits
    expected, parts = plain_loss(section, target, theirs(batch.input_ids).logits, batch)
    expected.backward()
    assert parts["count"] == 4  # three tokens and the end of the text
    for chunk in (None, 5):
        decoder = plain_decoder("llama", chunk=chunk)
        total, *found = decoder(batch.input_ids, batch, objective)
        total.backward()
        assert total.item() == pytest.approx(expected.item(), rel=1e-5)
        assert [each.item() for each in found] == pytest.approx(list(parts.values()), rel=1e-4)
        own = gradients(decoder)
        for name, parameter in theirs.named_parameters():
            torch.testing.assert_close(own[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_parts_are_means_over_their_own_targets() -> None:
    section = DistillSection(teacher="it", divergence="jsd")
    means = {"cross_entropy": 3.0, "jsd": 0.6, "on_policy_jsd": 0.1, "on_policy_share": 0.25, "expert_load": 2.0}
    expected = {"cross_entropy": 4.0, "jsd": 0.8, "on_policy_jsd": 0.4, "on_policy_share": 0.25, "expert_load": 2.0}
    assert own_means(means, section) == pytest.approx(expected)
    everything = own_means({**means, "on_policy_share": 1.0}, section)
    assert "cross_entropy" not in everything  # there is no data to have a mean over
    assert everything["on_policy_jsd"] == pytest.approx(0.1)


@pytest.mark.integration
def test_a_run_reports_what_it_generated_and_check_what_that_costs(teacher: Path, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", on_policy(tokens, tmp_path / "run", teacher, batch=2))
    cost = json.loads(output_of(warm.run("-m", "pipeline", "check", "--config", config, "--json")))["on_policy"]
    assert (cost["passes"], cost["samples"], cost["positions"]) == (2 * NEW, 2, PROMPT + NEW - 1)
    assert cost["cache_bytes"] == 2 * (PROMPT + NEW - 1) * 2 * 2 * 2 * 12 * 4
    launch("distill.py", config)
    rows = read_rows(tmp_path / "run", kind="step")
    for row in rows:
        targets = (8 - 3) * 32 + row["generated_tokens"]
        assert 0 < row["generated_tokens"] <= 3 * NEW
        assert row["on_policy_share"] == pytest.approx(row["generated_tokens"] / targets)
        of_data = 0.5 * 4 * row["reverse_kl"] + 0.5 * row["cross_entropy"]
        mixed = row["on_policy_share"] * 4 * row["on_policy_reverse_kl"] + (1 - row["on_policy_share"]) * of_data
        assert row["loss"] == pytest.approx(mixed, rel=1e-4)
        assert row["generation_seconds"] > 0
        assert row["sampled_tokens_per_second"] == pytest.approx(3 * NEW / row["generation_seconds"])
    assert "distill" in refusal_of(start("distill.py", config, "distill.on_policy.temperature=0.5"))


REFUSED = {
    "distill.on_policy.fraction=1.5": "distill.on_policy.fraction = 1.5",
    "distill.on_policy.fraction=0.0": "distill.on_policy.fraction = 0.0",
    "distill.on_policy.prompt_tokens=33": "use at most 32, or a longer data.sequence_length",
    "distill.on_policy.new_tokens=25": "use at most 24, or leave it out",
    "distill.logits=out/logits": "use distill.teacher without distill.logits",
    "parallel.pp=2": "parallel.pp = 2",
    "parallel.cp=2": "parallel.cp = 2",
    "distill.hidden_states.weight=1.0": "features are matched on the data's text",
    "bf16.enabled=true fp8.enabled=true": "fp8.enabled = True",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_a_wrong_config_is_refused_before_any_work(overrides: str, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", on_policy(tokens, tmp_path / "run", tmp_path / "none"))
    said = refusal_of(start("distill.py", config, *overrides.split(), processes=2 if "parallel" in overrides else 1))
    assert REFUSED[overrides] in said
    assert not (tmp_path / "run").exists()
