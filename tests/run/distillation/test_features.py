"""Matching of hidden states and attention relations: the loss is the papers', and what cannot be matched is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, MambaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foundation.directory import read_manifest
from foundation.errors import ConfigError
from pipeline.config.load import read_config
from pipeline.config.rules.distillation import HIDDEN, layer_map
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.data.loader import StepLoader
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.assemble import assemble
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.features import WantedFeatures, recording
from pipeline.models.construction.materialize import materialize
from pipeline.run.distillation.feature_checks import check_feature_models
from pipeline.run.distillation.on_rank import make_distillation
from pipeline.run.prepare import PreparedRun, prepare
from tests import warm
from tests.conftest import launch, losses, start, write_config
from tests.engines.comparison import layout_params
from tests.run.distillation.test_layouts import TOLERANCE, student
from tests.support import refusal_of

BOTH: dict[str, Any] = {"hidden_states": {"weight": 2.0}, "attentions": {"weight": 3.0, "layers": "uniform"}}


def prepared(tokens: Path, teacher: Path, work: Path, *sets: str, **distill: Any) -> PreparedRun:
    config = student(tokens, work / "run", teacher, **distill)
    config["model"]["config"] |= {"hidden_size": 32, "intermediate_size": 64}
    return prepare(resolve(read_config(write_config(work / "c.json", config), list(sets)).config, world_size=1))


def first_batch(ready: PreparedRun) -> MicroBatch:
    [batch, *_] = loader(ready.run, ready).gather(1).micro_batches
    return batch


def loader(run: ResolvedRun, ready: PreparedRun) -> StepLoader:
    return StepLoader(ready.mixture, run.batch, dp_rank=0, steps=(1, 1), mask_documents=run.config.data.mask_documents)


def decoder_of(ready: PreparedRun) -> Decoder:
    decoder = assemble(ready.run, ready.model, None).decoder
    materialize(decoder.causal, ready.values, device=torch.device("cpu"))
    return decoder.train()


def transformers_model(source: nn.Module) -> Any:
    config: Any = source.config
    plain = AutoModelForCausalLM.from_config(config.__class__(**config.to_dict()), attn_implementation="eager")
    plain.load_state_dict(source.state_dict())
    return plain


def features(model: Any, batch: MicroBatch) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Outputs of the layers, and queries, keys and values (rotated) [B, heads, T, d] of each, by hooks on the model."""
    outputs, projected = [], []
    positions = batch.positions if batch.positions is not None else torch.arange(batch.labels.shape[1])[None]
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _i, out: outputs.append(out))
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).register_forward_hook(lambda _m, _i, out: projected.append(out))
    same = torch.ones(1, 1, *2 * batch.labels.shape[1:], dtype=torch.bool).tril()
    if batch.documents is not None:
        same = same & (batch.documents[:, None, :, None] == batch.documents[:, None, None, :])
    mask = torch.zeros(same.shape).masked_fill(~same, torch.finfo(torch.float32).min)
    model(input_ids=batch.input_ids, position_ids=positions, attention_mask=mask, use_cache=False)
    cos, sin = model.model.rotary_emb(outputs[0], positions)
    size = model.config.head_dim
    split = [each.unflatten(-1, (-1, size)).transpose(1, 2) for each in projected]
    triples = [split[3 * n : 3 * n + 3] for n in range(len(outputs))]
    return outputs, [[*apply_rotary_pos_emb(q, k, cos, sin), v] for q, k, v in triples]


def by_formula(own: Any, theirs: Any, batch: MicroBatch, *, kind: str, hidden_map: Any, heads: int) -> list[Tensor]:
    """The two losses, summed over targets, as the module's docstring has them."""
    (states, triples), (other_states, other_triples) = features(own, batch), features(theirs, batch)
    counts = (batch.labels != IGNORE).float()
    seen = torch.ones(*2 * batch.labels.shape[1:], dtype=torch.bool).tril()[None]
    if batch.documents is not None:
        seen = seen & (batch.documents[:, :, None] == batch.documents[:, None, :])

    def of_states(s: Tensor, t: Tensor) -> Tensor:
        if kind == "mse":
            return ((s - t) ** 2).mean(-1)
        if kind == "cosine":
            return 1 - (s * t).sum(-1) / s.norm(dim=-1) / t.norm(dim=-1)
        a, b = (each / each.norm(dim=-1, keepdim=True) for each in (s, t))
        return ((a @ a.mT - b @ b.mT) ** 2 * seen).sum(-1) / seen.sum(-1)

    def of_vectors(s: Tensor, t: Tensor) -> Tensor:
        logs = []
        for each in (s, t):
            regrouped = each.transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2)
            scores = regrouped @ regrouped.mT / regrouped.shape[-1] ** 0.5
            logs.append(scores.masked_fill(~seen[:, None], -torch.inf).log_softmax(-1))
        return F.kl_div(
            logs[0].masked_fill(~seen[:, None], 0.0), logs[1].masked_fill(~seen[:, None], -1e4), log_target=True,
            reduction="none",
        ).sum(-1).mean(1)  # fmt: skip

    hidden = [(of_states(states[s], other_states[t]) * counts).sum() for s, t in hidden_map]
    relations = [(of_vectors(s, t) * counts).sum() for n in (0, 1) for s, t in zip(triples[n], other_triples[n + 1], strict=True)]  # fmt: skip  # noqa: E501
    return [torch.stack(hidden).mean(), torch.stack(relations).mean()]


