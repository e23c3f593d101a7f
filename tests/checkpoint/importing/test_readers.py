"""Readers of foreign checkpoints without their trainers: names, groups, steps and files that could be taken wrongly."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties
from transformers import AutoConfig

from foundation.errors import CheckpointError, DataError
from pipeline.checkpoint.format.metadata import TORCH_METADATA
from pipeline.checkpoint.importing.dcp import DcpFolder, _metadata, read_dcp
from pipeline.checkpoint.importing.find import check_known
from pipeline.checkpoint.importing.hyperparameters import compare_params, compare_rates
from pipeline.checkpoint.importing.match import matched_state
from pipeline.checkpoint.importing.megatron import read_megatron
from pipeline.checkpoint.importing.numbered import states_of
from pipeline.checkpoint.importing.source import SourceCheckpoint, TargetModel, stored
from pipeline.checkpoint.importing.trainer_folder import read_trainer
from pipeline.checkpoint.importing.unpickle import open_saved
from pipeline.checkpoint.importing.zero import newest_tag, with_adam_mode
from pipeline.config.sections.optimizers import ADAMW, OptimizerParams
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_names import groups_of_model
from pipeline.models.folder.weight_files import stored_tensors
from pipeline.run.import_checkpoint import _with_step
from tests.checkpoint.importing.megatron_cases import MIXTRAL
from tests.checkpoint.importing.source_trainers import MODEL

LAYERS = {
    "embed.weight": (4, 2),
    "layers.0.weight": (2, 2),
    "layers.0.norm.weight": (2,),
    "layers.1.weight": (2, 2),
    "layers.1.norm.weight": (2,),
    "head.weight": (4, 2),
}


def target(**fields: Any) -> TargetModel:
    fields = {**MODEL, **fields}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return TargetModel.of(build_meta(config, dtype=torch.float32, attn_implementation="eager"), config.to_dict())


def source(tensors: Mapping[str, Tensor], **states: Mapping[str, Tensor]) -> SourceCheckpoint:
    """A checkpoint with some weights and states; all parameters' moments are their weights where none are given."""
    kinds: dict[str, Mapping[str, Tensor]] = {**dict.fromkeys(("exp_avg", "exp_avg_sq"), tensors), **states}
    lazy = {kind: {name: stored(value) for name, value in named.items()} for kind, named in kinds.items()}
    return SourceCheckpoint(Path("there"), "torch", 3, {n: stored(v) for n, v in tensors.items()}, lazy)


def drawn(wanted: TargetModel) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in wanted.parameters.items()}


def test_a_head_beside_a_tied_embedding_has_to_be_the_embedding() -> None:
    wanted = target(tie_word_embeddings=True)
    tensors = drawn(wanted)
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].bfloat16()}
    assert matched_state(source(both), wanted, lambda _: ADAMW).keys()
    both["lm_head.weight"] = both["lm_head.weight"] + 0.1
    with pytest.raises(CheckpointError, match=r"the config ties lm_head.weight to model.embed_tokens.weight, and"):
        matched_state(source(both), wanted, lambda _: ADAMW)
    # the weights are equal, and the moments are not
    with pytest.raises(CheckpointError, match=r"the config ties lm_head.weight"):
        matched_state(source(tensors, exp_avg=both), wanted, lambda _: ADAMW)


def test_states_without_a_place_in_the_run_are_refused() -> None:
    wanted = target()
    tensors = drawn(wanted)
    with pytest.raises(
        CheckpointError, match="exp_avg, exp_avg_sq, max_exp_avg_sq; the config's AdamW keeps exp_avg, exp"
    ):
        matched_state(source(tensors, max_exp_avg_sq=tensors), wanted, lambda _: ADAMW)
    more = {**tensors, "mtp.weight": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"mtp.weight: checkpoint \(3,\), config without it"):
        matched_state(source(tensors, exp_avg=more), wanted, lambda _: ADAMW)


