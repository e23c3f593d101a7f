"""Importance is that of the tokens, not of the layout: the same sums from one process and from two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundation.section import parse
from pipeline.compress.pruning.config import PruneConfig
from pipeline.compress.pruning.importance import Sums, Windows, gather
from pipeline.compress.pruning.rules import PruningPlan, prepare
from pipeline.compress.pruning.run import unseen_line
from pipeline.compress.pruning.selection import Kept, residual_scores, select, top, unseen_experts
from pipeline.compress.pruning.stored_sums import fingerprint, load_sums
from pipeline.data.micro_batch import MicroBatch, make_batch
from pipeline.models.decoder_layers import decoder_layers
from pipeline.models.folder.loading import load_model
from tests import warm
from tests.compress.pruning import models
from tests.compress.pruning.conftest import plan_of, raw_config, write_config
from tests.evaluation.heldout.small import SEQUENCE, VOCAB
from tests.support import output_of

CPU = torch.device("cpu")
GATHER = """
import sys
from foundation.configfile import load
from foundation.section import parse
from pipeline.runtime.launch import detect
from pipeline.compress.pruning.config import PruneConfig
from pipeline.compress.pruning.rules import prepare
from pipeline.compress.pruning.gathering import find_importance
launch = detect()
find_importance(prepare(parse(PruneConfig, load(sys.argv[1], [])), world_size=launch.world_size), launch)
"""
SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    "gemma2": {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 1, "num_hidden_layers": 2},
    "gemma": {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 1, "num_hidden_layers": 2},
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 1, "num_hidden_layers": 2},
    "qwen3_moe": {"hidden_size": 16, "moe_intermediate_size": 24, "num_key_value_heads": 1, "num_experts": 2},
}


SHAPES["qwen3_moe_mixed"] = {**SHAPES["qwen3_moe"], "intermediate_size": 24, "num_hidden_layers": 2}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2": (2, {}),
    "tp 2": (2, {"tp": 2}),
    "pp 2": (2, {"pp": 2}),
    "cp 2": (2, {"cp": 2}),
    "cp 2, ring": (2, {"cp": 2, "cp_method": "ring"}),
    "FSDP2": (2, {"zero_stage": 3}),
    "ZeRO-3": (2, {"zero_stage": 3, "engine": "deepspeed"}),
    "deepspeed, pp 2": (2, {"pp": 2, "engine": "deepspeed"}),
    "deepspeed, tp 2": (2, {"tp": 2, "engine": "deepspeed"}),
    "tp 2, dp 2": (4, {"tp": 2}),
    "pp 2, FSDP2": (4, {"pp": 2, "zero_stage": 3}),
    "pp 2, tp 2": (4, {"pp": 2, "tp": 2}),
    "cp 2, ZeRO-3": (4, {"cp": 2, "zero_stage": 3, "engine": "deepspeed"}),
}
"""Name -> processes, and fields of `importance`."""


def found_in(
    folder: Path, source: Path, tokens: Path, layout: tuple[int, dict[str, Any]], **more: Any
) -> tuple[PruningPlan, Sums]:
    """The sums that a layout's processes find, and a plan of one process, which has to take them."""
    processes, section = layout
    fields: dict[str, Any] = {"target": {"shape": SHAPES[source.name]}, "calibration": {"samples": 17}, **more}
    folder.mkdir()
    config = write_config(folder, source, tokens, importance={"depth": "loss", **section}, **fields)
    output_of(warm.run("-c", GATHER, config, processes=processes))
    # the sums do not depend on the layout, nor does what they are kept by
    plan = plan_of(folder, source, tokens, importance={"depth": "loss"}, **fields)
    sums = load_sums(plan, fingerprint(plan))
    assert sums is not None
    return plan, sums


