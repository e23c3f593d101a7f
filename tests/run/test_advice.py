"""Warnings of `check`: settings that are legal and rarely meant; a sensible run has none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foundation.section import parse
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config, StragglersSection
from pipeline.run.before.advice import PLANNED_SHARD_BYTES, advice, shards_of_a_checkpoint
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.run.out_of_memory import memory_of, own_peak
from pipeline.run.prepare import prepare
from pipeline.runtime.metrics.stragglers import report_interval, report_seconds
from tests.conftest import launch, make_tokens, tiny_config, write_config
from tests.data.test_staging import small_disk


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of 900 documents of ten to forty tokens."""
    work = tmp_path_factory.mktemp("short")
    (work / "text").mkdir()
    for i in range(900):
        (work / "text" / f"{i}.txt").write_text(f"mill {i} " + "water turns the wheel " * (1 + i % 4))
    return make_tokens(work, [work / "text"], tokenizer={"train": "bpe", "vocab_size": 300})


def resolved(tokens: Path, tmp_path: Path, **sections: Any) -> ResolvedRun:
    return resolve(parse(Config, tiny_config(tokens, tmp_path / "run", **sections)), world_size=1)


def warnings(tokens: Path, tmp_path: Path, **sections: Any) -> list[str]:
    return list(advice(prepare(resolved(tokens, tmp_path, **sections))))


def test_a_sensible_run_has_no_warning(tokens: Path, tmp_path: Path) -> None:
    assert warnings(tokens, tmp_path) == []


def test_end_of_text_that_is_padding_too_is_named_since_its_embedding_stays_as_it_is(
    tokens: Path, tmp_path: Path
) -> None:
    model = tiny_config(tokens, tmp_path)["model"]
    eos = prepare(resolved(tokens, tmp_path)).mixture.sources[0].manifest.details["tokenizer"]["eos_id"]
    model["config"]["pad_token_id"] = eos
    (line,) = warnings(tokens, tmp_path, model=model)
    assert line.startswith(f"the padding id is also the end-of-text id ({eos})")
    model["config"]["pad_token_id"] = None  # the remedy
    assert warnings(tokens, tmp_path, model=model) == []


def test_rows_of_the_embedding_that_no_token_has_are_counted(tokens: Path, tmp_path: Path) -> None:
    model = tiny_config(tokens, tmp_path)["model"]
    model["config"]["vocab_size"] = 4096
    (line,) = warnings(tokens, tmp_path, model=model)
    assert line.startswith("model.config.vocab_size = 4,096, and the tokenizer has 512 ids: ")
    width = model["config"]["hidden_size"]
    assert f"{(4096 - 512) * width * 2:,} of" in line
    model["config"]["vocab_size"] = 576  # padding to a round number is none
    assert warnings(tokens, tmp_path, model=model) == []


