"""Distillation: the loss is the formula, the teacher stays as it is, the student starts from the teacher's layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from foundation.directory import read_manifest
from pipeline.config.load import read_config
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.compression import DistillSection
from pipeline.config.sections.run import Config
from pipeline.engines.parallel.fused_head import loss_and_gradient
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.folder.loading import load_model
from pipeline.run.distillation.divergence import Kind
from pipeline.run.distillation.find_teacher import open_teacher
from pipeline.run.distillation.objective import Distillation
from pipeline.run.distillation.teacher import Teacher, TeacherModel
from tests import warm
from tests.conftest import launch, losses, start, tiny_config, write_config
from tests.engines.parallel.allocations import AllocationRecorder
from tests.models.architectures import assert_same, batch_of, gradients, meta_of, plain_decoder
from tests.support import output_of, refusal_of


@pytest.mark.parametrize(
    ("architecture", "divergence", "separate"),
    [
        ("llama", "forward_kl", True),
        ("llama", "reverse_kl", True),
        ("llama", "jsd", True),
        ("gemma2", "forward_kl", False),
    ],
)
def test_a_chunked_distillation_is_the_same_and_the_logits_of_teacher_and_student_never_exist_as_a_whole(
    tmp_path: Path, architecture: str, divergence: Kind, separate: bool
) -> None:
    known = {"gemma2": {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 5.0}}
    meta = meta_of("llama", attention="eager", **{**known.get(architecture, {}), "vocab_size": 512})
    section = DistillSection(teacher="it", divergence=divergence, temperature=2.0, alpha=0.4)
    raw = tiny_config(tmp_path, tmp_path / "run", engine="reference", zero_optimization={"stage": 0})
    run = resolve(Config.model_validate(raw), world_size=1)
    teacher = Teacher(TeacherModel(meta, InitByName(meta, seed=3)), run, device=torch.device("cpu"), mesh=None)
    objective = Distillation(section, teacher, z_loss=0.01)
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


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_the_loss_compiles_to_one_graph_and_stays_the_same(tmp_path: Path, divergence: Kind) -> None:
    meta = meta_of("llama", attention="eager", vocab_size=512)
    raw = tiny_config(tmp_path, tmp_path / "run", engine="reference", zero_optimization={"stage": 0})
    run = resolve(Config.model_validate(raw), world_size=1)
    teacher = Teacher(TeacherModel(meta, InitByName(meta, seed=3)), run, device=torch.device("cpu"), mesh=None)
    objective = Distillation(DistillSection(teacher="it", divergence=divergence), teacher, z_loss=0.01)
    batch, logits = batch_of(), torch.randn(2, 24, 512)
    given = (objective, logits, batch.labels, teacher.targets(batch), FULL_VOCABULARY, 1.0)
    compiled = torch.compile(loss_and_gradient, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), loss_and_gradient(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("balance", ["aux_loss", "bias"])
def test_experts_are_balanced_beside_a_dense_teacher(teacher: Path, tokens: Path, tmp_path: Path, balance: str) -> None:
    """`moe` is the student's: a teacher is not trained."""
    sections = {"distill": {"teacher": str(teacher)}, "moe": {"balance": balance}}
    raw = tiny_config(tokens, tmp_path / "run", engine="torch", **sections)
    run = resolve(Config.model_validate(raw), world_size=1)
    assert open_teacher(run, vocab_size=512).model.config.model_type == "llama"
    assert run.config.moe.balance == balance


def test_both_engines_distil_alike_and_the_student_learns(teacher: Path, tokens: Path, tmp_path: Path) -> None:
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
    said = refusal_of(start("distill.py", write_config(tmp_path / "c.json", config), "model.config.vocab_size=640"))
    assert "the teacher has 512 ids, the student 640" in said
    assert not (tmp_path / "run").exists()


def test_an_incomplete_teacher_and_another_on_resume_are_refused(teacher: Path, tokens: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(teacher, tmp_path / "teacher")
    config = tiny_config(tokens, tmp_path / "run", engine="torch", distill={"teacher": str(copy)})
    path = write_config(tmp_path / "c.json", config)
    launch("distill.py", path, "run.steps=20")
    manifest = read_manifest(tmp_path / "run/checkpoints/step-00000020", kind="checkpoint")
    expected = read_manifest(teacher, kind="model").fingerprint
    assert manifest.parents["distill.teacher"]["fingerprint"] == expected
    (copy / "manifest.json").unlink()  # without it the files themselves are looked at
    assert "distill.teacher (fingerprint): was" in refusal_of(start("distill.py", path))
    (copy / "model.safetensors").unlink()
    assert "has no safetensors" in refusal_of(start("distill.py", path, f"run.dir={tmp_path / 'other'}"))
    assert not (tmp_path / "other").exists()


def test_a_student_of_the_teachers_layers_starts_near_its_teacher(teacher: Path, tokens: Path, tmp_path: Path) -> None:
    start_from = {"path": str(teacher), "keep_layers": [0, 2]}
    config = tiny_config(tokens, tmp_path / "run", model=start_from, distill={"teacher": str(teacher), "alpha": 0.0})
    launch("distill.py", write_config(tmp_path / "c.json", config), "engine=torch", "run.steps=2", "scheduler=auto")
    # a fresh model gives log(512) = 6.24; the teacher ends near 5.4
    assert losses(tmp_path / "run")[1] < 5.9


def test_a_quantized_teacher_is_what_transformers_makes_of_it(teacher: Path, tokens: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "int8"
    config = {"model": str(teacher), "output": str(quantized), "scheme": "W8A16", "consumers": ["transformers"]}
    config |= {"data": {"path": str(tokens), "sequence_length": 32, "max_tokens": 2000}}
    output_of(warm.run("-m", "pipeline", "quantize", "--config", write_config(tmp_path / "q.json", config)))
    section = {"teacher": str(quantized), "alpha": 1.0}
    path = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch", distill=section))
    run = resolve(read_config(path, []).config, world_size=1)
    batch = batch_of(length=32)
    ours = Teacher(open_teacher(run, vocab_size=512), run, device=torch.device("cpu"), mesh=None)
    logits = torch.cat(list(ours.logits(batch)))
    theirs = load_model(quantized, dtype=torch.float32)(batch.input_ids).logits.flatten(0, 1)
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-5)
    original = load_model(teacher, dtype=torch.float32)(batch.input_ids).logits.flatten(0, 1)
    assert not torch.allclose(logits, original, rtol=1e-4, atol=1e-5)
    (quantized / "manifest.json").unlink()  # it knows the size of config.json
    stored = json.loads((quantized / "config.json").read_text())
    stored["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    (quantized / "config.json").write_text(json.dumps(stored))
    assert "round their inputs" in refusal_of(start("distill.py", path))
