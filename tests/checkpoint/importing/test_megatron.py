"""Megatron-core's checkpoints: runs that go on have its next losses; arguments are refused, named, or pass."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tarfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig

from foundation.errors import CheckpointError
from headrace.commands.app import run as headrace
from pipeline.checkpoint.export.megatron_folder import write_megatron
from pipeline.checkpoint.importing.dcp import DcpFolder
from pipeline.checkpoint.importing.find import open_checkpoint
from pipeline.checkpoint.importing.megatron_arguments import check_arguments, fields_of
from pipeline.checkpoint.importing.source import TargetModel
from pipeline.run.prepare import prepare
from tests.checkpoint.importing.megatron_cases import LIVE, SMALL, STORED, train, write_token_folder
from tests.checkpoint.importing.megatron_trainer import FOLDER
from tests.checkpoint.importing.source_trainers import BATCH
from tests.checkpoint.importing.test_import import (
    assert_same_state,
    config_of,
    next_losses,
    refusal,
    resolved,
    tolerance,
)

SAVED, STEPS = 3, 6
GOES_ON: dict[str, dict[str, int]] = {
    "llama, tp 2": {"pp": 2},
    "llama, pp 2, bf16": {"tp": 2},
    "qwen2, tp 2": {},
    "mixtral, ep 2": {"ep": 2},
    "mixtral, dp 2": {"ep": 2},
    "gpt2, dp 2": {"tp": 2},
}
"""Case -> the layout in which Megatron goes on with its export."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens, and the checkpoints that megatron-core has written: `work / NAME`."""
    folder = tmp_path_factory.mktemp("megatron")
    write_token_folder(folder)
    for name in STORED:
        with tarfile.open(Path(__file__).parent / "megatron" / f"{name}.tar.xz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2, as Debian's, has none
            archive.extractall(folder)
    return folder


def words_of(name: str, work: Path, run_dir: Path, **case: Any) -> list[str]:
    return [str(work / name), str(run_dir), "--config", str(config_of({**STORED[name], **case}, work, run_dir))]


@pytest.mark.parametrize("name", [name for name in STORED if name != "buckets"])
def test_the_next_losses_are_those_of_megatron(
    work: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(name, work, tmp_path / "run")
    assert headrace(["import", *words]) == 0
    said = capsys.readouterr().out
    assert f"Megatron-core (torch_dist), step {SAVED}, {SAVED * BATCH} samples" in said
    assert "weights in float32, exp_avg, exp_avg_sq, optimizer step 3" in said
    assert "differ" not in said.lower()
    losses = json.loads((work / name / "losses.json").read_text())
    found = next_losses(prepare(resolved(Path(words[-1]))))
    assert found == pytest.approx(losses[SAVED:], rel=tolerance(STORED[name]))


def test_the_buckets_of_the_distributed_optimizer_are_refused(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(words_of("buckets", work, tmp_path / "run"), capsys)
    assert "has the buckets of Megatron's distributed optimizer (dp_reshardable)" in said
    assert "--dist-ckpt-optim-fully-reshardable" in said
    assert not (tmp_path / "run").exists()


def test_another_model_is_refused_by_megatrons_arguments(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = STORED["llama"]["model"]
    said = refusal(words_of("llama", work, tmp_path / "a", model={**model, "rms_norm_eps": 1e-5}), capsys)
    assert "rms_norm_eps: checkpoint 1e-06, config 1e-05" in said
    said = refusal(words_of("gpt2", work, tmp_path / "b", hf={**STORED["gpt2"]["hf"], "n_head": 2}), capsys)
    assert "n_head: checkpoint 4, config 2" in said
    said = refusal(words_of("gpt2", work, tmp_path / "b", hf={"model_type": "gpt_neox"}), capsys)
    assert "is Megatron's, and the config's model is a gpt_neox" in said


def test_rows_of_padding_are_cut_and_named(work: Path, tmp_path: Path) -> None:
    prepared = prepare(resolved(Path(words_of("llama", work, tmp_path / "run")[-1])))
    full = TargetModel.of(prepared.model, prepared.hf_config)
    padded = ("model.embed_tokens.weight", "lm_head.weight")
    cut = replace(full, parameters=full.parameters | dict.fromkeys(padded, (100, SMALL["hidden_size"])))
    whole, source = (open_checkpoint(work / "llama", wanted) for wanted in (full, cut))
    assert [text for text in source.left_out if "rows" in text] == [
        f"28 rows of {name} beyond model.config's vocab_size (Megatron's loss counts their logits, too)"
        for name in padded
    ]
    for ours, all_rows in ((source.weights, whole.weights), (source.states["exp_avg"], whole.states["exp_avg"])):
        assert torch.equal(ours[padded[0]].read(), all_rows[padded[0]].read()[:100])


def test_objects_in_common_pt_are_not_executed_and_the_format_torch_is_refused(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(work / "llama", tmp_path / "llama"))
    common = folder / "iter_0000003/common.pt"

    (tmp_path / "kept").mkdir()

    class Executed:
        def __reduce__(self) -> Any:
            return (shutil.rmtree, (str(tmp_path / "kept"),))

    torch.save({"iteration": 3, "args": Executed(), "optimizer": {"param_groups": [{"step": 3.0}]}}, common)
    words = words_of("llama", work, tmp_path / "run")
    assert headrace(["import", str(folder), *words[1:]]) == 0
    assert (tmp_path / "kept").exists()
    words = words_of("llama", work, tmp_path / "again")
    common.write_bytes(pickle.dumps({"iteration": 3}))
    assert "is damaged, or no file of torch.save" in refusal([str(folder), *words[1:]], capsys)
    (folder / "iter_0000003/.metadata").unlink()
    assert "is no checkpoint of Megatron's format torch_dist" in refusal([str(folder), *words[1:]], capsys)


@pytest.mark.parametrize("name", [name for name in STORED if name != "buckets"])
def test_an_export_is_what_megatron_wrote_and_comes_back_bit_for_bit(work: Path, name: str, tmp_path: Path) -> None:
    words = words_of(name, work, tmp_path / "run")
    assert headrace(["import", *words]) == 0
    assert headrace(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "megatron"]) == 0
    folders = [each / f"iter_{SAVED:07d}" for each in (work / name, tmp_path / "out")]
    theirs, ours = map(DcpFolder.open, folders)
    bf16, compared = STORED[name].get("bf16"), 0
    for key, stored in theirs.tensors.items():
        # Mixtral's states are flat pieces, and weights in bf16 have their masters beside them
        flat = stored.shape != ours.tensors[key.replace(".fp32_param.", ".param.")].shape
        if not flat and (key.startswith("optimizer.") or not bf16):
            compared += 1
            assert torch.equal(theirs.tensor(key).read(), ours.tensor(key).read()), key
    assert compared >= 10
    assert not {key for key in theirs.places if "_extra_state" in key} - {*ours.places}
    again = words_of(name, work, tmp_path / "again")
    assert headrace(["import", str(tmp_path / "out"), *again[1:]]) == 0
    assert_same_state(tmp_path / "run", tmp_path / "again", tmp_path)


def test_a_family_without_megatrons_names_is_refused(tmp_path: Path) -> None:
    state: Any = SimpleNamespace(step=1, model=SimpleNamespace(config=GPTNeoXConfig()))
    with pytest.raises(CheckpointError, match="names of a gpt_neox are not known"):
        write_megatron(state, tmp_path, lambda _done, _total: None)


@pytest.mark.integration
@pytest.mark.skipif(FOLDER not in os.environ, reason=f"needs megatron-core, whose folder {FOLDER} names")
def test_ten_steps_after_ten_steps_of_megatron(tmp_path: Path) -> None:
    """Prints the rows of the table in docs/how-to/import-checkpoints.md."""
    write_token_folder(tmp_path)
    (tmp_path / "runs").mkdir()
    both = {"tp": 2, "pp": 2, "sharding": "fully_reshardable"}
    for processes, cases in ((2, LIVE), (4, {"llama, tp 2, pp 2": both})):
        theirs = train(tmp_path, cases, processes=processes, saved=10, steps=20)
        for name, case in cases.items():
            run_dir = tmp_path / "runs" / name
            config = config_of(case, tmp_path, run_dir, steps=20)
            assert headrace(["import", str(tmp_path / name), str(run_dir), "--config", str(config)]) == 0
            ours, after = next_losses(prepare(resolved(config))), theirs[name][10:]
            worst = max(abs(a - b) / b for a, b in zip(ours, after, strict=True))
            losses = f"{after[0]:.6f} | {ours[0]:.6f} | {after[-1]:.6f} | {ours[-1]:.6f}"
            print(f"| Megatron-core, {name} | {processes} | {losses} | {worst:.1e} |")
            assert ours == pytest.approx(after, rel=tolerance(case))


@pytest.mark.integration
@pytest.mark.skipif(FOLDER not in os.environ, reason=f"needs megatron-core, whose folder {FOLDER} names")
def test_megatron_goes_on_from_an_export_in_another_layout(tmp_path: Path) -> None:
    """Ten steps of Megatron, an import, an export, and the next ten steps of Megatron."""
    write_token_folder(tmp_path)
    (tmp_path / "runs").mkdir()
    theirs = train(tmp_path, LIVE, processes=2, saved=10, steps=20)
    going_on = {}
    for name, layout in GOES_ON.items():
        run_dir = tmp_path / "runs" / name
        config = config_of(LIVE[name], tmp_path, run_dir, steps=20)
        assert headrace(["import", str(tmp_path / name), str(run_dir), "--config", str(config)]) == 0
        assert headrace(["export", str(run_dir), str(tmp_path / f"to {name}"), "--format", "megatron"]) == 0
        same = {key: value for key, value in LIVE[name].items() if key not in ("tp", "pp", "ep")}
        how = {"sharding": "fully_reshardable", "load": str(tmp_path / f"to {name}")}
        going_on[name] = {**same, **layout, **how}
    found = train(tmp_path, going_on, processes=2, saved=0, steps=20)
    for name, losses in found.items():
        worst = max(abs(a - b) / b for a, b in zip(losses, theirs[name][10:], strict=True))
        print(f"| Megatron-core, {name}, then {GOES_ON[name]} | {worst:.1e} |")
        assert losses == pytest.approx(theirs[name][10:], rel=tolerance(LIVE[name]))


LLAMA = {"model_type": "llama", "hidden_act": "gelu", "rope_parameters": {"rope_type": "llama3", "factor": 32.0}}
MISTRAL = {"model_type": "mistral", "sliding_window": 128}
PLAIN: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "window_size": None,
    "hidden_dropout": 0.0,
    "clip_grad": 1.0,
    # layout, speed, logs and paths
    "tensor_model_parallel_size": 8,
    "recompute_granularity": "full",
    "attention_backend": Namespace(name="auto"),
    "tensorboard_dir": "/logs",
    "exit_signal": Namespace(name="SIGTERM"),
    # of experts, where there are none; of Muon, where it is Adam
    "moe_router_score_function": "sigmoid",
    "moe_aux_loss_coeff": 0.01,
    "muon_momentum": 0.8,
    # of a fork, and off
    "our_new_loss": False,
}
OTHER_MODELS = {
    "rotary_percent": 0.5,
    "rotary_seq_len_interpolation_factor": 4,
    "no_rope_freq": 4,
    "rotary_interleaved": True,
    "window_size": (127, 0),
    "softmax_type": "learnable",
    "squared_relu": True,
    "quick_geglu": True,
    "swiglu": False,
    "normalization": "LayerNorm",
    "position_embedding_type": "none",
    "attention_output_gate": True,
    "apply_residual_connection_post_layernorm": True,
    "apply_layernorm_1p": True,
    "layernorm_zero_centered_gamma": True,
    "qk_l2_norm": True,
    "spec": ["a.module", "layers"],
}
OTHER_ROUTERS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_group_topk": 2,
    "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"],
}
OTHER_TRAINING: dict[str, tuple[Any, str]] = {
    "hidden_dropout": (0.1, "no dropout"),
    "decoupled_lr": (1e-4, "rate of all others"),
    "decoupled_weight_decay": (False, "decoupled"),
    "clip_grad": (0.5, "gradient_clipping"),
    "rampup_batch_size": ([16, 8, 1000], "it may be a ramp"),
    "reset_attention_mask": (True, "data.mask_documents"),
    "moe_aux_loss_coeff": (0.01, "moe.aux_loss_coef"),
    "moe_z_loss_coeff": (1e-3, "no z-loss"),
    "moe_expert_capacity_factor": (1.0, "all their tokens"),
    "our_new_loss": (0.3, "not known here"),
}


