"""Mixed bits: the choice is the best one within the bytes, what was written is within them, and beats one scheme."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from foundation.section import parse
from pipeline.compress.quantization.assignment import LayerScheme, unit_of
from pipeline.compress.quantization.budget import UNCHANGED, Budget, QuantizedUnit
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.mixed import choose
from pipeline.compress.quantization.rules import prepare
from pipeline.compress.quantization.sensitivity import changed, measure_units, rounded
from pipeline.models.folder.loading import load_model
from pipeline.models.folder.model_folder import ModelFolder
from tests.compress.quantization.test_quantize import Made, quantize, write_config
from tests.compress.quantization.test_refusals import refusal
from tests.evaluation.heldout.small import VOCAB
from tests.models.architectures import config_of

CHOICES = ("W4A16", "W8A8", UNCHANGED)


def random_budget(seed: int, *, units: int) -> tuple[Budget, dict[str, dict[str, float]]]:
    """Sizes that grow and KL divergences that fall with the bits; a limit between the smallest and the largest size."""
    draw = random.Random(seed)
    found: dict[str, QuantizedUnit] = {}
    measured: dict[str, dict[str, float]] = {}
    for number in range(units):
        weights = draw.randrange(1_000, 50_000)
        name = f"layer.{number}"
        found[name] = QuantizedUnit((name,), {"W4A16": weights // 2, "W8A8": weights, UNCHANGED: 2 * weights})
        worst = 10 ** draw.uniform(-5, -1)
        measured[name] = {"W4A16": worst, "W8A8": worst * draw.uniform(0.001, 0.5)}
    smallest = sum(unit.bytes["W4A16"] for unit in found.values())
    return Budget(1_000 + int(smallest * draw.uniform(1.05, 3)), 1_000, found), measured


def total_kl(chosen: dict[str, str], measured: dict[str, dict[str, float]]) -> float:
    return sum({UNCHANGED: 0.0, **measured[name]}[choice] for name, choice in chosen.items())


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all_within_the_budget(seed: int) -> None:
    budget, measured = random_budget(seed, units=6)
    chosen = choose(budget, measured)
    assert budget.total(chosen) <= budget.limit
    every = (dict(zip(budget.units, each, strict=True)) for each in itertools.product(CHOICES, repeat=6))
    best = min(total_kl(each, measured) for each in every if budget.total(each) <= budget.limit)
    # buckets are 1/8192 of the bytes to give away, of which six units waste less than a thousandth
    assert total_kl(chosen, measured) == pytest.approx(best, rel=0.01)


def test_more_units_than_the_buckets_can_tell_apart_still_meet_the_budget() -> None:
    budget, measured = random_budget(0, units=400)
    chosen = choose(budget, measured)
    assert budget.total(chosen) <= budget.limit
    spread = [name for name in budget.units if measured[name]["W4A16"] > 0.05]
    assert all(chosen[name] != "W4A16" for name in spread)  # the most sensitive are never at the fewest bits


def test_layers_that_vllm_fuses_are_one_unit() -> None:
    layer = "model.layers.3"
    assert {unit_of(f"{layer}.self_attn.{each}_proj") for each in "qkv"} == {f"{layer}.self_attn.qkv_proj"}
    assert {unit_of(f"{layer}.mlp.{each}_proj") for each in ("gate", "up")} == {f"{layer}.mlp.gate_up_proj"}
    assert unit_of(f"{layer}.mlp.experts.7.down_proj") == f"{layer}.mlp.experts"
    assert unit_of(f"{layer}.self_attn.o_proj") == f"{layer}.self_attn.o_proj"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scheme": "mixed"}, "needs a budget"),
        ({"scheme": "W4A16", "budget": {"bytes": 10**6}}, "gives every layer the same"),
        ({"scheme": "mixed", "budget": {}}, "give one of them"),
        ({"scheme": "mixed", "budget": {"bytes": 1000}}, "the smallest choice of every layer takes"),
        ({"scheme": "mixed", "budget": {"bits_per_weight": 2.0}}, "budget.bits_per_weight = 2.0"),
        ({"scheme": "mixed", "budget": {"bytes": 10**9}}, "the model as it is takes"),
        ({"scheme": "mixed", "budget": {"bytes": 10**6, "candidates": ["W4A16", "Q8_0"]}}, "types of GGUF files"),
        ({"scheme": "mixed", "budget": {"bytes": 10**6, "candidates": ["FP8", "FP8"]}}, "given twice"),
        ({"scheme": "mixed", "budget": {"bits_per_weight": 20}, "calibration": {"split": "nowhere"}}, "nowhere"),
        ({"scheme": "mixed", "group_size": 16, "budget": {"bytes": 10**6}}, "group sizes of their own"),
        ({"scheme": "W4A16", "head": "W8A8"}, '"untie": true'),
        ({"scheme": "W4A16", "untie": True}, "lm_head is in skip"),
    ],
)
def test_what_cannot_be_met_is_refused(
    model: Path, tokens: Path, tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(tmp_path, model, tokens, **fields)


def test_the_least_budget_that_a_refusal_names_is_accepted(model: Path, tokens: Path, tmp_path: Path) -> None:
    said = refusal(tmp_path, model, tokens, scheme="mixed", budget={"bytes": 1000}, dtype="bfloat16")
    least = int(said.partition("try: use ")[2].partition(" or more")[0].replace(",", ""))
    config = {"scheme": "mixed", "dtype": "bfloat16", "consumers": ["none"]}
    # refused for the consumer, which is checked after the budget
    assert "no such consumer" in refusal(tmp_path, model, tokens, budget={"bytes": least}, **config)
    assert "takes" in refusal(tmp_path, model, tokens, budget={"bytes": least - 1}, **config)


def test_a_layer_that_is_measured_is_as_it_was_afterwards(model: Path) -> None:
    loaded = load_model(model, dtype=torch.float32)
    layer = loaded.model.layers[0].mlp.up_proj
    before, ids = layer.weight.clone(), torch.arange(12)[None]
    logits = loaded(input_ids=ids).logits
    with changed([layer], "W8A8", torch.float32):
        assert torch.equal(layer.weight, rounded(before, "W8A8", torch.float32))
        assert not torch.equal(loaded(input_ids=ids).logits, logits)
    assert torch.equal(loaded(input_ids=ids).logits, logits)


def test_fewer_bits_cost_more_and_every_unit_is_measured(model: Path) -> None:
    loaded = load_model(model, dtype=torch.float32)
    sizes = dict.fromkeys(("W4A16", "W8A8", "Q4_0", "Q8_0", UNCHANGED), 1)
    names = [f"model.layers.{n}.mlp.{each}_proj" for n in range(2) for each in ("up", "down")]
    budget = Budget(1, 0, {name: QuantizedUnit((name,), sizes) for name in names})
    found = measure_units(loaded, budget, [torch.arange(60).reshape(2, 30)], dtype=torch.float32)
    assert set(found) == set(names)
    for kl in found.values():
        assert 0 < kl["W8A8"] < kl["W4A16"]
        assert 0 < kl["Q8_0"] < kl["Q4_0"]
    one, ids = Budget(1, 0, {names[0]: QuantizedUnit((names[0],), {"Q4_0": 1})}), torch.arange(90).reshape(3, 30)
    whole, parts = (
        measure_units(loaded, one, each, dtype=torch.float32)[names[0]] for each in ([ids], [ids[:2], ids[2:]])
    )
    assert parts["Q4_0"] == pytest.approx(whole["Q4_0"], rel=1e-3)


def test_gpt2_by_its_hub_names_is_measured_and_what_no_block_divides_is_no_choice(tokens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    fields = {"vocab_size": VOCAB, "n_inner": 48, "bos_token_id": 0, "eos_token_id": 0}
    AutoModelForCausalLM.from_config(config_of("gpt2", **fields)).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokens / "tokenizer").save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    short = {name.removeprefix("transformer."): value for name, value in stored.items()}
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    budget = {"candidates": ["Q4_0", "Q8_0"], "bits_per_weight": 14}
    raw = json.loads(write_config(tmp_path, folder, tokens, scheme="mixed", budget=budget, consumers=[]).read_text())
    plan = prepare(parse(QuantizeConfig, raw)).budget
    assert "blk.0.attn_qkv.weight" in plan.units
    assert "blk.0.ffn_down.weight" not in plan.units  # rows of 48
    ids = torch.arange(1, 17).view(1, -1)
    found = measure_units(load_model(folder, dtype=torch.float32), plan, [ids], dtype=torch.float32)
    assert found.keys() == plan.units.keys()
    assert plan.total(choose(plan, found)) <= plan.limit


def test_bytes_of_a_layer_are_those_of_the_file() -> None:
    assert LayerScheme("W4A16", 32).stored_bytes((8, 64), scale_bytes=2) == 8 * 32 + 8 * 2 * 2 + 16
    assert LayerScheme("W8A16", None).stored_bytes((8, 64), scale_bytes=4) == 8 * 64 + 8 * 4 + 16
    assert LayerScheme("W8A8", None).stored_bytes((8, 64), scale_bytes=2) == 8 * 64 + 8 * 2


def uniform_and_mixed(folder: Path, model: Path, tokens: Path, budget: dict[str, Any], **uniform: Any) -> list[Made]:
    """One scheme for all, and the choice within its bytes."""
    made = []
    for name in ("uniform", "mixed"):
        (folder / name).mkdir()
        fields = uniform if name == "uniform" else {"scheme": "mixed", "skip": [], "dtype": "bfloat16"}
        if name == "mixed":
            fields |= {"budget": budget | {"bytes": made[0].manifest.details["weight_bytes"]}}
        made.append(quantize(folder / name, model, tokens, **{**fields, "consumers": uniform["consumers"]}))
    return made


@pytest.mark.integration
def test_within_the_bytes_of_one_scheme_the_mix_is_better(untied: Path, tokens: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"scheme": "W4A16", "dtype": "bfloat16", "consumers": ["transformers"]}
    uniform, mixed = uniform_and_mixed(tmp_path, untied, tokens, {}, **fields)
    details = mixed.manifest.details
    assert details["weight_bytes"] <= uniform.manifest.details["weight_bytes"]
    assert details["weight_bytes"] <= details["mixed"]["planned_bytes"] <= details["mixed"]["budget_bytes"]
    kl = [each.manifest.details["consumers"]["transformers"]["mean_kl"] for each in (uniform, mixed)]
    assert kl[1] < 0.5 * kl[0]
    assert len(ModelFolder.open(mixed.path).config["quantization_config"]["config_groups"]) <= 2
    assert "chosen within the budget" in mixed.stdout


@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.integration
def test_a_gguf_file_of_mixed_types_is_within_its_bytes(untied: Path, tokens: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"scheme": "Q4_0", "consumers": ["llama.cpp"]}
    budget = {"candidates": ["Q4_0", "Q8_0"], "bits_per_weight": 7.0}
    (tmp_path / "mixed").mkdir()
    made = quantize(tmp_path / "mixed", untied, tokens, **fields | {"scheme": "mixed", "budget": budget})
    details = made.manifest.details
    assert details["weight_bytes"] <= details["mixed"]["planned_bytes"] <= details["mixed"]["budget_bytes"]
    assert {row["choice"] for row in details["mixed"]["units"]} == {"Q4_0", "Q8_0"}
    worst = {row["unit"]: max(row["kl"].values()) for row in details["mixed"]["units"]}
    assert {row["layer"]: row["kl"] for row in details["sensitivity"]} == worst
