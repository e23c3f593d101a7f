"""`python -m pipeline prove`: equivalent layouts are proven, other runs are refuted, illegal configs are refused."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import HeadraceError
from foundation.section import parse
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config, ModelSection
from pipeline.config.topology import Topology
from pipeline.engines.deepspeed import operators
from pipeline.engines.parametrization.scales import find_parametrization
from pipeline.plan.proof import worker
from pipeline.plan.proof.case import Case, CaseResult
from pipeline.plan.proof.command import on_fewest_processes, raise_refusal
from pipeline.plan.proof.compare import first_gradient, relative_differences
from pipeline.plan.proof.equivalence import check_equivalence, with_noise
from pipeline.plan.proof.shrunk_run import shrink_run
from pipeline.plan.proof.tokens import write_tokens
from tests import warm
from tests.conftest import tiny_config, write_config
from tests.engines.comparison import EXPERTS
from tests.engines.parametrization.models import meta_of
from tests.parity.choice import read_pairs
from tests.parity.matrix import LONG, SEQUENCE, VOCABULARY, reference_of
from tests.parity.run import launch
from tests.support import output_of, refusal_of
from tests.sweeps.families import OVERRIDES

Runs = dict[str, tuple[Case, CaseResult]]


def prove(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "pipeline", "prove", *arguments)


@pytest.mark.integration
def test_a_layout_is_proven_without_its_data_in_fp32_and_its_own_precision(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", bf16={"enabled": True}, engine="torch")
    path = write_config(tmp_path / "c.json", config)
    said = output_of(prove("--config", str(path), "--steps", "6", "--gradients"))
    assert "torch; FSDP2" in said
    assert "dp 2, 6 steps in fp32 and bf16" in said
    assert "model.layers.1.mlp.down_proj.weight" in said
    assert "proven in" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
def test_both_sides_of_a_border_are_proven_in_their_own_layouts(tmp_path: Path) -> None:
    rope = {"config": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}}
    long = {"name": "long", "data": {"sequence_length": 64}, "model": rope, "parallel": {"tp": 2}}
    stages = [{"name": "stable", "until": {"steps": 5}}, {"name": "more", "until": {"steps": 9}}, long]
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", engine="torch", scheduler=None, stages=stages)
    said = output_of(prove("--config", str(write_config(tmp_path / "c.json", config)), "--steps", "4"))
    stable, more, long_said = said.partition("stage 'stable'")[2].partition("stage 'more'")[2].partition("stage 'long'")
    assert "is shrunk to the same run as an earlier stage" in stable
    assert more == "stage 'long'"
    assert "tp 2, 4 steps in fp32" in long_said
    assert "yarn" not in said or "not reached" not in long_said
    assert said.count("gradient") >= 2
    assert "proven in" in said


def test_an_illegal_layout_is_refused_before_anything_runs(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", parallel={"pp": 2})
    said = refusal_of(prove("--config", str(write_config(tmp_path / "c.json", config))))
    assert "use engine torch, or zero_optimization.stage 1" in said


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        ({"model_type": "gpt2"}, {}),  # dropout, which no rule of the config knows
        ({"model_type": "doge"}, {"engine": "torch", "parallel": {"cp": 2}}),
        ({"model_type": "llama"}, {"moe": {"balance": "bias"}}),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_local_experts": 4}, {}),
    ],
)
def test_what_check_refuses_of_an_architecture_is_refused_and_not_refuted(
    tokens: Path, tmp_path: Path, model: dict[str, Any], sections: dict[str, Any]
) -> None:
    config = tiny_config(tokens, tmp_path / "run", model={"config": model}, **sections)
    path = str(write_config(tmp_path / "c.json", config))
    checked = refusal_of(warm.run("-m", "pipeline", "check", "--config", path, "--processes", "4"))
    assert "  why: " in checked
    assert refusal_of(prove("--config", path, "--processes", "4")) == checked


def test_a_refusal_of_the_ranks_is_refused_and_not_refuted(runs: Runs) -> None:
    case, result = runs["failing"]
    with pytest.raises(
        HeadraceError, match=r"(?s)model\.config = .*why: .*try: .*in the shrunk run failing"
    ) as refused:
        raise_refusal(case, result)
    assert refused.value.exit_code == 2
    raise_refusal(*runs["plain"])


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_secondary_shards_bf16_reduction_compiled_layers_and_experts_are_proven(tmp_path: Path, engine: str) -> None:
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", engine=engine, bf16={"enabled": True})
    config["model"]["config"] |= EXPERTS
    config["moe"] = {"balance": "aux_loss", "aux_loss_coef": 0.05}
    config["compile"] = {"enabled": True}
    config["communication_data_type"] = "bf16"
    config["zero_optimization"] = {"stage": 3, "zero_hpz_partition_size": 2}
    said = output_of(prove("--config", str(write_config(tmp_path / "c.json", config)), "--steps", "4"))
    assert "dp 4, 4 steps in fp32 and bf16" in said
    assert "proven as they are traced (aot_eager)" in said


def test_what_a_shrunk_run_keeps_and_what_its_reference_does_without(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", engine="torch", bf16={"enabled": True})
    config["model"]["config"] |= EXPERTS
    config |= {
        "moe": {"balance": "aux_loss", "aux_loss_coef": 0.05},
        "compile": {"enabled": True, "mode": "max-autotune-no-cudagraphs"},
        "communication_data_type": "bf16",
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4},
        "train_batch_size": 16,
    }
    small = shrink_run(resolve(parse(Config, config), world_size=8), steps=4, work=tmp_path)
    assert small.topology.dp == 4
    layout = small.layout("a", precision="bf16", tokens=tmp_path).config
    assert layout["zero_optimization"] == {"stage": 3, "zero_hpz_partition_size": 2}
    assert layout["communication_data_type"] == "bf16"
    assert layout["compile"] == {"enabled": True, "backend": "aot_eager"}
    assert layout["moe"]["balance"] == "aux_loss"
    assert "communication_data_type" not in small.layout("a", precision="fp32", tokens=tmp_path).config
    reference = small.reference("a", precision="bf16", tokens=tmp_path).config
    assert reference["moe"] == layout["moe"]
    assert reference.keys().isdisjoint({"compile", "communication_data_type"})


def test_a_size_of_expert_parallelism_gives_the_processes_of_a_proof(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", engine="torch", train_batch_size=64)
    config |= {"parallel": {"ep": 32, "tp": 2}, "zero_optimization": {"stage": 3}}
    assert on_fewest_processes(parse(Config, config)).topology == Topology(dp=32, tp=2, ep=32)


EXPERT_MESHES = {  # ep, tp, hybrid shards, processes -> of the shrunk run: dp, ep, edp
    "all ranks hold different experts": (64, 1, None, 64, (2, 2, 1)),
    "eight ranks hold the same": (8, 1, None, 64, (4, 2, 2)),
    "over tp": (16, 8, None, 32, (2, 2, 2)),
    "within a replica": (8, 1, 8, 32, (4, 2, 2)),
}


@pytest.mark.parametrize("case", EXPERT_MESHES)
def test_a_shrunk_run_keeps_the_mesh_of_its_experts(tmp_path: Path, case: str) -> None:
    ep, tp, shard, processes, expected = EXPERT_MESHES[case]
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", engine="torch", train_batch_size=128)
    config["model"]["config"] |= {**EXPERTS, "num_experts": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    config |= {"parallel": {"ep": ep, "tp": tp, "hybrid_shard_size": shard}, "zero_optimization": {"stage": 3}}
    shrunk = shrink_run(resolve(parse(Config, config), world_size=processes), steps=20, work=tmp_path)
    assert (shrunk.topology.dp, shrunk.topology.ep, shrunk.topology.edp) == expected
    config = shrunk.layout("layout", precision="fp32", tokens=tmp_path).config
    assert resolve(parse(Config, config), world_size=shrunk.topology.world_size).topology == shrunk.topology


def test_kernels_that_exchange_rows_of_experts_are_proven_by_all_to_all(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", engine="torch", bf16={"enabled": True})
    config["model"]["config"] |= EXPERTS
    config["parallel"] = {"ep": 2, "ep_exchange": "hybridep"}
    shrunk = shrink_run(resolve(parse(Config, config), world_size=2), steps=20, work=tmp_path)
    assert "hybridep needs a GPU: proven with all_to_all" in shrunk.notes
    layout = parse(Config, shrunk.layout("layout", precision="bf16", tokens=tmp_path).config)
    assert expert_exchange(layout) == "all_to_all"


def test_a_completep_parametrization_is_proven_from_a_smaller_base_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8}
    base = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    config = {
        "model": {"config": {"model_type": "llama", **sizes}, "parametrization": "completep", "base": base},
        "data": {"sources": [{"path": "tokens"}], "sequence_length": 64},
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "run": {"dir": "run", "steps": 4},
    }
    small = shrink_run(resolve(parse(Config, config), world_size=2), steps=4, work=tmp_path)
    section = parse(ModelSection, small.config["model"])
    found = find_parametrization(section, meta_of(section))
    assert found.width == 2.0
    assert found.depth == small.config["model"]["config"]["num_hidden_layers"] / 2


def test_a_proof_crosses_the_threshold_of_longrope_or_names_what_it_does_not_reach(tmp_path: Path) -> None:
    factors = [1.0, 2.0, 3.0, 4.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", engine="torch")
    config["data"]["sequence_length"] = 1024
    config["model"]["config"] |= {
        "rope_parameters": {**rope, "short_factor": factors, "long_factor": factors},
        "max_position_embeddings": 2048,
    }
    config["model"]["config"].pop("head_dim", None)
    small = shrink_run(resolve(parse(Config, config), world_size=2), steps=4, work=tmp_path)
    assert small.config["model"]["config"]["rope_parameters"]["original_max_position_embeddings"] == 16
    assert "not reached" not in " ".join(small.notes)


def test_compilation_that_is_left_out_is_said(tmp_path: Path) -> None:
    notes = {}
    for enabled in (None, False):
        config = tiny_config(tmp_path / "nowhere", tmp_path / "run", engine="torch", compile={"enabled": enabled})
        small = shrink_run(resolve(parse(Config, config), world_size=2), steps=4, work=tmp_path)
        assert small.config["compile"]["enabled"] is False
        notes[enabled] = " ".join(small.notes)
    assert "proven without compilation" in notes[None]
    assert "compil" not in notes[False]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, CaseResult]]:
    """One plain process: as it is, with beta1 0 and no clipping, from another seed, one that fails, and with noise."""
    work = tmp_path_factory.mktemp("runs")
    tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=12_000, longest=2 * SEQUENCE)
    values = {**read_pairs()[0], "clip": 0.1, "precision": "fp32"}
    plain = reference_of(values, str(tokens), length=LONG)
    params = plain.config["optimizer"]["params"]
    bare = {**plain.config, "gradient_clipping": 0.0}
    bare["optimizer"] = {"type": "AdamW", "params": {**params, "betas": [0.0, 0.0]}}
    lion = {**plain.config, "optimizer": {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}}}
    sgd = {"type": "SGD", "params": {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}}
    seeded = {**plain.config, "run": {**plain.config["run"], "seed": 8}}
    failing = {**plain.config, "model": {"config": {**plain.config["model"]["config"], "hidden_act": "none"}}}
    named = {"plain": plain.config, "bare": bare, "seeded": seeded, "failing": failing, "lion": lion}
    named["sgd"] = {**plain.config, "optimizer": sgd}
    named["muon"] = {**plain.config, "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "weight_decay": 0.1}}}
    cases = [replace(plain, name=name, config=config) for name, config in named.items()]
    # a model that is chaotic at a high learning rate; layouts are stood for by noise and by another weight decay.
    # At 0.05 noise grows to 1e-3 in 20 steps; at 0.1 to 1e-2, where it no longer grows with its size but by chance
    chaotic = _with(plain.config, {"lr": 0.05}, gradient_clipping=0.0)
    calm, decayed = _with(plain.config, {"lr": 1e-3}), _with(plain.config, {"lr": 1e-3, "weight_decay": 0.5})
    for name, config in {"chaotic": chaotic, "calm": calm, "decayed": decayed}.items():
        cases += [
            replace(plain, name=f"{name}{suffix}", config=config, noise=noise)
            for suffix, noise in (("", 0.0), ("-noise", 2.0**-24), ("-layout", 2.0**-23))
        ]
    return launch(cases, work)


def _with(config: dict[str, Any], params: dict[str, float], **sections: Any) -> dict[str, Any]:
    optimizer = config["optimizer"]
    return {**config, "optimizer": {**optimizer, "params": {**optimizer["params"], **params}}, **sections}


def test_the_first_gradient_is_recovered_from_the_optimizer_state(
    runs: dict[str, tuple[Case, CaseResult]],
) -> None:
    # with beta1 0 and no clipping the first moment is the gradient; recovered from other values it is equal to rounding
    assert max(relative_differences(first_gradient(*runs["plain"]), first_gradient(*runs["bare"])).values()) < 1e-6
    norms = [float(g.double().square().sum()) for g in first_gradient(*runs["bare"]).values()]
    assert sum(norms) ** 0.5 == pytest.approx(runs["bare"][1].grad_norms[1], rel=1e-6)


@pytest.mark.parametrize("name", ["lion", "sgd", "muon"])
def test_it_is_recovered_from_the_state_of_others(runs: dict[str, tuple[Case, CaseResult]], name: str) -> None:
    found = relative_differences(first_gradient(*runs[name]), first_gradient(*runs["bare"]))
    assert max(found.values()) < 1e-6


def test_a_run_with_another_seed_is_refuted_in_every_tensor(runs: dict[str, tuple[Case, CaseResult]]) -> None:
    result = check_equivalence(runs["seeded"], runs["plain"], fp32_reference=runs["plain"])
    assert not result.passed
    assert {each.quantity for each in result.comparisons if not each.passed} >= {"loss", "gradient", "gradient norm"}
    assert len(result.wrong_gradients()) == len(first_gradient(*runs["plain"]))
    assert check_equivalence(runs["plain"], runs["plain"], fp32_reference=runs["plain"]).passed


def test_a_chaotic_curve_is_inconclusive_where_the_first_gradients_are_equal(runs: Runs) -> None:
    result = check_equivalence(runs["chaotic-layout"], runs["chaotic"], fp32_reference=runs["chaotic"])
    assert not result.passed
    assert result.wrong_gradients() == []
    assert not result.inconclusive  # nobody has looked yet
    assert with_noise(result, runs["chaotic-noise"], runs["chaotic"]).inconclusive


def test_a_calm_curve_is_proven_and_an_optimizer_that_differs_is_refuted(runs: Runs) -> None:
    assert check_equivalence(runs["calm-layout"], runs["calm"], fp32_reference=runs["calm"]).passed
    result = check_equivalence(runs["decayed"], runs["calm"], fp32_reference=runs["calm"])
    assert result.wrong_gradients() == []  # weight decay does not enter the first gradient
    assert not result.passed
    assert not with_noise(result, runs["calm-noise"], runs["calm"]).inconclusive


def test_a_wrong_gradient_is_refuted_however_chaotic_the_curve_is(runs: Runs) -> None:
    result = check_equivalence(runs["seeded"], runs["plain"], fp32_reference=runs["plain"])
    assert not with_noise(result, runs["chaotic"], runs["plain"]).inconclusive


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("olmo3", "sdpa"),
        pytest.param("exaone4", "sdpa", marks=pytest.mark.sweep),
        pytest.param("inkling_text", "eager", marks=pytest.mark.sweep),
    ],
)
def test_families_with_norms_after_their_layers_or_their_embedding_are_proven(
    tmp_path: Path, kind: str, attention: str
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = {
        "config": {"model_type": kind, **sizes, "num_key_value_heads": 2, **OVERRIDES.get(kind, {})},
        "attn_implementation": attention,
    }
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", model=model, engine="torch")
    # after more steps exaone4 is chaotic at this learning rate, where products are summed without AVX-512
    output_of(prove("--config", str(write_config(tmp_path / "c.json", config)), "--steps", "5"))


def test_the_error_of_a_failed_rank_is_reported(runs: dict[str, tuple[Case, CaseResult]]) -> None:
    result = check_equivalence(runs["failing"], runs["plain"], fp32_reference=runs["plain"])
    assert not result.passed
    assert "hidden_act" in str(result.error) or "none" in str(result.error)


def test_the_time_limit_of_a_case_begins_when_the_operator_of_a_disk_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []
    monkeypatch.setattr(operators, "compile_async_io", lambda: done.append("compiled"))
    monkeypatch.setattr(worker, "preload", lambda *_what: done.append("imported"))
    ran = CaseResult(tmp_path)
    monkeypatch.setattr(worker, "_run", lambda *_what, **_how: (done.append("run"), ran)[1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(worker, "use_cpu", lambda: None)
    disk = {"offload_optimizer": {"device": "nvme"}}
    for zero in ({"stage": 3, **disk}, {"stage": 3}):
        worker.run_cases([Case("a", {"model": {}, "zero_optimization": zero})], tmp_path)
    assert done == ["imported", "compiled", "run", "imported", "run"]


def test_a_missing_or_nan_tensor_has_infinite_difference() -> None:
    ones = {"a": torch.ones(3), "b": torch.ones(2)}
    assert relative_differences({"a": torch.ones(3)}, ones) == {"a": 0.0, "b": float("inf")}
    assert relative_differences({**ones, "b": torch.tensor([1.0, float("nan")])}, ones)["b"] == float("inf")


def test_a_gradient_that_is_zero_but_for_rounding_is_compared_relative_to_the_average() -> None:
    expected: dict[str, Any] = {"a": torch.full((100,), 1.0), "b": torch.full((100,), 1e-12)}
    found = {"a": expected["a"], "b": -expected["b"]}
    assert relative_differences(found, expected)["b"] < 1e-8
