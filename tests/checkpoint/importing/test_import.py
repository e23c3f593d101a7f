"""Checkpoints of other trainers in, and for other trainers out; who goes on has the next losses of the other."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler

from foundation.directory import read_manifest
from foundation.errors import CheckpointError
from headrace.commands.app import run as headrace
from pipeline.checkpoint.importing.numbered import states_of
from pipeline.checkpoint.importing.unpickle import open_saved
from pipeline.checkpoint.importing.zero import loss_scale_of
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.data.skips import Skips
from pipeline.engines.build import build_engine
from pipeline.engines.objective import CrossEntropy
from pipeline.models.card.lineage import training_lineage
from pipeline.models.construction.initial_values import Zeros
from pipeline.models.construction.meta import parameter_shapes
from pipeline.plan.proof.tokens import write_tokens
from pipeline.plan.proof.tolerance import LOSS_FP32, UNIT_ROUNDOFF
from pipeline.run.batches import RankBatches
from pipeline.run.prepare import PreparedRun, prepare
from tests import warm
from tests.checkpoint.importing.megatron_cases import MIXTRAL
from tests.checkpoint.importing.source_trainers import BATCH, DECAY, LR, MODEL, SEED, SEQUENCE, VOCABULARY
from tests.conftest import selected
from tests.support import output_of

SAVED, STEPS = 3, 6
BF16 = {"bf16": {"enabled": True}}


def zero(stage: int, **config: Any) -> dict[str, Any]:
    """A case of DeepSpeed's engine."""
    return {"kind": "deepspeed", "config": {"zero_optimization": {"stage": stage}, **config}}


LINEAR = {"type": "WSD", "params": {"warmup_num_steps": 1, "decay_num_steps": STEPS, "total_num_steps": STEPS + 1}}
"""The Trainer's linear decay without a warmup."""
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "head_dim": 8,
}
TRAINERS_ZERO = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
}
QUICK = {
    "ZeRO-1": zero(1),
    "ZeRO-3, bf16": zero(3, **BF16),
    "Trainer": {"kind": "trainer", "schedule": "linear", "scheduler": LINEAR},
    "torchtitan, fused": {"kind": "fsdp", "save": "torchtitan", "fused": True},
}
CASES = {
    **QUICK,
    "Trainer, DeepSpeed": {"kind": "trainer", "deepspeed": TRAINERS_ZERO},
    "Trainer, FSDP1": {"kind": "fsdp", "save": "trainer", "version": 1, "split": False},
    "Trainer, FSDP2": {"kind": "fsdp", "save": "trainer"},
    "Trainer, FSDP2, full": {"kind": "fsdp", "save": "trainer", "full": True},
    "Trainer, Mixtral": {"kind": "trainer", "model": MIXTRAL},
    "Trainer, Qwen3-MoE": {"kind": "trainer", "model": QWEN3_MOE},
    "accelerate": {"kind": "accelerate"},
    "DCP": {"kind": "fsdp", "save": "nested"},
    "DCP, more": {"kind": "fsdp", "save": "nested", "more": True},
    "torchtitan": {"kind": "fsdp", "save": "torchtitan"},
    "no ZeRO": zero(0),
    "ZeRO-2": zero(2),
    "ZeRO-3": zero(3),
    "ZeRO-1, bf16": zero(1, **BF16),
    "ZeRO-1, bf16 by BF16_Optimizer": zero(1, **BF16, data_types={"grad_accum_dtype": "fp32"}),
    "ZeRO-2, bf16": zero(2, **BF16),
    "ZeRO-2, SGD": {**zero(2, zero_allow_untested_optimizer=True), "sgd": {"lr": 0.05, "momentum": 0.9}},
    "ZeRO-2, Lion": {**zero(2, zero_allow_untested_optimizer=True), "lion": {"lr": 2e-4, "betas": (0.9, 0.99)}},
    "ZeRO-2, one group": {**zero(2), "split": False},
    "ZeRO-3 of small sub-groups": zero(3) | {"config": {"zero_optimization": {"stage": 3, "sub_group_size": 5000}}},
    "universal of ZeRO-2": {**zero(2), "universal": True},
    "universal of ZeRO-3": {**zero(3, **BF16), "universal": True},
    "ZeRO-2, tied": {**zero(2), "model": {"tie_word_embeddings": True}},
}
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.integration) for name in CASES]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("importing")
    write_tokens(folder / "tokens", vocab_size=VOCABULARY, tokens=12_000, longest=2 * SEQUENCE)
    return folder


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, work: Path) -> dict[str, list[float]]:
    """The losses of the other trainers, whose checkpoints are in `work / NAME`."""
    wanted = {*QUICK, *selected(request.session, test_the_next_losses_are_those_of_the_other_trainer, "name")}
    return train_with_others(work, {name: case for name, case in CASES.items() if name in wanted}, processes=2)