@pytest.mark.parametrize("states_too", [False, True])
def test_a_tensor_for_every_expert_becomes_the_stacked_one(states_too: bool) -> None:
    """transformers 5 stacks experts in memory, and writes folders of single ones; version 4 had single ones in both."""
    wanted = target(**MIXTRAL)
    tensors = drawn(wanted)
    single: dict[str, Tensor] = {}
    for group in groups_of_model(wanted.model, tensors):
        single |= group.convert(tensors, wanted.model)
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in single
    given = source(single) if states_too else source(single, exp_avg=tensors, exp_avg_sq=tensors)
    found = matched_state(given, wanted, lambda _: ADAMW)
    assert all(
        torch.equal(found[key].read(), tensors[name])
        for name in tensors
        for key in (f"weight/{name}", f"exp_avg/{name}", f"exp_avg_sq/{name}")
    )
    del single["model.layers.0.block_sparse_moe.experts.3.w2.weight"]
    with pytest.raises(CheckpointError, match="holds another model than the config's"):
        matched_state(source(single), wanted, lambda _: ADAMW)


def test_rotary_tables_that_old_versions_saved_are_passed_over() -> None:
    wanted = target()
    old = {**drawn(wanted), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert matched_state(source(old, exp_avg=drawn(wanted), exp_avg_sq=drawn(wanted)), wanted, lambda _: ADAMW)


def test_the_weights_of_a_second_model_of_accelerate_do_not_replace_the_first_ones(tmp_path: Path) -> None:
    for name, value in (("pytorch_model.bin", 1.0), ("pytorch_model_1.bin", 2.0)):
        torch.save({n: torch.full(shape, value) for n, shape in LAYERS.items()}, tmp_path / name)
    state = {n: {"step": torch.tensor(3.0), "exp_avg": torch.ones(shape)} for n, shape in LAYERS.items()}
    torch.save({"state": state, "param_groups": [{"params": [*LAYERS]}]}, tmp_path / "optimizer.bin")
    found = read_trainer(tmp_path, target())
    assert {float(tensor.read().mean()) for tensor in found.weights.values()} == {1.0}
    torch.save([state], tmp_path / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"optimizer.bin holds no state that a torch optimizer would load"):
        read_trainer(tmp_path, target())


def numbered(groups: list[list[str]], **fields: Any) -> dict[str, Any]:
    """An optimizer's state dict of such groups: the first moment of a parameter is its place in LAYERS."""
    names = [name for group in groups for name in group]
    place = {name: float(n) for n, name in enumerate(LAYERS)}
    state = {n: {"step": 3, "exp_avg": torch.full(LAYERS[name], place[name])} for n, name in enumerate(names)}
    numbers = iter(range(len(names)))
    return {"state": state, "param_groups": [{"params": [next(numbers) for _ in group], **fields} for group in groups]}


@pytest.mark.parametrize(
    "groups",
    [
        [[*LAYERS][5:], [*LAYERS][3:5], [*LAYERS][1:3], [*LAYERS][:1]],  # rates by layer, from the head down
        [[*LAYERS][1:], [*LAYERS][:1]],
        [[*LAYERS][3:], [*LAYERS][:3]],
    ],
)
def test_groups_that_no_rule_gives_are_refused_even_where_all_shapes_fit(groups: list[list[str]]) -> None:
    with pytest.raises(CheckpointError, match="matching states with parameters would be a guess"):
        states_of(numbered(groups), LAYERS, Path("optimizer.pt"))
    named = numbered(groups)
    for group, names in zip(named["param_groups"], groups, strict=True):
        group["param_names"] = [f"module.{name}" for name in names]
    found = states_of(named, LAYERS, Path("optimizer.pt"))
    assert [float(found.states["exp_avg"][name].read().mean()) for name in LAYERS] == [0, 1, 2, 3, 4, 5]
    assert found.members == groups


def test_a_full_state_of_fsdp_has_names_in_the_place_of_numbers() -> None:
    state = {name: {"step": torch.tensor(3.0), "exp_avg": torch.ones(shape)} for name, shape in LAYERS.items()}
    found = states_of({"state": state, "param_groups": [{"params": [*LAYERS]}]}, LAYERS, Path("optimizer.bin"))
    assert found.states["exp_avg"].keys() == LAYERS.keys()


def compared(groups: list[dict[str, Any]], members: list[list[str]], *, l2: bool = False) -> str:
    """The lines of a run with rate 1e-3 and weight decay 0.1 of its matrices."""
    given = replace(source({}), groups=groups, members=members)
    params = OptimizerParams(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    decays = {name: 0.1 if len(shape) > 1 else 0.0 for name, shape in LAYERS.items()}
    rates = compare_rates(given, params, lr=1e-3, parameters=[*LAYERS])
    return "\n".join([*rates, *compare_params(given, params, decays=decays, l2=l2)])


MATRICES, VECTORS = ([n for n, shape in LAYERS.items() if len(shape) == d] for d in (2, 1))
SPLIT = [MATRICES, VECTORS]


@pytest.mark.parametrize(
    ("groups", "members", "said"),
    [
        (
            [{"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-2, "weight_decay": 0.0}],
            SPLIT,
            "0.001 (embed.weight, layers.0.weight, layers.1.weight and 1 more), 0.01 (layers.0.norm.weight,"
            " layers.1.norm.weight) by its schedule; DIFFERENT",
        ),
        (
            [{"lr": 1e-3, "weight_decay": 0.0}, {"lr": 1e-3, "weight_decay": 0.1}],
            [["embed.weight", *VECTORS], MATRICES[1:]],
            "differs: weight decay of embed.weight: checkpoint 0.0, config 0.1",
        ),
        (
            [{"weight_decay": 0.1}],
            [],
            "weight decay of layers.0.norm.weight, layers.1.norm.weight: checkpoint 0.1, config 0;",
        ),
        ([{"weight_decay": 0.1, "decoupled_weight_decay": False}], [], "adds it to the gradient (L2)"),
        ([{"amsgrad": True}], [], "the checkpoint's optimizer has amsgrad True, and a run does not"),
        ([{"cautious": True}], [], "the checkpoint's optimizer has cautious True, and a run does not"),
        ([{"lr": None, "betas": None}], [], "learning rate: the checkpoint's is not readable"),
        ([{"weight_decay": "much"}], [], "weight decay: the checkpoint's is not readable"),
        ([{"betas": None}], [], "optimizer.params.betas: checkpoint not readable, config (0.9, 0.999)"),
    ],
)
def test_what_an_optimizer_does_otherwise_is_said(
    groups: list[dict[str, Any]], members: list[list[str]], said: str
) -> None:
    assert said in compared(groups, members)


def test_an_optimizer_like_the_runs_says_its_rate_alone() -> None:
    common = {
        **dict.fromkeys(("amsgrad", "maximize", "foreach"), False),
        "lr": torch.tensor(1e-3),
        "betas": [0.9, 0.999],
    }
    groups = [{**common, "weight_decay": 0.1}, {**common, "weight_decay": 0.0}, {**common, "lr": 5.0}]
    assert compared(groups, [*SPLIT, []]) == "learning rate of step 4: 0.001 by the config, 0.001 by its schedule"
    assert "\n" not in compared([{"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-3, "weight_decay": 0.0}], [])


def test_deepspeeds_own_adam_is_known_by_its_config() -> None:
    section = {"type": "Adam", "params": {"adam_w_mode": False}}
    [group] = with_adam_mode([{"lr": 1}], {"ds_config": {"optimizer": section}})
    assert group["decoupled_weight_decay"] is False


def saved_dcp(folder: Path, **more: Any) -> Path:
    """A checkpoint of a model and its optimizer, with other entries beside them."""
    weights = {name: torch.ones(shape) for name, shape in LAYERS.items()}
    state = {name: {"step": torch.tensor(4.0), "exp_avg": tensor} for name, tensor in weights.items()}
    optimizer = {"state": state, "param_groups": [{"params": [*LAYERS], "lr": 1e-3}]}
    dcp.save({"model": weights, "optimizer": optimizer, **more}, checkpoint_id=folder)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_by_number_in_a_dcp_keep_their_numbers_as_names_which_no_model_has(tmp_path: Path) -> None:
    by_number = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0], "lr": torch.tensor(1e-3)}]}
    found = read_dcp(saved_dcp(tmp_path / "there", optimizer=by_number), target())
    assert found.members == [[*found.states["exp_avg"]]] == [["0"]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("more", "step"),
    [
        ({"step": 4, "dataloader": {"step": 16}, "meta": {"iteration": 900}}, 4),
        ({"dataloader": {"step": 16, "state": {"worker": {"step": 16}}}}, 4),
        ({"train_state": {"step": torch.tensor(4)}}, 4),
        (
            {"step": 4, "iteration": 900},
            "does not tell one step (step: 4, iteration: 900, the optimizer's step counter: 4)",
        ),
        ({"step": 16}, "does not tell one step (step: 16, the optimizer's step counter: 4)"),
    ],
)
def test_the_step_is_what_known_paths_tell(tmp_path: Path, more: dict[str, Any], step: int | str) -> None:
    found = read_dcp(saved_dcp(tmp_path / "there", **more), target())
    assert found.members == [[*LAYERS]]
    if isinstance(step, int):
        assert _with_step(found, None).step == step
    else:
        with pytest.raises(CheckpointError) as error:
            _with_step(found, None)
        assert step in str(error.value)
    assert _with_step(found, 7).step == 7


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_weight_is_named_and_two_models_are_not_mixed(tmp_path: Path) -> None:
    ema = {name: torch.zeros(shape) for name, shape in LAYERS.items()}
    more = {"ema": ema, "teacher": ema, "rng_state": torch.get_rng_state(), "step": 4}
    found = read_dcp(saved_dcp(tmp_path / "there", **more), target())
    assert found.weights.keys() == LAYERS.keys()
    assert {*found.left_out} == {"ema", "rng_state", "teacher (6 tensors)"}
    assert float(found.weights["embed.weight"].read().mean()) == 1
    with pytest.raises(CheckpointError, match=r"holds two tensors named embed.weight"):
        read_dcp(saved_dcp(tmp_path / "two", module=ema), target())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_backup_beside_a_step_is_passed_over(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-10-backup"):
        saved_dcp(tmp_path / "run" / name)
    assert read_dcp(tmp_path / "run", target()).path.name == "step-10"
    (tmp_path / "run/step-10-backup").rename(tmp_path / "step-backup")
    with pytest.raises(CheckpointError, match=r"no folder is named step-N: step-backup\n  try: one of these"):
        read_dcp(tmp_path, target())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/hostname"])
def test_no_file_outside_the_folder_is_opened(tmp_path: Path, name: str) -> None:
    folder = saved_dcp(tmp_path / "there")
    metadata = pickle.loads((folder / TORCH_METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / TORCH_METADATA).write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").rename(tmp_path / "outside.distcp")
    with pytest.raises(CheckpointError, match="which is not in the folder: refused"):
        DcpFolder.open(folder)
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError, match=f"latest names {name}, which is not in the folder: refused"):
        newest_tag(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(name)
    with pytest.raises(CheckpointError, match=f"txt names {name}, which is not in the folder: refused"):
        read_megatron(tmp_path, target())
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"x": "{name}"}}}}')
    with pytest.raises(DataError, match=f"json names {name}, which is not in the folder: refused"):
        stored_tensors(tmp_path)


def test_a_file_in_the_place_of_its_folder_is_told_from_it(tmp_path: Path) -> None:
    file = tmp_path / "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    file.parent.mkdir()
    file.touch()
    with pytest.raises(
        CheckpointError, match=f"is a file; it is .*DeepSpeed.*\n  try: headrace import {file.parent} RUN"
    ):
        check_known(file)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=f"is a file\n  try: its folder, {tmp_path}, if that is a checkpoint"):
        check_known(tmp_path / "notes.txt")


