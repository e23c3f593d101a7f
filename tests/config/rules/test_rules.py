"""Law 7: a config is right, or refused before the start with its field, value, reason and a remedy that works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foundation import configfile
from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.curve import curve_fields
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.optimizers import ADAMW
from tests import warm
from tests.conftest import ROOT, tiny_config, write_config


def resolved(tmp_path: Path, *sets: str, world_size: int = 1, **fields: Any) -> ResolvedRun:
    path = write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run", **fields))
    return resolve(load_config(path, sets), world_size=world_size)


def experts(kind: str, **fields: Any) -> str:
    return f"model={json.dumps({'config': {'model_type': kind, **fields}})}"


REFUSALS = [
    ("zero_optimisation.stage=2", "did you mean 'zero_optimization'"),
    ("gradient_cliping=1.0", "did you mean 'gradient_clipping'"),
    ("zero_optimization.stage=4", "zero_optimization.stage"),
    ("zero_optimization.cpu_offload=true", "use offload_optimizer"),
    ("tensor_parallel.autotp_size=2", "start 2 or 4 processes"),
    ("csv_monitor.enabled=true", "metrics.jsonl"),
    ("optimizer.type=LAMB", "trust ratio of norms"),
    ("optimizer.type=adafactor", "means of its rows and columns"),
    ("optimizer.type=OneBitAdam", "compresses and reduces gradients"),
    ("optimizer.type=Shampoo", "preconditioners of its dims"),
    ("fp8.recipe=NVFP4", "rounds gradients at random"),
    ("fp8.recipe=fp4", "it has to be one of"),
    ("optimizer.type=AdamWx", "did you mean 'AdamW'"),
    ("optimizer.type=SGD", "SGD has no such parameter"),
    ("optimizer.params.momentum=0.9", "AdamW has no such parameter"),
    ("optimizer.params.muon_lr=0.02", "AdamW has no such parameter"),
    ('optimizer={"type": "Muon", "params": {"ns_method": "gram"}}', "ns_method"),
    ("optimizer.params.qk_clip=100", "AdamW has no such parameter"),
    ('optimizer={"type": "Muon", "params": {"qk_clip": 0}}', "optimizer.params.qk_clip"),
    ('optimizer={"type": "Muon", "params": {"per_head_muon": true}}', "q, k and v are one matrix each"),
    ('optimizer={"type": "Muon", "params": {"moments_dtype": "bf16"}}', "Muon has no such parameter"),
    ('optimizer={"type": "SGD", "params": {"momentum": 1.0}}', "momentum must lie in [0, 1)"),
    ('optimizer={"type": "SGD", "params": {"nesterov": true}}', "add optimizer.params.momentum"),
    ('optimizer={"type": "SGD", "params": {"dampening": 0.1}}', "not dampened here"),
    ('optimizer={"type": "Lion", "params": {"betas": [0.9, 1]}}', "use [0.9, 0.99]"),
    ("optimizer.params.betas=[0.9, 1.0]", "a beta must lie in [0, 1)"),
    ("optimizer.params.lr=-1", "optimizer.params.lr"),
    ("train_batch_size=9", "8 or 10"),
    ("run.tokens=1000", "exactly one of the two"),
    ("run.steps=0", "run.steps"),
    ('profile={"steps": [18, 23]}', "use steps up to 20, or run.steps 23 or more"),
    ('profile={"steps": [5, 4]}', "use [4, 5]"),
    ('profile={"steps": [0, 4]}', "profile.steps"),
    ('profile={"steps": [4, 5], "ranks": [1]}', "the only rank is 0"),
    ('profile={"steps": [4, 5], "ranks": []}', "profile.ranks"),
    ("model.path=somewhere", "exactly one of the two"),
    ("model.config.num_attention_heads=5", "use 4, or set head_dim"),
    ("model.config.num_key_value_heads=3", "use 2"),
    ("model.config.num_hidden_layers=-1", "not a whole number above 0"),
    ("model.config.vocab_size=0", "not a whole number above 0"),
    ("model.config.num_nextn_predict_layers=-1", "use 0 or more"),
    ("model.config.max_position_embeddings=16", "use at most 16"),
    (experts("mixtral", num_local_experts=4, num_experts_per_tok=5), "use at most 4"),
    (experts("longcat_flash", n_routed_experts=4, moe_topk=5), "use at most 4"),
    (experts("dbrx", ffn_config={"moe_num_experts": 4, "moe_top_k": 5}), "model.config.ffn_config.moe_top_k = 5"),
    (experts("deepseek_v3", n_routed_experts=6, n_group=4), "use 3"),
    (experts("deepseek_v3", n_routed_experts=8, n_group=4, topk_group=5), "there are 4 groups of experts"),
    (experts("deepseek_v3", n_routed_experts=8, n_group=4, topk_group=1, num_experts_per_tok=3), "use at most 2, or"),
    ("model.config.model_type=null", "architecture"),
    ("data.sources=[]", "data.sources"),
    ("data.sources.0.wieght=2", "did you mean 'weight'"),
    ("data_types.grad_accum_dtype=bf16", "remove it, or enable bf16"),
    ("distill.alpha=1.5", "distill"),
    ("bf16.immediate_grad_update=true", "does not support it"),
    ("optimizer.params.lr=Infinity", "optimizer.params.lr"),
]


@pytest.mark.parametrize(("override", "words"), REFUSALS)
def test_an_invalid_value_is_refused_with_reason_and_remedy(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolved(tmp_path, override)
    text = str(refused.value)
    assert words in text
    assert "why: " in text
    assert "try: " in text


def test_auto_values_of_a_hugging_face_trainer_config_are_derived(tmp_path: Path) -> None:
    sets = ["train_micro_batch_size_per_gpu=auto", "gradient_clipping=auto", "fp16.enabled=auto", "bf16.enabled=auto"]
    off = ["zero_optimization.offload_optimizer.device=none", "zero_optimization.reduce_bucket_size=auto"]
    run = resolved(tmp_path, *sets, *off)
    assert (run.batch.micro, run.config.gradient_clipping) == (8, 1.0)
    assert (run.config.bf16.enabled, run.config.fp16.enabled) == (True, False)
    assert run.config.zero_optimization.reduce_bucket_size == 48 * 48


def test_tokens_become_whole_steps_rounded_up(tmp_path: Path) -> None:
    run = resolved(tmp_path, "run.steps=null", "run.tokens=10000")
    assert run.steps == 40  # 10,000 / (8 samples x 32 tokens) = 39.06


def test_curve_fields_ignore_the_layout_and_include_what_changes_the_loss_curve(tmp_path: Path) -> None:
    base = curve_fields(resolved(tmp_path))
    same = [
        "train_micro_batch_size_per_gpu=1",
        "memory.activation_checkpointing=full",
        "loss.chunk=8",
        "zero_optimization.stage=1",
        "engine=torch",
        "run.checkpoint_every=2",
    ]
    for override in same:
        assert curve_fields(resolved(tmp_path, override)) == base, override
    numerics = ("loss.z_loss=1e-4", "data.mask_documents=true", "fp16.enabled=true")
    for override in ("run.seed=8", "optimizer.params.lr=1e-4", "data.sequence_length=16", "run.steps=21", *numerics):
        assert curve_fields(resolved(tmp_path, override)) != base, override


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "pipeline", "check", *arguments)


def test_a_misspelt_key_is_refused_without_importing_torch_and_with_exit_code_2(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run", trian_batch_size=8))
    done = check("--config", str(path))
    assert done.returncode == 2
    assert "did you mean 'train_batch_size'" in done.stderr
    assert "Traceback" not in done.stderr
    probe = (
        "import sys, pipeline.plan.check, pipeline.runtime.launch.arguments;"
        " sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_a_corpus_config_and_a_training_config_are_told_apart(tokens: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps({"output": "tokens", "sources": [{"path": "x"}], "tokenizer": {"path": "y"}}))
    done = check("--config", str(corpus))
    assert done.returncode == 2
    assert f"headrace prep --config {corpus}" in done.stderr
    train = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run"))
    done = warm.run("-m", "data_prep", "plan", "--config", str(train))
    assert done.returncode == 2
    assert f"headrace train --config {train}" in done.stderr


@pytest.mark.parametrize("number", ["0", "-2", "two"])
def test_check_refuses_an_invalid_number_of_processes(tokens: Path, tmp_path: Path, number: str) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run"))
    done = check("--config", str(path), "--processes", number)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_check_prints_the_resolved_run(tokens: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run"))
    done = check("--config", str(path), "--processes", "2")
    assert done.returncode == 0, done.stderr
    for words in ("8 samples per step = micro-batch 2 x accumulation 2 x dp 2", "256 tokens per step", "epochs"):
        assert words in done.stdout
    count = parameters_of(tiny_config(tokens, tmp_path)["model"]["config"], vocabulary=512)
    assert f"{count:,} parameters" in done.stdout
    done = check("--config", str(path), "--processes", "2", "--verbose")
    for line in (
        "contiguous packing, attention crosses documents",
        "the newest 2 are kept",
        "every 100 steps",
    ):
        assert line in done.stdout
    assert not (tmp_path / "run").exists()


def test_check_prints_the_resolved_run_as_json(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run")
    config["data"]["mask_documents"] = True
    done = check("--config", str(write_config(tmp_path / "c.json", config)), "--processes", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["batch"] == {
        "samples": 8, "micro_batch": 2, "gradient_accumulation": 2, "sequence_length": 32, "tokens": 256
    }  # fmt: skip
    assert found["layout"]["dp"] == 2
    assert found["samples"]["mask_documents"] is True
    assert found["learning_rate"]["at_step"].keys() >= {"1", "20"}
    (source,) = found["data"]
    assert source["share"] == pytest.approx(1.0)
    assert source["epochs"] == pytest.approx(20 * 8 / source["samples"])
    assert found["config"]["run"]["dir"] == str(tmp_path / "run")
    assert found["start"] == {"resume_after_step": None}


def parameters_of(c: dict[str, Any], *, vocabulary: int) -> int:
    """Llama's parameter count by hand: two embeddings, per layer attention, MLP and two norms, one last norm."""
    d, f, heads, kv = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["num_key_value_heads"]
    layer = 2 * d * d + 2 * d * (d // heads * kv) + 3 * d * f + 2 * d
    return 2 * vocabulary * d + c["num_hidden_layers"] * layer + d


def test_shipped_configs_are_json_with_deepspeeds_keys() -> None:
    raw = json.loads((ROOT / "ds_configs/zero3.json").read_text())
    assert raw["zero_optimization"]["stage"] == 3
    assert {"train_batch_size", "optimizer", "scheduler", "gradient_clipping"} <= set(raw)


def test_lion_is_not_swapped_to_nvme_where_nobody_has_tried_it(tmp_path: Path) -> None:
    nvme = 'zero_optimization.offload_optimizer={"device": "nvme", "nvme_path": "/x"}'
    assert resolved(tmp_path, nvme).config.optimizer.kind == ADAMW
    with pytest.raises(ConfigError, match="states of AdamW alone"):
        resolved(tmp_path, nvme, 'optimizer={"type": "Lion"}')


@pytest.mark.parametrize("what", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize("offload", ['{"device": "cpu"}', '{"device": "nvme", "nvme_path": "/x"}'])
def test_muon_is_refused_with_offload(tmp_path: Path, what: str, offload: str) -> None:
    sets = ("zero_optimization.stage=3", f"zero_optimization.{what}={offload}", 'optimizer={"type": "Muon"}')
    with pytest.raises(ConfigError, match="would run on the host"):
        resolved(tmp_path, *sets, world_size=2)


def test_an_optimizer_is_swapped_to_nvme_by_stage_3_alone(tmp_path: Path) -> None:
    nvme = 'zero_optimization.offload_optimizer={"device": "nvme", "nvme_path": "/x"}'
    with pytest.raises(ConfigError, match="stage 2 offloads the optimizer to host memory only"):
        resolved(tmp_path, nvme, "zero_optimization.stage=2")


MORE = (
    "communication_data_type=fp16",
    "data_types.grad_accum_dtype=fp16",
    "pipeline_parallel_size=1",
    "tensor_parallel_size=1",
    "learning_rate=0.001",
    "max_steps=20",
    "train_batch_size=7",
    "gradient_accumulation_steps=3",
    "run.dri=x",
    "engine=deepsped",
    "loss.chunk=0",
    "run.dir=file:///tmp/runs/a",
    "run.dir=~/runs/a",
    "model.attn_implementation=flash",
    "parallel.schedule=1f1",
    "sparse_gradients=true",
    "zero_optimization.mics_shard_size=8",
    "gradient_clipping=-1",
    "scheduler.type=WarmupLinear",
)
REMOVED = re.compile(r"^(remove it|leave it out|leave it)")
RENAMED = re.compile(r"^did you mean '([\w.]+)'\?")
ASSIGNED = re.compile(r"^use ([a-z_]+(?:\.[a-z_]+)*) = (\S+)$")
PATH = re.compile(r"^use (?:a path of .* e\.g\. )?(/[\w/.-]+)")
SET = re.compile(r"^(?:use|set it to) (\[[^]]*\]|\d(?:[\w.]*\w)?)")
WITHIN = re.compile(r"(?:e\.g\.|use at most) (\[[^]]*\]|\d(?:[\w.]*\w)?)")
EXAMPLE = re.compile(r"^(\"[^\"]*\"|\[[^]]*\]|[\w.+-]+)(?: \(|$)")
PROSE = {
    "zero_optimization.stage=4",  # the stages and what they are
    'profile={"steps": [18, 23]}',
    'profile={"steps": [0, 4]}',
    'profile={"steps": [4, 5], "ranks": [1]}',
    'profile={"steps": [4, 5], "ranks": []}',
    "zero_optimization.cpu_offload=true",  # "use offload_optimizer", a section
    "csv_monitor.enabled=true",
    "tensor_parallel.autotp_size=2",  # other processes
    "run.tokens=1000",
    "model.path=somewhere",
    'optimizer={"type": "SGD", "params": {"nesterov": true}}',
    "optimizer.type=SGD",  # the others are those of AdamW
    "optimizer.params.momentum=0.9",
    "distill.alpha=1.5",
    "optimizer.type=LAMB",  # "use AdamW, Lion or SGD"
    "optimizer.type=adafactor",
    "optimizer.type=OneBitAdam",
    "optimizer.type=Shampoo",
    "model.config.model_type=null",
    "fp8.recipe=NVFP4",
}
"""Refusals whose remedy is a choice or a sentence, taken by no program."""


def refused(raw: dict[str, Any], folder: Path) -> ConfigError | None:
    try:
        resolve(load_config(write_config(folder / "c.json", raw)), world_size=1)
    except ConfigError as error:
        return error
    return None


def take(raw: dict[str, Any], error: ConfigError) -> bool:
    """Changes a config as a remedy says; whether it was understood."""
    *parents, last = error.field.split(".")
    section: Any = raw
    for name in parents:
        section = section[int(name)] if isinstance(section, list) else section.setdefault(name, {})
    text, value = error.remedy, section.get(last) if isinstance(section, dict) else None
    if found := RENAMED.match(text):
        if "there is no such key" in error.why:
            section[found[1]] = section.pop(last)
            return True
        section[last] = found[1]
    elif found := ASSIGNED.match(text):
        section.pop(last)
        configfile.set_value(raw, found[1], json.loads(found[2]))
    elif REMOVED.match(text):
        section.pop(last, None)
    elif found := PATH.match(text) or SET.match(text) or EXAMPLE.match(text) or WITHIN.search(text):
        try:
            section[last] = json.loads(found[1])
        except ValueError:
            section[last] = found[1]
    else:
        return False
    return section.get(last) != value


@pytest.mark.parametrize("override", [*(override for override, _ in REFUSALS if override not in PROSE), *MORE])
def test_a_remedy_that_is_taken_is_not_refused_again(override: str, tmp_path: Path) -> None:
    raw = tiny_config(tmp_path / "tokens", tmp_path / "run")
    key, _, text = override.partition("=")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    configfile.set_value(raw, key, value)
    first = refused(raw, tmp_path)
    assert first is not None
    assert take(raw, first), first.remedy
    again = refused(raw, tmp_path)
    assert again is None or again.field != first.field, again