def train_with_others(
    work: Path, cases: dict[str, Any], *, processes: int, saved: int = SAVED, steps: int = STEPS
) -> dict[str, list[float]]:
    """Trains cases in one launch; the losses of their steps."""
    common = {"tokens": str(work / "tokens"), "saved": saved, "steps": steps}
    (work / "cases.json").write_text(
        json.dumps({name: {**common, "folder": str(work / name), **case} for name, case in cases.items()})
    )
    worker = Path(__file__).with_name("source_trainers.py")
    done = warm.run(worker, work / "cases.json", work / "out.json", processes=processes, merged=True, timeout_s=500)
    output_of(done)
    losses: dict[str, list[float]] = json.loads((work / "out.json").read_text())
    return losses


def config_of(case: dict[str, Any], work: Path, run_dir: Path, *, steps: int = STEPS) -> Path:
    """A config file of the run that goes on from a case."""
    config = {
        "engine": "reference",
        "model": {"config": case.get("hf", {**MODEL, **case.get("model", {})})},
        "data": {"sources": [{"path": str(work / "tokens")}], "sequence_length": SEQUENCE},
        "run": {"dir": str(run_dir), "steps": steps, "seed": SEED},
        "evaluation": {"samples": 0},
        "train_batch_size": BATCH,
        "optimizer": {
            "type": "SGD" if "sgd" in case else "Lion" if "lion" in case else "AdamW",
            "params": {
                "lr": LR,
                "weight_decay": DECAY if case.get("split", True) else 0.0,
                **case.get("sgd", case.get("lion", {})),
            },
        },
        "bf16": {"enabled": is_bf16(case)},
        "gradient_clipping": 1.0,
        **({"scheduler": case["scheduler"]} if "scheduler" in case else {}),
    }
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps(config))
    return path


def resolved(config: Path) -> ResolvedRun:
    return resolve(load_config(config), world_size=1)


def next_losses(prepared: PreparedRun) -> list[float]:
    """Resumes a run from its newest checkpoint, as `run.session` does; the losses of the steps to its end."""
    run, [checkpoint, *_] = prepared.run, prepared.store.checkpoints()
    zeros = Zeros(parameter_shapes(prepared.model))
    engine = build_engine(run, prepared.model, zeros, CrossEntropy(), device=torch.device("cpu"))
    engine.load(checkpoint.path)
    skips = Skips.of(checkpoint.manifest.details["skips"])
    batches = RankBatches(prepared, 0).training(first_step=checkpoint.step + 1, skips=skips)
    return [engine.train_step(batch, lr=run.schedule.lr(batch.step)).loss for batch in batches]


def tolerance(case: dict[str, Any]) -> float:
    return UNIT_ROUNDOFF["bf16"] if is_bf16(case) else LOSS_FP32


def is_bf16(case: dict[str, Any]) -> bool:
    return bool(case.get("bf16") or case.get("config", {}).get("bf16", {}).get("enabled"))


