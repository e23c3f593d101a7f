"""Distillation: the loss is the formula, the teacher stays as it is, the student starts from the teacher's layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from headrace.base.directory import read_manifest
from pipeline.compress.distillation import Distillation, kl_gradient_sum, kl_sum
from pipeline.config.schema import DistillSection
from pipeline.data.loader import IGNORE
from tests import warm
from tests.conftest import launch, losses, start, tiny_config, write_config
from tests.models.architectures import assert_same, batch_of, gradients, meta_of, plain_decoder, with_weights
from tests.parallel.allocations import AllocationRecorder


def test_the_kl_term_is_the_sum_over_targets_of_p_log_p_over_q() -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    labels = torch.randint(0, 11, (2, 5))
    labels[0, 3] = labels[1, 0] = IGNORE
    expected = 0.0
    for b in range(2):
        for t in range(5):
            if labels[b, t] != IGNORE:
                p, q = (torch.softmax(x[b, t].double() / 3.0, 0) for x in (teacher, student))
                expected += float((p * (p / q).log()).sum())
    assert float(kl_sum(teacher, student, labels, temperature=3.0)) == pytest.approx(expected, rel=1e-6)
    assert float(kl_sum(teacher, teacher, labels, temperature=3.0)) == pytest.approx(0.0, abs=1e-6)


def test_the_gradient_of_the_kl_term_is_the_one_autograd_computes() -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 5, 11), torch.randn(2, 5, 11, requires_grad=True)
    labels = torch.randint(0, 11, (2, 5))
    labels[0, 3] = IGNORE
    expected = kl_sum(teacher, student, labels, temperature=3.0)
    expected.backward()
    assert student.grad is not None
    kl, gradient = kl_gradient_sum(teacher, student.detach(), labels, temperature=3.0)
    assert float(kl) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert torch.allclose(gradient, student.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("architecture", "separate"), [("llama", True), ("gemma2", False)])
def test_a_chunked_distillation_is_the_same_and_the_logits_of_teacher_and_student_never_exist_as_a_whole(
    tmp_path: Path, architecture: str, separate: bool
) -> None:
    known = {"gemma2": {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 5.0}}
    fields = {**known.get(architecture, {}), "vocab_size": 512}
    teacher = with_weights(meta_of("llama", attention="eager", **fields))
    teacher.save_pretrained(tmp_path)
    objective = Distillation(
        DistillSection(teacher=str(tmp_path), temperature=2.0, alpha=0.4),
        bf16=False,
        attn_implementation="eager",
        device=torch.device("cpu"),
        z_loss=0.01,
    )
    batch, found = batch_of(), {}
    for chunk in (None, 4):
        decoder = plain_decoder("llama_tied", vocab_size=512, chunk=chunk)
        with AllocationRecorder() as recorder:
            sums = decoder(batch.input_ids, batch, objective)
            sums[0].backward()
        found[chunk] = ([float(each.detach()) for each in sums], gradients(decoder), recorder.largest)
    assert found[4][0] == pytest.approx(found[None][0], rel=1e-5)
    assert_same(found[4][1], found[None][1])
    assert (found[4][2] < batch.labels.numel() * 512) == separate


@pytest.fixture(scope="module")
def teacher(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("teacher")
    config = tiny_config(tokens, work / "run", engine="torch")
    config["model"]["config"]["num_hidden_layers"] = 3
    launch("train.py", write_config(work / "c.json", config))
    assert warm.run("-m", "pipeline", "export", work / "run", work / "model").returncode == 0
    return work / "model"


def test_both_engines_distil_alike_and_the_student_approaches_its_teacher(
    teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    before = {p.name: p.read_bytes() for p in teacher.iterdir()}
    rows = {}
    for engine, processes in (("torch", 1), ("deepspeed", 2)):
        run_dir = tmp_path / engine
        fresh = tiny_config(tokens, run_dir, distill={"teacher": str(teacher), "temperature": 2.0, "alpha": 0.5})
        config = write_config(tmp_path / f"{engine}.json", fresh)
        launch("distill.py", config, f"engine={engine}", processes=processes)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        rows[engine] = [row for row in lines if row["kind"] == "step"]
    for ours, theirs in zip(rows["torch"], rows["deepspeed"], strict=True):
        for key in ("loss", "cross_entropy", "kl"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (ours["step"], key)
        assert ours["loss"] == pytest.approx(0.5 * 4 * ours["kl"] + 0.5 * ours["cross_entropy"], rel=1e-5)
    assert rows["torch"][-1]["kl"] < 0.5 * rows["torch"][0]["kl"]
    assert {p.name: p.read_bytes() for p in teacher.iterdir()} == before


def test_a_student_of_another_vocabulary_is_refused(teacher: Path, tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", distill={"teacher": str(teacher)})
    done = start("distill.py", write_config(tmp_path / "c.json", config), "model.config.vocab_size=640")
    assert done.returncode == 2
    assert "the teacher has 384 ids, the student 640" in done.stdout
    assert not (tmp_path / "run").exists()


def test_an_incomplete_teacher_is_refused_and_another_teacher_cannot_resume_the_run(
    teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(teacher, tmp_path / "teacher")
    config = tiny_config(tokens, tmp_path / "run", engine="torch", distill={"teacher": str(copy)})
    path = write_config(tmp_path / "c.json", config)
    launch("distill.py", path, "run.steps=20")
    manifest = read_manifest(tmp_path / "run/checkpoints/step-00000020", kind="checkpoint")
    expected = read_manifest(teacher, kind="model").fingerprint
    assert manifest.parents["distill.teacher"]["fingerprint"] == expected
    (copy / "manifest.json").unlink()  # without it the files themselves are looked at
    other = start("distill.py", path)
    assert other.returncode == 2
    assert "distill.teacher (fingerprint): was" in other.stdout
    (copy / "model.safetensors").unlink()
    done = start("distill.py", path, f"run.dir={tmp_path / 'other'}")
    assert done.returncode == 2
    assert "holds no *.safetensors" in done.stdout
    assert not (tmp_path / "other").exists()


def test_a_student_made_of_the_teachers_layers_starts_near_its_teacher(
    teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    start_from = {"path": str(teacher), "keep_layers": [0, 2]}
    config = tiny_config(tokens, tmp_path / "run", model=start_from, distill={"teacher": str(teacher), "alpha": 0.0})
    launch("distill.py", write_config(tmp_path / "c.json", config), "engine=torch", "run.steps=2", "scheduler=auto")
    # a fresh model gives log(512) = 6.24; the teacher ends near 5.4
    assert losses(tmp_path / "run")[1] < 5.9