def named(given: dict[str, Any], config: dict[str, Any] = LLAMA) -> list[str]:
    return check_arguments(Path("iter_0000003"), Namespace(**{**PLAIN, **given}), config)


def test_arguments_of_layout_speed_and_logs_pass_and_those_that_older_versions_lack() -> None:
    assert named({}) == []
    assert check_arguments(Path(), Namespace(), {"model_type": "gpt2"}) == []


@pytest.mark.parametrize("name", [*OTHER_MODELS, *OTHER_ROUTERS])
def test_an_argument_that_makes_another_model_is_refused_by_name(name: str) -> None:
    routers = {"num_experts": 8, "moe_router_score_function": "softmax"}
    given = {name: OTHER_MODELS[name]} if name in OTHER_MODELS else {**routers, name: OTHER_ROUTERS[name]}
    with pytest.raises(CheckpointError, match=rf"(?s)another model of the same weights:\n    {name} = .*Bridge"):
        named(given)


@pytest.mark.parametrize("name", OTHER_TRAINING)
def test_an_argument_that_decides_the_next_losses_is_named_with_what_a_run_does(name: str) -> None:
    value, ours = OTHER_TRAINING[name]
    [line] = [
        text for text in named({name: value, "num_experts": 8, "moe_router_score_function": "softmax"}) if name in text
    ]
    assert f"{name} = {value}" in line
    assert ours in line


