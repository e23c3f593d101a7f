"""Configs of other tools are named, with what of them can be carried over; their names for our keys lead to ours."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest

from foundation.config_kinds import keys
from foundation.errors import ConfigError, problems_in
from pipeline.config.foreign_files import TOOLS
from pipeline.config.foreign_names import foreign_names
from pipeline.config.load import load_config, read_config
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from tests.conftest import tiny_config, write_config

FILES = {
    "accelerate": (
        "default_config.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n"
        "  deepspeed_config_file: ds.json\nnum_machines: 1\nnum_processes: 8\n",
    ),
    "NeMo": (
        "megatron_gpt.yaml",
        "name: gpt\ntrainer:\n  max_steps: 100\n  gradient_clip_val: 1.0\nexp_manager: {}\nmodel:\n"
        "  micro_batch_size: 4\n  global_batch_size: 64\n  tensor_model_parallel_size: 2\n  seq_length: 128\n",
    ),
    "LLaMA-Factory": (
        "qwen_sft.yaml",
        "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: full\ntemplate: qwen3\ndataset: identity\n"
        "cutoff_len: 256\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nlearning_rate: 1.0e-5\n",
    ),
    "axolotl": (
        "llama.yml",
        "base_model: NousResearch/Llama-3.2-1B\ndatasets:\n  - path: tatsu-lab/alpaca\nsequence_len: 256\n"
        "micro_batch_size: 2\nlearning_rate: 2e-5\ndeepspeed: deepspeed_configs/zero3.json\n",
    ),
    "torchtitan": (
        "llama3_8b.toml",
        '[job]\ndump_folder = "./outputs"\n[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nlr = 3e-4\n'
        "[training]\nlocal_batch_size = 1\nseq_len = 256\nsteps = 1000\n[parallelism]\ntensor_parallel_degree = 1\n",
    ),
    "GPT-NeoX": (
        "20B.yml",
        '{"pipe-parallel-size": 4, "model-parallel-size": 2, "num-layers": 44, "hidden-size": 6144, "seq-length": 128,'
        ' "pos-emb": "rotary", "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4}}, "train-iters": 150000,'
        ' "zero_optimization": {"stage": 1}, "lr-decay-style": "cosine", "train_micro_batch_size_per_gpu": 4}',
    ),
    "nanotron": (
        "config_tiny_llama.yaml",
        "general:\n  project: debug\nparallelism:\n  dp: 2\ntokens:\n  sequence_length: 256\n  micro_batch_size: 2\n"
        "checkpoints: {}\ntokenizer: {}\n",
    ),
    "OLMo": ("OLMo-1B.yaml", "run_name: a\nsave_folder: out\nglobal_train_batch_size: 64\nmax_sequence_length: 128\n"),
    "LLM Foundry": ("mpt.yaml", "max_seq_len: 128\ntrain_loader: {}\nglobal_train_batch_size: 16\n"),
    "torchtune": ("full.yaml", "tokenizer: {}\ncheckpointer: {}\noptimizer: {lr: 2e-5}\nepochs: 1\nloss: {}\n"),
    "the Hugging Face Trainer": (
        "args.json",
        '{"output_dir": "out", "per_device_train_batch_size": 4, "max_steps": 9}',
    ),
    "transformers": ("config.json", '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'),
}


def test_every_tool_of_the_table_is_tried() -> None:
    assert [tool.name.partition(" (")[0] for tool in TOOLS] == sorted(
        FILES, key=[tool.name.partition(" (")[0] for tool in TOOLS].index
    )


@pytest.mark.parametrize("tool", FILES)
def test_a_config_of_another_tool_is_named_and_what_is_printed_can_be_run(tool: str, tmp_path: Path) -> None:
    name, text = FILES[tool]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_config(tmp_path / name)
    assert f"it is a config of {tool}" in refused.value.why
    assert len(str(refused.value)) < 1000
    if "--config" in refused.value.remedy:
        words = shlex.split(refused.value.remedy.replace("; or ", " ").partition(", then your model")[0])
        sets = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
        load_config(words[words.index("--config") + 1], sets)


def test_a_batch_ramp_of_megatron_is_written_as_ours_with_the_same_batch_at_every_step(tmp_path: Path) -> None:
    start, by, samples, to, length = 8, 8, 100, 32, 128
    name, text = FILES["NeMo"]
    ramped = text.replace(
        "global_batch_size: 64", f"global_batch_size: {to}\n  rampup_batch_size: [{start}, {by}, {samples}]"
    )
    (tmp_path / name).write_text(ramped.replace("tensor_model_parallel_size: 2", "tensor_model_parallel_size: 1"))
    with pytest.raises(ConfigError) as refused:
        read_config(tmp_path / name)
    words = shlex.split(refused.value.remedy.partition(", then your model")[0])
    [ramp] = [word for word in words if word.startswith("train_batch_size=")]
    micro = "train_micro_batch_size_per_gpu=4"
    path = write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run"))
    run = resolve(read_config(path, [ramp, micro, f"data.sequence_length={length}"]).config, world_size=1)
    consumed = 0
    for step in range(
        1, 21
    ):  # Megatron-LM, core/num_microbatches_calculator.py: RampupBatchsizeNumMicroBatchesCalculator
        increments = int(consumed / (samples / ((to - start) // by)))
        theirs = to if consumed > samples else min(start + by * increments, to)
        assert run.accounts.samples_in(step) == theirs, step
        consumed += theirs
    (tmp_path / name).write_text(ramped.replace("  seq_length: 128\n", "") + "\n")
    with pytest.raises(ConfigError, match=r"SAMPLES x data\.sequence_length"):
        read_config(tmp_path / name)


def test_the_deepspeed_file_of_a_tools_config_is_named(tmp_path: Path) -> None:
    for tool, path in (("accelerate", "ds.json"), ("axolotl", "deepspeed_configs/zero3.json")):
        name, text = FILES[tool]
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=f'"run" to {path}, its DeepSpeed file'):
            read_config(tmp_path / name)


def test_a_file_of_gpt_neox_with_our_sections_added_is_still_one_of_gpt_neox(tmp_path: Path) -> None:
    words = "hidden-size num-attention-heads norm pos-emb no-weight-tying data-impl split warmup lr-decay-style"
    raw = tiny_config(tmp_path / "tokens", tmp_path / "run")
    theirs = {"pipe-parallel-size": 1, "model-parallel-size": 8, "num-layers": 32, **dict.fromkeys(words.split(), 1)}
    with pytest.raises(ConfigError, match="it is a config of GPT-NeoX"):
        read_config(write_config(tmp_path / "c.json", {**raw, **theirs}))
    with pytest.raises(ConfigError) as refused:  # a few keys are said one by one
        read_config(write_config(tmp_path / "c.json", {**raw, "pipe-parallel-size": 1, "model-parallel-size": 8}))
    assert len(problems_in(refused.value)) == 2


def test_a_config_of_ours_is_none_of_another_tool(tmp_path: Path) -> None:
    read_config(write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run")))


def refusal(raw: dict[str, Any], path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        read_config(write_config(path, raw))
    return refused.value


def typed(remedy: str) -> list[str]:
    """The arguments of `--set` in a remedy: `use A = V and B = W; a remark`."""
    keys = remedy.partition("; ")[0].removeprefix("use ").split(" and ")
    return [key.replace(" = ", "=", 1) for key in keys]


@pytest.mark.parametrize("key", ["pipeline_parallel_size", "tensor-parallel-size", "learning_rate", "max_steps"])
def test_another_tools_name_of_a_key_leads_to_ours(key: str, tmp_path: Path) -> None:
    raw = tiny_config(tmp_path / "tokens", tmp_path / "run")
    refused = refusal({**raw, key: 1}, tmp_path / "c.json")
    assert refused.field == key
    read_config(write_config(tmp_path / "c.json", raw), typed(refused.remedy))


INSTEAD = {name: found for name, found in foreign_names().items() if found.use}


@pytest.mark.parametrize("key", INSTEAD)
def test_a_key_with_other_values_leads_to_keys_that_are_taken_as_they_are_printed(key: str, tmp_path: Path) -> None:
    raw = tiny_config(tmp_path / "tokens", tmp_path / "run")
    at = {**raw, key: True} if key not in Config.model_fields else {**raw, "run": {**raw["run"], key: True}}
    refused = refusal(at, tmp_path / "c.json")
    assert "other tools have it" in refused.why
    read_config(write_config(tmp_path / "c.json", raw), typed(refused.remedy))


def test_within_a_section_the_table_comes_before_the_spelling(tmp_path: Path) -> None:
    raw = tiny_config(tmp_path / "tokens", tmp_path / "run")
    raw["run"]["max_steps"] = 9
    raw["model"]["dtype"] = "bfloat16"
    raw["data"]["prefech"] = 1
    problems = {each.field: each.remedy for each in problems_in(refusal(raw, tmp_path / "c.json"))}
    assert problems["run.max_steps"] == "use run.steps = 9"
    assert problems["model.dtype"].startswith("use bf16.enabled = true; ")
    assert problems["data.prefech"] == "did you mean 'prefetch'?"


def test_what_is_not_offered_is_said_with_the_reason_and_a_tool_that_has_it(tmp_path: Path) -> None:
    raw = {**tiny_config(tmp_path / "tokens", tmp_path / "run"), "lora": {"r": 8}}
    refused = refusal(raw, tmp_path / "c.json")
    assert refused.why == "not offered: headrace trains all weights"
    assert "axolotl" in refused.remedy
    (tmp_path / "a.yml").write_text(f"{FILES['axolotl'][1]}adapter: lora\nlora_r: 8\nload_in_8bit: false\n")
    with pytest.raises(ConfigError) as foreign:
        read_config(tmp_path / "a.yml")
    assert foreign.value.why.endswith("not of a run here; headrace trains all weights")


def test_every_name_leads_to_a_key_that_is_there_and_is_no_key_of_its_own() -> None:
    paths = {key.path for key in keys("run")}
    for name, found in foreign_names().items():
        assert name not in paths, name
        for ours in found.ours:
            assert ours.replace("sources.0.", "sources[].") in paths or ours.startswith("model.config."), ours


def test_keys_that_are_unknown_are_said_once_and_briefly(tmp_path: Path) -> None:
    raw = tiny_config(tmp_path / "tokens", tmp_path / "run")
    strange = {f"zzzqqq{number}": number for number in range(40)}
    with pytest.raises(ConfigError) as refused:
        read_config(write_config(tmp_path / "c.json", {**raw, **strange}))
    assert len(problems_in(refused.value)) == 40
    assert len(str(refused.value)) < 6000
    assert str(refused.value).count("the keys here are") == 1


def test_toml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[run]\ndir = "runs/a"\nsteps = 5\n[data]\nsequence_length = 32\nsources = [{path = "tokens"}]\n'
        '[model.config]\nmodel_type = "llama"\n'
    )
    assert load_config(path).run.steps == 5
    path.write_text("[run\n")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(path)