@pytest.mark.integration
@pytest.mark.parametrize("sets", [(), ("memory.activation_checkpointing=full",), ("loss.chunk=8",)], ids=str)
@pytest.mark.parametrize("masks", [True, False], ids=["documents apart", "documents together"])
def test_losses_and_gradients_are_those_of_the_formula_on_transformers_own_model(
    sets: tuple[str, ...], masks: bool, tokens: Path, teacher: Path, tmp_path: Path
) -> None:
    ready = prepared(tokens, teacher, tmp_path, f"data.mask_documents={str(masks).lower()}", *sets, **BOTH)
    batch, decoder = first_batch(ready), decoder_of(ready)
    objective = make_distillation(ready, torch.device("cpu"), None)
    assert objective.parts == ("cross_entropy", "kl", "hidden_states", "attentions")
    plain = transformers_model(decoder.causal)
    total, _ce, _kl, hidden, attentions = decoder(batch.input_ids, batch, objective)
    of_teacher = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager", dtype=torch.float32)
    expected = by_formula(plain, of_teacher, batch, kind="similarity", hidden_map=[(0, 1), (1, 2)], heads=4)
    assert [hidden.item(), attentions.item()] == pytest.approx([each.item() for each in expected], rel=1e-5)
    # the loss of the logits has a test of its own: without it, the rest is what was added
    without = make_distillation(prepared(tokens, teacher, tmp_path, *sets), torch.device("cpu"), None)
    total.backward()
    added = {name: p.grad.clone() for name, p in decoder.causal.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    decoder(batch.input_ids, batch, without)[0].backward()
    (2.0 * expected[0] + 3.0 * expected[1]).backward()
    for name, parameter in decoder.causal.named_parameters():
        reference = plain.get_parameter(name).grad
        own = added[name] - parameter.grad
        if reference is None:  # behind the last layer
            assert own.abs().max() < 1e-4
        else:
            torch.testing.assert_close(own, reference, rtol=1e-3, atol=1e-4 * reference.abs().max().item() + 1e-5)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_models_of_one_width_are_matched_state_by_state(kind: str, tokens: Path, teacher: Path, tmp_path: Path) -> None:
    matching = {"loss": kind, "layers": {"0": 1}}
    ready = prepared(tokens, teacher, tmp_path, "model.config.hidden_size=48", hidden_states=matching)
    batch, decoder = first_batch(ready), decoder_of(ready)
    *_, hidden = decoder(batch.input_ids, batch, make_distillation(ready, torch.device("cpu"), None))
    of_teacher = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager", dtype=torch.float32)
    models = transformers_model(decoder.causal), of_teacher
    expected, _ = by_formula(*models, batch, kind=kind, hidden_map=[(0, 1)], heads=4)
    assert hidden.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.integration
def test_states_of_compiled_layers_are_matched_as_those_of_others(tokens: Path, teacher: Path, tmp_path: Path) -> None:
    sums = []
    for sets in ((), ("compile.enabled=true", "compile.backend=aot_eager", "memory.activation_checkpointing=full")):
        ready = prepared(tokens, teacher, tmp_path, *sets, hidden_states={})
        decoder, batch = decoder_of(ready), first_batch(ready)
        out = decoder(batch.input_ids, batch, make_distillation(ready, torch.device("cpu"), None))
        out[0].backward()
        sums.append([*(each.item() for each in out), *(p.grad.norm().item() for p in decoder.parameters())])
    assert sums[1] == pytest.approx(sums[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_other_architectures_are_recorded_by_layer(kind: str, tokens: Path, teacher: Path, tmp_path: Path) -> None:
    sizes = {
        "gpt2": {"n_layer": 2, "n_embd": 48, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    }
    qwen = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
    }
    model = {"config": {"model_type": kind, **sizes.get(kind, {**qwen, "intermediate_size": 64})}}
    config = student(tokens, tmp_path / "run", teacher, **BOTH) | {"model": model}
    ready = prepare(resolve(read_config(write_config(tmp_path / "c.json", config), []).config, world_size=1))
    decoder, batch = decoder_of(ready), first_batch(ready)
    total, *parts = decoder(batch.input_ids, batch, make_distillation(ready, torch.device("cpu"), None))
    assert all(part.item() > 0 for part in parts)
    total.backward()
    with recording(decoder, WantedFeatures(frozenset({0, 1}), frozenset({0, 1}))) as found:
        decoder(batch.input_ids, batch, CrossEntropy())
    assert found.hidden.keys() == found.attention.keys() == {0, 1}
    assert all(query.shape == (2, 4, 32, 12) for query, _, _ in found.attention.values())


def test_an_evaluation_records_nothing_and_a_decoder_stays(tokens: Path, teacher: Path, tmp_path: Path) -> None:
    ready = prepared(tokens, teacher, tmp_path, **BOTH)
    batch, decoder = first_batch(ready), decoder_of(ready)
    before = decoder(batch.input_ids, batch, CrossEntropy())
    decoder(batch.input_ids, batch, make_distillation(ready, torch.device("cpu"), None))
    assert decoder.record_attention is None
    assert not any(module._forward_hooks for module in decoder.modules())
    assert len(before) == len(decoder(batch.input_ids, batch, CrossEntropy())) == 1


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (('distill.hidden_states.layers={"2": 1}',), "the student has 2 layers, 0 to 1"),
        (('distill.hidden_states.layers={"1": 3}',), "the teacher has 3 layers, 0 to 2"),
        (('distill.hidden_states.layers={"x": 1}',), "the student has 2 layers"),
        (("distill.hidden_states.layers={}",), "it maps no layer"),
        (("distill.hidden_states.layers=middle",), "uniform"),
        (("distill.hidden_states.loss=mse",), "the student's hidden_size is 32, the teacher's 48"),
        (("distill.attentions.relation_heads=5",), "use 4"),
        (("model.attn_implementation=eager", "data.mask_documents=false"), "set model.attn_implementation to sdpa"),
        (("compile.enabled=true",), "set compile.enabled to false"),
        (("engine=reference", "data.mask_documents=false"), "use engine torch or deepspeed"),
        (("distill.logits=somewhere",), "cached logits hold the teacher's output"),
    ],
)
def test_what_cannot_be_matched_is_refused_before_work(
    sets: tuple[str, ...], words: str, tokens: Path, teacher: Path, tmp_path: Path
) -> None:
    config = student(tokens, tmp_path / "run", teacher, **BOTH)
    config["model"]["config"] |= {"hidden_size": 32, "intermediate_size": 64}
    assert words in refusal_of(start("distill.py", write_config(tmp_path / "c.json", config), *sets))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (MambaConfig(vocab_size=512, hidden_size=48, num_hidden_layers=2), "has no attention heads"),
        (DeepseekV3Config(num_hidden_layers=2, hidden_size=48), "has latent attention"),
    ],
    ids=["mamba", "deepseek_v3"],
)
def test_other_attention_is_refused(model: Any, words: str, tokens: Path, teacher: Path, tmp_path: Path) -> None:
    ready = prepared(tokens, teacher, tmp_path, attentions={})
    assert ready.teacher is not None
    assert ready.run.config.distill is not None
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model)
    with pytest.raises(ConfigError, match=words):
        check_feature_models(
            ready.run.config.distill,
            ready.run.topology,
            student=made,
            teacher=ready.teacher.model,
            last_stage=(0, 2),
            compiled=False,
        )