def test_an_argument_that_becomes_a_field_is_compared() -> None:
    scaled = {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "norm_epsilon": None}
    found = fields_of(Namespace(**PLAIN, **scaled), LLAMA)
    assert found["hidden_act"] == "silu"
    assert (found["rope_parameters"]["factor"], found["rope_parameters"]["low_freq_factor"]) == (8.0, 1.0)
    assert fields_of(Namespace(layernorm_epsilon=1e-6), {"rms_norm_eps": 1e-5}) == {"rms_norm_eps": 1e-6}
    for window, ours in (((127, 0), 128), ((63, 0), 64), (None, None), ((-1, -1), None)):
        assert named({"window_size": window}, MISTRAL) == []
        assert fields_of(Namespace(window_size=window), MISTRAL) == {"sliding_window": ours}


def test_an_import_refuses_another_model_and_names_the_rest(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(work / "llama", tmp_path / "llama"))
    saved = {"iteration": 3, "args": Namespace(rotary_percent=0.5), "optimizer": {"param_groups": [{"step": 3.0}]}}
    torch.save(saved, folder / "iter_0000003/common.pt")
    said = refusal([str(folder), *words_of("llama", work, tmp_path / "run")[1:]], capsys)
    assert "rotary_percent = 0.5; the config's model has 1.0" in said