def test_more_than_four_epochs_are_a_warning(tokens: Path, tmp_path: Path) -> None:
    run = {"dir": str(tmp_path / "run"), "steps": 20}
    (samples,) = (s.windows for s in prepare(resolved(tokens, tmp_path)).mixture.sources)
    for epochs, found in ((3, 0), (5, 1)):
        lines = warnings(tokens, tmp_path, run={**run, "steps": -(-epochs * samples // 8)}, scheduler=None)
        assert len(lines) == found
        assert all("is repeated 5.0 times" in line for line in lines)


def test_experts_that_nothing_balances_are_a_warning(tokens: Path, tmp_path: Path) -> None:
    model = tiny_config(tokens, tmp_path)["model"]
    model["config"] |= {"model_type": "mixtral", "num_local_experts": 4}
    (line,) = warnings(tokens, tmp_path, model=model)
    assert line.startswith("nothing balances the experts")
    assert warnings(tokens, tmp_path, model=model, moe={"balance": "aux_loss"}) == []


def test_kernels_that_have_not_run_are_a_warning(tokens: Path, tmp_path: Path) -> None:
    model = tiny_config(tokens, tmp_path)["model"]
    model["config"] |= {"model_type": "mixtral", "num_local_experts": 4}
    fields = tiny_config(tokens, tmp_path / "run", model=model, moe={"balance": "aux_loss"}, parallel={"ep": 2})
    prepared = prepare(resolve(parse(Config, fields), world_size=2))
    assert list(advice(prepared)) == []
    # the package is not installed, so that `prepare` refuses the key
    config = prepared.run.config
    named = config.model_copy(update={"parallel": config.parallel.model_copy(update={"ep_exchange": "deepep"})})
    (line,) = advice(replace(prepared, run=replace(prepared.run, config=named)))
    assert line.startswith("parallel.ep_exchange = deepep is experimental")


def test_a_sequence_much_longer_than_the_documents_is_a_warning(short: Path, tmp_path: Path) -> None:
    data = {"sources": [{"path": str(short)}], "sequence_length": 256}
    model = tiny_config(short, tmp_path)["model"]
    model["config"]["max_position_embeddings"] = 256
    (line,) = warnings(
        short, tmp_path, data=data, model=model, run={"dir": str(tmp_path / "r"), "steps": 4}, scheduler=None
    )
    assert "data.sequence_length = 256, and 90% of the tokens of" in line
    assert line.endswith(("64 would hold nearly all", "32 would hold nearly all"))
    assert warnings(short, tmp_path, data={**data, "sequence_length": 64}, model=model) == []


def test_no_straggler_reports_by_default_where_one_takes_seconds(tokens: Path, tmp_path: Path) -> None:
    run = resolved(tokens, tmp_path)
    few, many = (report_seconds(run.topology, run.batch, layers=layers) for layers in (2, 400))
    assert many > 2
    assert report_interval(run.config.stragglers, seconds=few) == 100
    assert report_interval(run.config.stragglers, seconds=many) is None
    assert report_interval(StragglersSection(every=7), seconds=many) == 7
    assert report_interval(StragglersSection(every=None), seconds=few) is None


def test_an_existing_model_continued_at_the_rate_of_a_new_one_is_a_warning(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path)["model"]["config"]
    with_ids = LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"} | {"vocab_size": 512})
    LlamaForCausalLM(with_ids).save_pretrained(tmp_path / "model")
    model = {"path": str(tmp_path / "model")}
    (line,) = warnings(tokens, tmp_path, model=model, optimizer={"params": {}})
    assert "is continued at a peak learning rate of 0.001" in line
    assert warnings(tokens, tmp_path, model=model, optimizer={"params": {"lr": 5e-5}}) == []  # what the line suggests
    assert warnings(tokens, tmp_path, model={**model, "fresh": True}, optimizer={"params": {}}) == []


def test_a_trainers_checkpoint_is_said_to_give_its_weights_alone(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path)["model"]["config"]
    with_ids = LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"} | {"vocab_size": 512})
    folder = tmp_path / "checkpoint-9"
    LlamaForCausalLM(with_ids).save_pretrained(folder)
    low = {"params": {"lr": 5e-5}}
    assert warnings(tokens, tmp_path, model={"path": str(folder)}, optimizer=low) == []
    (folder / "trainer_state.json").write_text("{}")
    (line,) = warnings(tokens, tmp_path, model={"path": str(folder)}, optimizer=low)
    assert "optimizer state, schedule and step are not" in line


def test_a_warmup_longer_than_the_run_is_named_given_or_deepspeeds_own(tokens: Path, tmp_path: Path) -> None:
    for params, words in (({"warmup_num_steps": 2000}, "2,000, and"), ({}, "1,000 when absent, and")):
        (line,) = warnings(tokens, tmp_path, scheduler={"type": "WarmupLR", "params": params})
        assert line.startswith(f"scheduler.params.warmup_num_steps is {words} the run has 20 steps")
    assert warnings(tokens, tmp_path, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}}) == []


def test_a_checkpoint_of_very_many_shards_is_told_with_the_memory_that_its_plan_takes(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_405b = shards_of_a_checkpoint([16_384] * 1137, ranks=8192)
    assert of_405b * PLANNED_SHARD_BYTES == pytest.approx(6.22e9, rel=0.01)  # as `make sweep-scale` measured
    assert shards_of_a_checkpoint([16_384] * 1137, ranks=8) * PLANNED_SHARD_BYTES < 1e7
    assert not any(
        "plans checkpoints" in line
        for line in warnings(tokens, tmp_path, engine="torch", zero_optimization={"stage": 3})
    )
    monkeypatch.setattr("pipeline.run.before.advice._PLAN_BYTES", 1_000)
    [line] = [
        line
        for line in warnings(tokens, tmp_path, engine="torch", zero_optimization={"stage": 3})
        if "plans checkpoints" in line
    ]
    assert "parallel.hybrid_shard_size" in line


def test_a_derived_micro_batch_that_does_not_fit_is_named_with_the_largest_that_does(
    tokens: Path, tmp_path: Path
) -> None:
    batch = 1 << 22  # samples of 32 tokens: terabytes of activations, more than any host has
    sections = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": None, "evaluation": {"samples": 0}}
    lines = warnings(tokens, tmp_path, **sections)
    (line,) = (each for each in lines if each.startswith(f"the micro-batch {batch:,}, which follows from"))
    largest = int(line.partition("train_micro_batch_size_per_gpu ")[2].split()[0])
    given = warnings(tokens, tmp_path, **{**sections, "train_micro_batch_size_per_gpu": largest})
    assert not [each for each in given if "micro-batch" in each]
    sizes = ({**sections, "train_micro_batch_size_per_gpu": micro} for micro in (largest, 2 * largest))
    fits, larger = (own_peak(run, prepare(run).model) for run in (resolved(tokens, tmp_path, **each) for each in sizes))
    assert (fits or 0) <= memory_of(torch.device("cpu")) < (larger or 0)


def test_checkpoints_that_do_not_fit_the_disk_are_named_with_what_does(tokens: Path, tmp_path: Path) -> None:
    size = prepare(resolved(tokens, tmp_path)).size.parameters * 12  # fp32 weights and two moments
    run = {**tiny_config(tokens, tmp_path / "disk" / "run")["run"], "keep_checkpoints": 5, "checkpoint_every": 4}
    with small_disk(tmp_path / "disk", kilobytes=4 * size // 1024 + 1024):
        (line,) = warnings(tokens, tmp_path, run=run)
        assert f"({shown_bytes(size)} each: run.keep_checkpoints 5, one while it is written)" in line
        (remedy,) = re.findall(r"--set run.keep_checkpoints=(\d+), or set run.dir to a disk with", line)
        assert warnings(tokens, tmp_path, run={**run, "keep_checkpoints": int(remedy)}) == []
        config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path, run=run))
        launch("train.py", config, f"run.keep_checkpoints={remedy}")
        (line,) = warnings(tokens, tmp_path, run={**run, "dir": str(tmp_path / "disk/other"), "keep_every": 5})
        assert "4 by run.keep_every" in line
        assert "--set" not in line