def test_what_is_named_twice_is_refused(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer 0 is named twice"):
        layer_map(HIDDEN, {"0": 1, "00": 2}, student=2, teacher=3)
    config = student(tokens, tmp_path / "run", tmp_path, attentions={"relations": ["query", "query"]})
    with pytest.raises(ConfigError, match="would count as two"):
        resolve(Config.model_validate(config), world_size=1)


def test_layers_before_the_last_pipeline_stage_are_refused(tokens: Path, teacher: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", student(tokens, tmp_path / "run", teacher, **BOTH))
    arguments = ("--config", config, "--processes", "2", "--set", "parallel.pp=2")
    done = warm.run("-m", "pipeline", "check", *arguments, merged=True)
    assert done.returncode == 2
    assert "the last of 2 pipeline stages, which has the student's layers 1 to 1, and layer 0 is" in done.stdout


@pytest.mark.integration
def test_a_resumed_run_goes_on_as_if_nothing_had_happened_and_other_matching_is_another_run(
    tokens: Path, teacher: Path, tmp_path: Path
) -> None:
    configs = {name: student(tokens, tmp_path / name, teacher, **BOTH) for name in ("whole", "parts")}
    paths = {}
    for name, config in configs.items():
        del config["scheduler"]
        paths[name] = write_config(tmp_path / f"{name}.json", config)
    launch("distill.py", paths["whole"])
    launch("distill.py", paths["parts"], "run.steps=4")
    said = refusal_of(start("distill.py", paths["parts"], "distill.hidden_states.weight=1.0"))
    assert "distill.hidden_states.weight" in said
    launch("distill.py", paths["parts"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "full activation checkpointing": (1, ("memory.activation_checkpointing=full",)),
    "FSDP2, teacher sharded": (2, ("distill.shard_teacher=true",)),
    "tensor parallelism": (2, ("parallel.tp=2", "zero_optimization.stage=2")),
    "context parallelism": (2, ("parallel.cp=2",)),
    "tensor and context parallelism, ring": (4, ("parallel.tp=2", "parallel.cp=2", "parallel.cp_method=ring")),
    "ZeRO-3": (2, ("engine=deepspeed",)),
    "ZeRO-2, tensor parallelism, selective checkpointing": (
        2,
        ("engine=deepspeed", "zero_optimization.stage=2", "parallel.tp=2", "memory.activation_checkpointing=selective"),
    ),
    "ZeRO-3, context parallelism, full checkpointing": (
        2,
        ("engine=deepspeed", "parallel.cp=2", "memory.activation_checkpointing=full"),
    ),
}
IN_CI = {
    "FSDP2, teacher sharded",
    "tensor and context parallelism, ring",
}
"""The others run with `make sweep-tests`."""


@pytest.fixture(scope="module")
def alone(teacher: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    work = tmp_path_factory.mktemp("alone")
    launch("distill.py", write_config(work / "c.json", student(tokens, work / "run", teacher, **BOTH)))
    rows = [json.loads(line) for line in (work / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    for row in steps:
        parts = 2 * row["kl"] + 0.5 * row["cross_entropy"] + 2 * row["hidden_states"] + 3 * row["attentions"]
        assert row["loss"] == pytest.approx(parts, rel=1e-5)
    return losses(work / "run")


@pytest.mark.parametrize("layout", layout_params(set(), LAYOUTS, integration=IN_CI))
def test_every_layout_follows_one_process(
    layout: str, alone: dict[int, float], teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    processes, sets = LAYOUTS[layout]
    config = write_config(tmp_path / "c.json", student(tokens, tmp_path / "run", teacher, **BOTH))
    launch("distill.py", config, *sets, processes=processes)
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=TOLERANCE)
    assert read_manifest(tmp_path / "run", kind="run").details["finished"]


PIPELINES: dict[str, tuple[str, ...]] = {
    "interleaved 1F1B": ("parallel.schedule=interleaved_1f1b", "zero_optimization.stage=2"),
    "zero bubble, full checkpointing": (
        "parallel.schedule=zero_bubble",
        "zero_optimization.stage=2",
        "memory.activation_checkpointing=full",
    ),
    "DeepSpeed": ("engine=deepspeed", "zero_optimization.stage=1"),
}


@pytest.fixture(scope="module")
def deep(tokens: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A student of four layers whose last is matched: its config, and the losses of one process."""
    work = tmp_path_factory.mktemp("deep")
    last = {"hidden_states": {"layers": {"3": 2}}, "attentions": {"layers": "last"}}
    config = student(tokens, work / "run", teacher, **last)
    config["model"]["config"]["num_hidden_layers"] = 4
    path = write_config(work / "c.json", config)
    launch("distill.py", path)
    return path, losses(work / "run")


@pytest.mark.parametrize("layout", layout_params(set(), PIPELINES, integration=PIPELINES.keys() - {"interleaved 1F1B"}))
def test_the_last_stages_layers_are_matched(layout: str, deep: tuple[Path, dict[int, float]], tmp_path: Path) -> None:
    sets = (f"run.dir={tmp_path / 'run'}", "parallel.pp=2", *PIPELINES[layout])
    launch("distill.py", deep[0], *sets, processes=2)
    assert losses(tmp_path / "run") == pytest.approx(deep[1], rel=TOLERANCE)
