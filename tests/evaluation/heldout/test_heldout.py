"""The held-out loss is the mean over target tokens, in any batching and in training, with loss masks and without."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foundation.errors import DataError
from pipeline.data.dataset import TokenDataset, choose_windows
from pipeline.data.loader import heldout_batches
from pipeline.data.micro_batch import IGNORE, make_batch
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.architecture_trial import random_model
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from pipeline.engines.parallel.recurrent import SequenceRanks, apply_recurrent, recurrent_blocks
from pipeline.evaluation.heldout.heldout_loss import evaluate
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import launch, losses, start, tiny_config, write_config
from tests.data.test_opening import megatron
from tests.evaluation.heldout.small import SEQUENCE, VOCAB, make_masked, make_model
from tests.support import refusal_of
from tests.sweeps.families import tiny_fields


@pytest.fixture(scope="module")
def loaded(model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model)


@pytest.fixture(scope="module")
def heldout(tokens: Path) -> TokenDataset:
    return TokenDataset.open(tokens, split="heldout", sequence_length=SEQUENCE)


def plain_loss(model: torch.nn.Module, dataset: TokenDataset) -> float:
    """Token by token, one window at a time, in float64: slow and plain."""
    total, count = 0.0, 0
    for window in range(dataset.windows):
        row, loss_mask = dataset.read([window])[0], dataset.loss_mask([window])[0]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row[:-1].tolist()])).logits[0].double()
        for position, target in enumerate(row[1:]):
            if not loss_mask[position + 1]:
                continue
            scores = logits[position]
            total += math.log(torch.exp(scores).sum().item()) - scores[int(target)].item()
            count += 1
    return total / count


def test_the_loss_equals_a_plain_computation(loaded: torch.nn.Module, heldout: TokenDataset) -> None:
    found = evaluate(loaded, heldout, batch_size=8, device="cpu")
    expected = plain_loss(loaded, heldout)
    assert found.loss_nats == pytest.approx(expected, rel=1e-5)  # float32 logits against float64
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) * heldout.tokens / heldout.bytes, rel=1e-5)
    assert found.tokens == heldout.windows * SEQUENCE
    assert found.tokens_per_second > 0


def test_only_targets_of_the_loss_mask_are_evaluated_as_in_training(loaded: torch.nn.Module, masked: Path) -> None:
    dataset = TokenDataset.open(masked, split="heldout", sequence_length=SEQUENCE)
    found, in_training = evaluate(loaded, dataset, batch_size=5, device="cpu"), 0
    for batch in heldout_batches(dataset, batch_size=4, dp=1, dp_rank=0):
        in_training += int((batch.labels != IGNORE).sum())
    assert found.tokens == in_training
    assert in_training == pytest.approx(dataset.windows * SEQUENCE / 3, rel=0.01)  # the mask has every third token
    assert found.loss_nats == pytest.approx(plain_loss(loaded, dataset), rel=1e-5)
    assert found.bits_per_byte is None, "the mean of a third of the tokens says nothing of all bytes"


def test_recurrent_layers_read_each_document_alone_as_in_training(heldout: TokenDataset) -> None:
    model = random_model(AutoConfig.for_model(**{**tiny_fields("bamba"), "vocab_size": VOCAB})).eval()
    masked, whole = (
        evaluate(model, heldout, batch_size=4, device="cpu", max_windows=4, mask_documents=mask)
        for mask in (True, False)
    )
    chosen = choose_windows(heldout.windows, 4)
    batch = make_batch(heldout.read(chosen), heldout.boundaries(chosen))
    recurrent = apply_recurrent(model, SequenceRanks(), blocks=recurrent_blocks(model))
    decoder = Decoder(model, DecoderLayout(own_attention=False, recurrent=recurrent), parameter_owners(model))
    with torch.no_grad():
        total = float(decoder(batch.input_ids, batch, CrossEntropy())[0])
    assert masked.loss_nats == pytest.approx(total / masked.tokens, rel=1e-5)
    assert abs(masked.loss_nats - whole.loss_nats) > 0.01


def test_windows_without_targets_are_refused(loaded: torch.nn.Module, tokens: Path, tmp_path: Path) -> None:
    nothing = make_masked(tmp_path / "nothing", tokens, lambda ids, _: np.zeros(ids.size))
    dataset = TokenDataset.open(nothing, split="heldout", sequence_length=SEQUENCE)
    with pytest.raises(DataError, match=r"heldout: its loss mask leaves no target in the 2 windows of 32 tokens"):
        evaluate(loaded, dataset, batch_size=8, device="cpu", max_windows=2)


@pytest.mark.parametrize("batch_size", [1, 5, 1000])
def test_the_batch_size_changes_no_loss(loaded: torch.nn.Module, heldout: TokenDataset, batch_size: int) -> None:
    assert heldout.windows % 5, "the last batch is to be a short one"
    one = evaluate(loaded, heldout, batch_size=3, device="cpu").loss_nats
    assert evaluate(loaded, heldout, batch_size=batch_size, device="cpu").loss_nats == pytest.approx(one, rel=1e-6)


def test_a_model_in_training_mode_is_evaluated_without_dropout(loaded: torch.nn.Module, heldout: TokenDataset) -> None:
    loaded.train()
    evaluate(loaded, heldout, batch_size=8, device="cpu", max_windows=2)
    assert loaded.training


def test_progress_counts_to_the_end(loaded: torch.nn.Module, heldout: TokenDataset) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(loaded, heldout, batch_size=4, device="cpu", max_windows=10, progress=lambda *step: seen.append(step))
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_fewer_windows_are_evenly_spaced() -> None:
    assert choose_windows(10, 4).tolist() == [0, 2, 5, 7]
    assert choose_windows(10, None).tolist() == list(range(10))
    assert np.array_equal(choose_windows(3, 10), [0, 1, 2])


@pytest.fixture(scope="module")
def sharded(model: Path) -> Path:
    folder = model.parent / "sharded"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder, max_shard_size="100KB")
    return folder


def test_headers_agree_with_the_loaded_model(model: Path) -> None:
    folder, loaded = ModelFolder.open(model), AutoModelForCausalLM.from_pretrained(model)
    assert folder.parameters == sum(p.numel() for p in loaded.parameters())
    assert {name: info.shape for name, info in folder.tensors.items()} == {
        name: tuple(p.shape) for name, p in loaded.named_parameters()
    }
    assert (folder.vocab_size, folder.longest_sequence, folder.tied, folder.dtype) == (VOCAB, 128, True, "float32")


def test_an_untied_model_is_recognized(tokens: Path, tmp_path: Path) -> None:
    assert not ModelFolder.open(make_model(tmp_path / "untied", tokens, tied=False, steps=0)).tied


def test_shards_count_like_one_file(model: Path, sharded: Path) -> None:
    one, many = ModelFolder.open(model), ModelFolder.open(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert many.tensors == one.tensors
    assert many.weight_bytes == sum(p.stat().st_size for p in sharded.glob("*.safetensors"))


def test_a_missing_shard_is_detected(sharded: Path) -> None:
    lost = max(sharded.glob("*.safetensors"))
    lost.unlink()
    with pytest.raises(DataError, match=rf"{lost.name} is missing"):
        ModelFolder.open(sharded)


def test_the_fingerprint_of_a_folder_without_a_manifest_depends_on_its_bytes(model: Path, tmp_path: Path) -> None:
    before = ModelFolder.open(model).fingerprint()
    assert ModelFolder.open(model).fingerprint() == before
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        loaded.model.norm.weight[0] += 1
    loaded.save_pretrained(tmp_path / "changed")
    assert ModelFolder.open(tmp_path / "changed").fingerprint() != before


def no_heldout_targets(ids: np.ndarray, split: str) -> np.ndarray:
    return np.full(ids.size, split == "train")


@pytest.fixture(scope="module")
def nothing(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens whose held-out split has a loss mask without targets."""
    return make_masked(tmp_path_factory.mktemp("masked") / "nothing", tokens, no_heldout_targets)