@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES)
def test_the_next_losses_are_those_of_the_other_trainer(
    trained: dict[str, list[float]], work: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    config = config_of(case, work, tmp_path / "run")
    folder = next((work / name).glob("checkpoint-3"), work / name)
    assert headrace(["import", str(folder), str(tmp_path / "run"), "--config", str(config)]) == 0
    said = capsys.readouterr().out
    assert f", step {SAVED}" in said
    assert f"goes on with sample {SAVED * BATCH} of" in said
    states = {"sgd": "momentum_buffer", "lion": "float32, exp_avg\n"}
    assert next((states[kind] for kind in states if kind in case), "exp_avg, exp_avg_sq, optimizer step 3") in said
    assert "DIFFERENT" not in said
    assert "differs" not in said
    assert next_losses(prepare(resolved(config))) == pytest.approx(trained[name][SAVED:], rel=tolerance(case))


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert headrace(["import", *words]) == 2
    return capsys.readouterr().err


@pytest.fixture
def copied(trained: dict[str, list[float]], work: Path, tmp_path: Path) -> Path:
    """A checkpoint of ZeRO-1 on two ranks, to be damaged."""
    assert trained["ZeRO-1"]
    return Path(shutil.copytree(work / "ZeRO-1", tmp_path / "copied"))


def test_missing_files_of_ranks_are_named(
    copied: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(copied), str(tmp_path / "run"), "--config", str(config_of({}, work, tmp_path / "run"))]
    (copied / "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    said = refusal(words, capsys)
    assert "was saved by 2 ranks, and 1 of their files are missing: zero_pp_rank_1_mp_rank_00_optim_states.pt" in said
    (copied / "global_step3/mp_rank_00_model_states.pt").unlink()
    assert "lacks mp_rank_00_model_states.pt" in refusal(words, capsys)
    (copied / "latest").write_text("global_step9")
    assert "names global_step9, which is missing" in refusal(words, capsys)
    assert not (tmp_path / "run").exists()


def test_files_of_more_ranks_than_there_were_are_refused(
    copied: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "global_step3/zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(copied / name.format(1), copied / name.format(2))
    words = [str(copied), str(tmp_path / "run"), "--config", str(config_of({}, work, tmp_path / "run"))]
    assert "was saved by 2 ranks, and has files of more ranks: zero_pp_rank_2" in refusal(words, capsys)


def test_a_damaged_file_and_one_that_would_execute_code_are_refused(
    copied: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(copied), str(tmp_path / "run"), "--config", str(config_of({}, work, tmp_path / "run"))]
    path = copied / "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path} is damaged, or no file of torch.save" in refusal(words, capsys)
    torch.save({"optimizer_state_dict": Path("x")}, path)
    assert f"{path} names pathlib" in refusal(words, capsys)


def test_another_model_is_refused_with_both_sides(
    copied: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = config_of({"model": {"intermediate_size": 48}}, work, tmp_path / "run")
    said = refusal([str(copied), str(tmp_path / "run"), "--config", str(other)], capsys)
    assert "holds another model than the config's" in said
    assert "model.layers.0.mlp.gate_proj.weight: checkpoint (64, 32), config (48, 32)" in said
    assert not (tmp_path / "run").exists()


def test_another_optimizer_and_a_shorter_run_are_refused(
    copied: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of({}, work, tmp_path / "run")
    words = [str(copied), str(tmp_path / "run"), "--config", str(config)]
    muon = ["--set", 'optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}']
    said = refusal([*words, *muon], capsys)
    assert ": exp_avg, exp_avg_sq; the config's SGD keeps momentum_buffer" in said
    assert "global_step3 is of step 3" in refusal([*words, "--set", "run.steps=3"], capsys)
    assert not (tmp_path / "run").exists()


def test_what_differs_and_where_the_data_goes_on_is_said(
    copied: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of({}, work, tmp_path / "run")
    words = ["--set", "optimizer.params.lr=1e-3", "--set", "optimizer.params.betas=[0.9, 0.95]"]
    command = ["import", str(copied), str(tmp_path / "run"), "--config", str(config), *words]
    assert headrace([*command, "--set", "train_batch_size=5"]) == 0
    said = capsys.readouterr().out
    assert "learning rate of step 4: 0.001 by the config, 0.002 by its schedule; DIFFERENT" in said
    assert "optimizer.params.betas: checkpoint (0.9, 0.999), config (0.9, 0.95)" in said
    assert "goes on with sample 25 of this run's order, by whole batches of 5; it was trained on 24" in said
    again = refusal(command[1:], capsys)
    assert "exists already" in again


def test_a_checkpoint_without_a_config_is_named(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal([str(copied), str(tmp_path / "run")], capsys)
    assert "is a checkpoint of DeepSpeed (ZeRO)" in said
    assert "--config FILE" in said


def test_the_run_and_its_later_checkpoints_say_what_they_go_on_from(copied: Path, work: Path, tmp_path: Path) -> None:
    config = config_of({}, work, tmp_path / "run")
    assert headrace(["import", str(copied), str(tmp_path / "run"), "--config", str(config)]) == 0
    assert headrace(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    output_of(warm.run("pipeline/train.py", "--config", config))
    newest = read_manifest(tmp_path / "run/checkpoints/step-00000006", kind="checkpoint")
    assert newest.details["imported"]["kind"] == "DeepSpeed ZeRO-1 of 2 ranks"
    [given, training] = training_lineage(newest)["steps"]
    assert (given["step"], training["step"]) == ("given", "training")
    assert "DeepSpeed ZeRO-1 of 2 ranks, step 3" in given["what"]


OUT = {
    "dcp": {"kind": "fsdp"},
    "universal, ZeRO-2": zero(2, checkpoint={"load_universal": True}),
    "universal, ZeRO-1": zero(1, checkpoint={"load_universal": True}),
    "universal, ZeRO-1, bf16": zero(1, checkpoint={"load_universal": True}, **BF16),
}
OUT_QUICK = ("dcp", "universal, ZeRO-2")
OUT_NAMES = [pytest.param(name, marks=[] if name in OUT_QUICK else pytest.mark.integration) for name in OUT]


@pytest.fixture(scope="module")
def exported(request: pytest.FixtureRequest, trained: dict[str, list[float]], work: Path) -> dict[str, list[float]]:
    """A checkpoint in both formats, `work / FORMAT`; the losses of other trainers that go on from them."""
    assert trained["ZeRO-1"]
    config = config_of({}, work, work / "exported")
    assert headrace(["import", str(work / "ZeRO-1"), str(work / "exported"), "--config", str(config)]) == 0
    for kind in ("dcp", "universal"):
        assert headrace(["export", str(work / "exported"), str(work / kind), "--format", kind]) == 0
    wanted = {*OUT_QUICK, *selected(request.session, test_other_trainers_go_on_from_an_export, "name")}
    cases = {
        name: {**case, "load": str(work / name.partition(",")[0]), "loaded": SAVED, "saved": 0}
        for name, case in OUT.items()
        if name in wanted
    }
    return train_with_others(work, cases, processes=2)


@pytest.mark.parametrize("name", OUT_NAMES)
def test_other_trainers_go_on_from_an_export(
    trained: dict[str, list[float]], exported: dict[str, list[float]], name: str
) -> None:
    assert exported[name] == pytest.approx(trained["ZeRO-1"][SAVED:], rel=tolerance(OUT[name]))


def assert_same_state(one: Path, other: Path, tmp_path: Path) -> None:
    """The newest checkpoints of two runs are the same bit for bit."""
    states = [tmp_path / f"{n}.pt" for n in (0, 1)]
    for run_dir, path in zip((one, other), states, strict=True):
        assert headrace(["checkpoint", "torch", str(run_dir), str(path)]) == 0
    before, after = map(torch.load, states)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("kind", ["dcp", "universal"])
def test_an_export_comes_back_bit_for_bit(
    exported: dict[str, list[float]], work: Path, tmp_path: Path, kind: str
) -> None:
    assert exported
    config = config_of({}, work, tmp_path / "run")
    assert headrace(["import", str(work / kind), str(tmp_path / "run"), "--config", str(config)]) == 0
    assert_same_state(work / "exported", tmp_path / "run", tmp_path)


def test_a_damaged_dcp_and_one_with_foreign_classes_are_refused(
    exported: dict[str, list[float]], work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported
    folder = Path(shutil.copytree(work / "dcp", tmp_path / "dcp"))
    words = [str(folder), str(tmp_path / "run"), "--config", str(config_of({}, work, tmp_path / "run"))]
    (folder / "__0_0.distcp").rename(folder / "__7_0.distcp")
    assert "lacks __0_0.distcp" in refusal(words, capsys)
    (folder / ".metadata").write_bytes(pickle.dumps(shutil.rmtree))
    assert "names shutil.rmtree, which opening it would execute: refused" in refusal(words, capsys)


def test_what_a_format_does_not_hold_is_refused(
    exported: dict[str, list[float]], work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported
    command = ["export", str(work / "exported"), str(tmp_path / "out"), "--format", "dcp"]
    assert headrace([*command, "--dtype", "bf16"]) == 2
    assert "--format dcp writes the state as it is trained, in fp32" in capsys.readouterr().err


def test_numbered_states_are_named_by_the_rule_that_fits_and_refused_where_none_does() -> None:
    parameters = {"embed.weight": (4, 2), "layers.0.norm.weight": (2,), "layers.0.weight": (2, 2), "lm_head": (4, 2)}
    order = ["embed.weight", "layers.0.weight", "lm_head", "layers.0.norm.weight"]
    state = {n: {"step": 3, "exp_avg": torch.full(parameters[name], float(n))} for n, name in enumerate(order)}
    groups = [{"params": [0, 1, 2]}, {"params": [3]}]
    found = states_of({"state": state, "param_groups": groups}, parameters, Path("optimizer.pt"))
    assert {name: float(tensor.read().mean()) for name, tensor in found.states["exp_avg"].items()} == {
        name: float(n) for n, name in enumerate(order)
    }
    assert found.counters == [3, 3, 3, 3]
    state[1], state[3] = state[3], state[1]
    state[0], state[1] = state[1], state[0]
    with pytest.raises(CheckpointError, match=r"numbers its parameters \(3 \+ 1 in 2 groups\)"):
        states_of({"state": state, "param_groups": groups}, parameters, Path("optimizer.pt"))


def test_a_model_that_computes_otherwise_and_weights_alone_are_refused(
    trained: dict[str, list[float]], work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained["Trainer"]
    folder = Path(shutil.copytree(work / "Trainer/checkpoint-3", tmp_path / "checkpoint-3"))
    words = [str(folder), str(tmp_path / "run"), "--config", str(config_of({}, work, tmp_path / "run"))]
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "rms_norm_eps": 1e-5}))
    said = refusal(words, capsys)
    assert "was trained with another model than the config's" in said
    assert "rms_norm_eps: checkpoint 1e-05, config 1e-06" in said
    (folder / "optimizer.pt").unlink()
    assert "has no optimizer state (optimizer.pt, optimizer.bin, optimizer_0 or global_step*)" in refusal(words, capsys)
    assert not (tmp_path / "run").exists()


def test_the_loss_scale_of_deepspeed_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # rank 0 says that a step is skipped
    scaler = loss_scaler.DynamicLossScaler(2**16, 1000, 1.0, 2, False)
    for overflow in (False, True, False, False):
        scaler.update_scale(overflow)
    torch.save({"loss_scaler": scaler}, tmp_path / "x.pt")
    assert loss_scale_of(open_saved(tmp_path / "x.pt")["loss_scaler"]) == (2**16, 2, 1)


WORLDS = {
    f"ZeRO-{stage}{', bf16' if precision else ''}": zero(stage, **precision)
    for stage in (1, 2, 3)
    for precision in ({}, BF16)
}
TEN = {"saved": 10, "steps": 20}


@pytest.mark.sweep
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_ten_steps_after_ten_steps_on_any_number_of_ranks(tmp_path: Path, processes: int) -> None:
    """Prints the rows of the table in docs/how-to/import-checkpoints.md."""
    work = tmp_path
    (work / "runs").mkdir()
    write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=12_000, longest=2 * SEQUENCE)
    linear = {"warmup_num_steps": 1, "decay_num_steps": TEN["steps"], "total_num_steps": TEN["steps"] + 1}
    cases = {name: {**case, **TEN} for name, case in {**WORLDS, **(CASES if processes == 2 else {})}.items()}
    cases = {n: {**c, "scheduler": {**LINEAR, "params": linear}} if "scheduler" in c else c for n, c in cases.items()}
    theirs = train_with_others(work, cases, processes=processes)
    for name, case in cases.items():
        run_dir = work / "runs" / name
        config = config_of(case, work, run_dir, steps=TEN["steps"])
        folder = next((work / name).glob("checkpoint-10"), work / name)
        assert headrace(["import", str(folder), str(run_dir), "--config", str(config)]) == 0
        ours, after = next_losses(prepare(resolved(config))), theirs[name][TEN["saved"] :]
        worst = max(abs(a - b) / b for a, b in zip(ours, after, strict=True))
        losses = f"{after[0]:.6f} | {ours[0]:.6f} | {after[-1]:.6f} | {ours[-1]:.6f}"
        print(f"| {name} | {processes} | {losses} | {worst:.1e} |")
        assert ours == pytest.approx(after, rel=tolerance(case))