@pytest.fixture(scope="module")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Architecture -> its folder, and what one process finds."""
    made: dict[str, tuple[Path, PruningPlan, Sums]] = {}

    def of(name: str) -> tuple[Path, PruningPlan, Sums]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            source = models.make(folder / name, name, tokens, dead=False)
            made[name] = (source, *found_in(folder / "alone", source, tokens, (1, {})))
        return made[name]

    return of


WITHOUT_PLANS = ("gpt2", "gemma2")
"""Transformers has no plan of GPT-2: its stages and shards are derived."""
SOME = ("pp 2", "cp 2, ring", "ZeRO-3", "tp 2, dp 2")
CELLS = [
    *((name, layout) for name in ("llama", "qwen3_moe") for layout in LAYOUTS),
    *((name, layout) for name in ("gemma", "qwen3_moe_mixed") for layout in SOME),
    *((name, layout) for name in WITHOUT_PLANS for layout in ("dp 2", "FSDP2", "ZeRO-3")),
    *(("gpt2", "cp 2"), ("gpt2", "pp 2"), ("gemma2", "pp 2"), ("gemma2", "cp 2, ring")),
]
IN_CI = {
    ("llama", "cp 2, ring"),
    ("llama", "deepspeed, pp 2"),
    ("llama", "tp 2, dp 2"),
    ("llama", "pp 2, FSDP2"),
    ("qwen3_moe", "tp 2"),
    ("qwen3_moe", "ZeRO-3"),
    ("qwen3_moe", "deepspeed, tp 2"),
    ("qwen3_moe_mixed", "pp 2"),
    ("gemma", "cp 2, ring"),
    ("gemma2", "dp 2"),
    ("gpt2", "cp 2"),
    ("gpt2", "FSDP2"),
}
"""Every architecture, and every layout of two ranks; the others run with `make sweep-tests`."""


def cells() -> list[Any]:
    return [
        pytest.param(name, layout, id=f"{name}: {layout}", marks=[] if (name, layout) in IN_CI else pytest.mark.sweep)
        for name, layout in CELLS
    ]


@pytest.mark.integration
@pytest.mark.parametrize(("name", "layout"), cells())
def test_every_layout_chooses_equal_channels(alone: Any, tokens: Path, tmp_path: Path, name: str, layout: str) -> None:
    source, plan, one = alone(name)
    raw = raw_config(tmp_path, source, tokens, target={"shape": SHAPES[name]}, importance=LAYOUTS[layout][1])
    shared = prepare(parse(PruneConfig, raw), world_size=LAYOUTS[layout][0]).layout
    assert (shared is None) == (layout == "dp 2")
    assert one["tokens"].item() == 17 * 32
    other, sums = found_in(tmp_path / "work", source, tokens, LAYOUTS[layout])
    _assert_same(one, sums)
    assert _chosen(plan, one) == _chosen(other, sums)


@pytest.mark.parametrize(
    "layout", ["cp 2, ring", *(pytest.param(each, marks=pytest.mark.sweep) for each in ("cp 2", "tp 2, dp 2"))]
)
def test_layouts_agree_where_attention_stays_within_documents(tokens: Path, tmp_path: Path, layout: str) -> None:
    source = models.make(tmp_path / "llama", "llama", tokens, dead=False)
    data = {"path": str(tokens), "sequence_length": SEQUENCE, "batch_size": 8, "mask_documents": True}
    _, one = found_in(tmp_path / "alone", source, tokens, (1, {}), data=data)
    _, sums = found_in(tmp_path / "shared", source, tokens, LAYOUTS[layout], data=data)
    _assert_same(one, sums)


MEASURED = """
import sys
import pipeline.compress.pruning.gathering as latency
from foundation.cli import guarded
from foundation.configfile import load
from foundation.section import parse
from pipeline.runtime.launch import detect
from pipeline.compress.pruning.config import PruneConfig
from pipeline.compress.pruning.gathering import find_importance
from pipeline.compress.pruning.rules import prepare
latency.measure_ratio = lambda plan, shape: plan.anatomy.parameters(shape) / plan.anatomy.parameters({})
launch = detect()

def main():
    found = find_importance(prepare(parse(PruneConfig, load(sys.argv[1], [])), world_size=launch.world_size), launch)
    print("rank", launch.rank, "at", round(found.latency, 3), sorted(found.plan.shape.items()))