def trained(work: Path, *paths: Path, processes: int = 1) -> tuple[Path, str]:
    """A run of eight steps with an evaluation after the fourth and the last: its directory, and what it output."""
    data = {"sources": [{"path": str(path)} for path in paths], "sequence_length": 32}
    run = {"dir": str(work / "run"), "steps": 8, "seed": 7}
    often = {"every": 4, "samples": 2}
    config = tiny_config(paths[0], work / "run", engine="torch", data=data, run=run, evaluation=often)
    output = launch("train.py", write_config(work / "c.json", config), processes=processes)
    assert set(losses(work / "run")) == set(range(1, 9))
    return work / "run", output


@pytest.mark.parametrize("processes", [1, 2])
def test_an_evaluation_without_targets_is_skipped_in_training(nothing: Path, tmp_path: Path, processes: int) -> None:
    run_dir, output = trained(tmp_path, nothing, processes=processes)
    skipped = [row for row in read_rows(run_dir, kind="event") if row["event"] == "no_targets"]
    assert [(row["step"], row["datasets"]) for row in skipped] == [(step, [f"{nothing}/heldout"]) for step in (4, 8)]
    assert output.count("the evaluation is skipped") == 2
    assert read_rows(run_dir, kind="eval") == []
    assert "finished" in output