class Attribute:
    """Is pickled as an attribute of an object."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self._owner, self._name)


def test_a_stage_of_deepspeed_is_read_in_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "optim_states.pt"
    for stage in (ZeroStageEnum.gradients, Attribute(ZeroStageEnum, "gradients")):
        torch.save({"zero_stage": stage}, path)
        assert int(open_saved(path)["zero_stage"]) == 2


def test_no_other_attribute_is_read_of_a_file_of_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "optim_states.pt"
    for name in ("__subclasses__", "mro", "no_member"):
        torch.save({"zero_stage": Attribute(ZeroStageEnum, name)}, path)
        with pytest.raises(CheckpointError, match=r"is damaged, or no file of torch\.save"):
            open_saved(path)


def test_metadata_of_torch_is_read_in_both_ways_and_no_other_attribute(tmp_path: Path) -> None:
    path = tmp_path / TORCH_METADATA
    for format_ in (
        _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
        Attribute(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT"),
    ):
        path.write_bytes(pickle.dumps(format_))
        assert isinstance(_metadata(tmp_path), _MEM_FORMAT_ENCODING)
    for owner, name in ((_MEM_FORMAT_ENCODING, "mro"), (TensorProperties, "create_from_tensor")):
        path.write_bytes(pickle.dumps(Attribute(owner, name)))
        with pytest.raises(CheckpointError, match=f"attribute '{name}' of .*, which is no member of an enum"):
            _metadata(tmp_path)