sys.exit(guarded(main))
"""


def test_the_shape_that_rank_0_measures_and_its_refusal_are_those_of_all_ranks(tokens: Path, tmp_path: Path) -> None:
    source = models.make(tmp_path / "model", "llama", tokens, dead=False)
    config = write_config(tmp_path, source, tokens, target={"latency": 0.6})
    said = output_of(warm.run("-c", MEASURED, config, processes=2, merged=True))
    found = {line[7:] for line in said.splitlines() if line.startswith("rank ")}
    assert len(found) == 1, found  # the same of both
    assert said.count("measuring forward passes") == 1
    config = write_config(tmp_path, source, tokens, target={"latency": 0.01})
    done = warm.run("-c", MEASURED, config, processes=2, merged=True)
    assert done.returncode == 2
    for start in ("error: target.latency = 0.01", "error (rank 1): target.latency = 0.01"):
        assert start in done.stdout


def _assert_same(one: Sums, two: Sums) -> None:
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert value.dtype == torch.float64
        # activations are fp32, and products of other shapes round otherwise; their sums are fp64
        torch.testing.assert_close(two[key], value, rtol=2e-5, atol=1e-5 * float(value.abs().max()), msg=key)


def _chosen(plan: PruningPlan, sums: Sums) -> Any:
    kept = select(sums, plan.anatomy, plan.shape, metric="mean_abs", depth="loss")
    return kept.summary(), {place: each.tolist() for place, each in kept.ffn.items()}


def batches(count: int = 2) -> list[MicroBatch]:
    generator = np.random.default_rng(3)
    return [make_batch(generator.integers(0, VOCAB, (2, 17)), None) for _ in range(count)]


def windows() -> list[Windows]:
    return [Windows(batch, len(batch.input_ids)) for batch in batches()]


def gathered(name: str, **how: Any) -> tuple[Any, Sums]:
    model = models.build(name, dead=False)
    return model, gather(model, windows(), device=CPU, **how)


def test_the_sums_are_those_of_the_activations() -> None:
    model, sums = gathered("llama")
    seen: list[torch.Tensor] = []
    handle = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _m, given: seen.append(given[0]))
    with torch.no_grad():
        hidden = [model(batch.input_ids, output_hidden_states=True).hidden_states for batch in batches()]
    handle.remove()
    rows = torch.cat([each.flatten(0, 1) for each in seen]).double()
    assert sums["tokens"].item() == len(rows)
    torch.testing.assert_close(sums["layers.1.ffn.abs"], rows.abs().sum(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(sums["layers.1.ffn.square"], rows.square().sum(0), rtol=1e-6, atol=0)
    before, after = (torch.cat([each[n].flatten(0, 1) for each in hidden]).double() for n in (1, 2))
    influence = (1 - torch.cosine_similarity(before, after, dim=-1)).sum()
    assert sums["layers.1.influence"].item() == pytest.approx(influence.item(), rel=1e-6)
    assert sums["model.layers.1.input_layernorm.in.square"].tolist() == pytest.approx(before.square().sum(0).tolist())


def test_the_loss_without_a_layer_is_that_of_the_model_without_it() -> None:
    model, sums = gathered("llama", depth_loss=True)
    assert len(decoder_layers(model)) == models.LAYERS
    del model.model.layers[1]
    with torch.no_grad():
        logits = [(model(batch.input_ids, use_cache=False).logits, batch.labels) for batch in batches()]
    loss = sum(torch.nn.functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") for x, y in logits)
    assert sums["layers.1.without"].item() == pytest.approx(float(loss), rel=1e-5)


def test_experts_are_measured_on_the_tokens_they_get() -> None:
    model, sums = gathered("qwen3_moe")
    tokens, chosen = sums["layers.0.experts.tokens"], model.config.num_experts_per_tok
    assert tokens.sum().item() == sums["tokens"].item() * chosen
    assert sums["layers.0.experts.mass"].sum().item() == pytest.approx(sums["tokens"].item())  # weights that sum to 1
    for expert, count in enumerate(tokens.tolist()):
        assert (sums["layers.0.experts.ffn.abs"][expert].sum() > 0) == (count > 0)


def test_no_norm_counts_more_than_another_for_a_residual_channel() -> None:
    sums = {"a.out.abs": torch.tensor([1.0, 3.0]).double(), "b.out.abs": torch.tensor([300.0, 100.0]).double()}
    assert residual_scores(sums, "abs").tolist() == [2.0, 2.0]


def test_of_equal_scores_the_first_are_kept() -> None:
    assert top(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 3).tolist() == [0, 1, 3]


def test_a_second_start_takes_the_sums_of_the_first_if_they_are_still_valid(tokens: Path, tmp_path: Path) -> None:
    source = models.make(tmp_path / "model", "llama", tokens, dead=False)
    config = write_config(tmp_path, source, tokens, target={"shape": {"hidden_size": 16}})
    warm.run("-c", GATHER, config).check_returncode()
    plan = plan_of(tmp_path, source, tokens, target={"shape": {"intermediate_size": 16}})
    assert load_sums(plan, fingerprint(plan)) is not None  # another target needs no other sums
    other = plan_of(tmp_path, source, tokens, target={"shape": {"hidden_size": 16}}, calibration={"samples": 8})
    assert load_sums(other, fingerprint(other)) is None
    model = load_model(source)
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(source)
    changed = plan_of(tmp_path, source, tokens, target={"shape": {"hidden_size": 16}})
    assert load_sums(changed, fingerprint(changed)) is None


def test_an_expert_that_got_no_token_is_told_of_where_its_channels_are_cut() -> None:
    layers, none = torch.arange(2), torch.zeros(1, dtype=torch.int64)
    sums = {f"layers.{n}.experts.tokens": torch.tensor([3.0, 0.0, 0.0]).double() for n in range(3)}
    ffn = {(n, expert): none for n in range(3) for expert in range(3)}
    kept = Kept(None, layers, {}, {0: torch.tensor([0, 1])}, ffn)
    assert unseen_experts(sums, kept) == [(0, 1), (1, 1), (1, 2)]
    line = unseen_line(unseen_experts(sums, kept), shown=2)
    assert line.startswith("warning: expert 1 of layer 0, expert 1 of layer 1 and 1 more got no token")