def test_a_source_without_targets_is_not_part_of_the_mean(nothing: Path, tokens: Path, tmp_path: Path) -> None:
    run_dir, output = trained(tmp_path, tokens, nothing)
    found = read_rows(run_dir, kind="eval")
    assert [(row["step"], row["targets"]) for row in found] == [(4, 2 * 32), (8, 2 * 32)]  # the windows of the other
    assert all(np.isfinite(row["loss"]) and row["bits_per_byte"] > 0 for row in found)
    assert f"{nothing}/heldout: the means are of the others" in output


def test_sources_with_a_loss_mask_have_no_bits_per_byte_in_the_journal(masked: Path, tmp_path: Path) -> None:
    run_dir, output = trained(tmp_path, masked)
    found = read_rows(run_dir, kind="eval")
    assert [row["step"] for row in found] == [4, 8]
    assert all("bits_per_byte" not in row and 0 < row["targets"] < 2 * 32 for row in found)
    assert ", - bits per byte (" in output
    assert "null" not in json.dumps(found)


@pytest.mark.integration
@pytest.mark.parametrize("mask_documents", [True, False])
def test_the_command_finds_the_loss_of_the_last_evaluation_without_being_told_how(
    tokens: Path, masked: Path, tmp_path: Path, mask_documents: bool
) -> None:
    for number, path in enumerate((tokens, masked)):
        work = tmp_path / str(number)
        work.mkdir()
        data = {"sources": [{"path": str(path)}], "sequence_length": 48, "mask_documents": mask_documents}
        run = {"dir": str(work / "run"), "steps": 3, "seed": 7}
        sections = {"data": data, "run": run, "evaluation": {}, "scheduler": None}
        config = tiny_config(path, work / "run", engine="torch", zero_optimization={"stage": 0}, **sections)
        launch("train.py", write_config(work / "c.json", config))
        (row,) = read_rows(work / "run", kind="eval")
        for words in (("export", work / "run", work / "model"), ("eval", work / "model", "--data", path, "--json")):
            done = warm.run("-m", "pipeline", *words)
            assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["sequence_length"] == 48
        assert found["mask_documents"] is mask_documents
        assert found["tokens"] == row["targets"]
        assert found["loss_nats"] == pytest.approx(row["loss"], rel=1e-5)


def test_data_without_a_heldout_split_is_trained_on_when_the_config_says_no_evaluation(
    tokens: Path, tmp_path: Path
) -> None:
    megatron(tmp_path / "web", vocabulary=384)
    source = {"path": str(tmp_path / "web"), "tokenizer": str(tokens / "tokenizer")}
    config = tiny_config(tokens, tmp_path / "run", engine="torch", evaluation={"every": 2})
    config["data"]["sources"] = [source]
    config["run"]["steps"], config["scheduler"] = 3, None
    path = write_config(tmp_path / "c.json", config)
    assert "--set evaluation.samples=0" in refusal_of(start("train.py", path))
    launch("train.py", path, "evaluation.samples=0")
    assert set(losses(tmp_path / "run")) == {1, 2, 3}
    assert read_rows(tmp_path / "run", kind="eval") == []
    report = warm.run("-m", "pipeline", "report", tmp_path / "r.html", "--run", f"a={tmp_path / 'run'}", merged=True)
    assert report.returncode == 0, report.stdout
