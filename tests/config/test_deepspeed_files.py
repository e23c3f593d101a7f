"""Public DeepSpeed files start as they are; what they ignore, and what "auto" becomes, is said; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from deepspeed.runtime.config import get_pipeline_config
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from foundation.errors import CombinedConfigError, ConfigError
from foundation.section import parse
from headrace.commands.app import run as headrace
from pipeline.config.deepspeed.auto import resolve_auto
from pipeline.config.deepspeed.file import translate
from pipeline.config.deepspeed.ignored import IGNORED, OTHER_NAMES
from pipeline.config.deepspeed.keys import (
    REFUSED_EXPERT_PARALLEL,
    REFUSED_PIPELINE,
    REFUSED_TENSOR_PARALLEL,
    REFUSED_ZERO,
)
from pipeline.config.load import LoadedConfig, read_config
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.deepspeed import ExpertParallelSection, ZeroSection
from pipeline.config.sections.run import Config
from tests import warm
from tests.config import deepspeed_files
from tests.conftest import tiny_config, write_config


def loaded(tmp_path: Path, **fields: Any) -> LoadedConfig:
    return read_config(write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run", **fields)))


def start(source: str, tmp_path: Path) -> ResolvedRun:
    path = deepspeed_files.write(source, tmp_path, tokens=tmp_path / "tokens")
    return resolve(read_config(path).config, world_size=deepspeed_files.processes(source))


def test_at_least_20_public_files_of_8_projects_are_tried() -> None:
    assert len(deepspeed_files.FILES) >= 20
    assert len({source.split("@")[0] for source in deepspeed_files.FILES}) == 8


@pytest.mark.parametrize("source", deepspeed_files.FILES)
def test_a_public_deepspeed_file_starts_as_it_is(source: str, tmp_path: Path) -> None:
    run, keys = start(source, tmp_path), deepspeed_files.FILES[source]
    assert run.config.zero_optimization.stage == keys.get("zero_optimization.stage", 0)
    precise = [name for name in ("bf16", "fp16") if keys.get(f"{name}.enabled") is True]
    asked = precise or [name for name in ("bf16", "fp16") if keys.get(f"{name}.enabled") == "auto"]
    assert run.config.bf16.enabled == (bool(asked) and precise != ["fp16"])
    if keys.get("gradient_clipping") == "auto":
        assert run.config.gradient_clipping == 1.0
    if keys.get("optimizer.params.lr") == "auto":
        assert run.schedule.peak == 5e-5


@pytest.mark.parametrize("name", ["playground/deepspeed_config_s2.json", "deepspeed_configs/zero3.json"])
@pytest.mark.integration
def test_a_public_deepspeed_file_trains(name: str, tokens: Path, tmp_path: Path) -> None:
    source = next(each for each in deepspeed_files.FILES if each.endswith(name))
    path = deepspeed_files.write(source, tmp_path, tokens=tokens)
    done = warm.run("pipeline/train.py", "--config", str(path))
    assert done.returncode == 0, done.stderr
    assert "auto: " in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("step", 0) for row in rows) == 2


def test_auto_is_listed_with_what_it_became_and_ignored_keys_in_one_line(tmp_path: Path) -> None:
    zero = {"stage": 3, "max_live_parameters": 0, "stage3_prefetch_bucket_size": "auto"}
    notes = dict(
        loaded(
            tmp_path,
            zero_optimization=zero,
            prescale_gradients=False,
            zero_allow_untested_optimizer=True,
            bfloat16={"enabled": "auto"},
            _comment="a comment",
        ).notes
    )
    prefetch = "zero_optimization.stage3_prefetch_bucket_size = 2073"  # 0.9 x 48 x 48
    assert notes["auto"] == (prefetch, "bf16.enabled = true")
    assert notes["ignored"] == ("prescale_gradients = false", "zero_allow_untested_optimizer = true", "_comment")


def test_check_prints_what_auto_became_and_what_was_ignored(tmp_path: Path) -> None:
    source = next(each for each in deepspeed_files.FILES if each.endswith("ds_z3_config.json"))
    path = deepspeed_files.write(source, tmp_path, tokens=tmp_path / "tokens")
    done = warm.run("-m", "pipeline", "check", "--config", str(path), "--rules-only")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.split())
    assert "gradient_clipping = 1.0" in lines["auto"]
    assert lines["ignored"] == "zero_allow_untested_optimizer = true"


@pytest.mark.parametrize(
    ("given", "bf16", "fp16"),
    [
        ({"bf16": {"enabled": "auto"}}, True, False),
        ({"fp16": {"enabled": "auto"}}, True, False),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, False, True),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}, False, True),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}, True, False),
    ],
)
def test_auto_precision_is_bf16_unless_the_file_says_otherwise(
    given: dict[str, Any], bf16: bool, fp16: bool, tmp_path: Path
) -> None:
    config = loaded(tmp_path, **given).config
    assert (config.bf16.enabled, config.fp16.enabled) == (bf16, fp16)


def test_auto_batch_sizes_keep_what_is_given() -> None:
    total, micro = "train_batch_size", "train_micro_batch_size_per_gpu"
    assert resolve_auto({total: "auto", micro: "auto"})[0] == {micro: 8}
    assert resolve_auto({total: 64, micro: "auto"})[0] == {total: 64}
    assert resolve_auto({total: "auto", micro: 4})[0] == {micro: 4}


def test_auto_in_our_own_sections_is_no_key_and_leaves_a_models_config_alone() -> None:
    rope = {"rope_scaling": "auto"}
    raw = {"model": {"config": rope, "path": "auto"}, "launch": {"backend": "auto"}, "run": "auto"}
    assert resolve_auto(raw) == ({"model": {"config": rope}, "launch": {}}, [])
    assert resolve_auto({"model": {"config": "auto"}})[0] == {"model": {}}


def test_auto_bucket_sizes_are_those_of_the_trainer_at_the_stage_that_has_them() -> None:
    model = {"config": {"hidden_size": 64}}
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    autos = dict.fromkeys(names, "auto")
    at = {stage: resolve_auto({"model": model, "zero_optimization": {"stage": stage, **autos}})[0] for stage in (2, 3)}
    assert at[2]["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 4096}
    assert [at[3]["zero_optimization"][name] for name in names] == [4096, 3686, 640]
    native = resolve_auto({"model": model, "engine": "torch", "zero_optimization": {"stage": 3, **autos}})[0]
    assert native["zero_optimization"] == {"stage": 3}


def test_a_zero_stage_is_never_guessed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage = 'auto'"):
        loaded(tmp_path, zero_optimization={"stage": "auto"})


def test_everything_wrong_with_a_file_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(CombinedConfigError) as refused:
        loaded(
            tmp_path,
            zero_optimization={"stage": 5, "zero_quantized_weights": True},
            sparse_gradients=True,
            gradient_cliping=1.0,
            optimizer={"type": "AdamW", "params": {"lr": "fast", "amsgrad": True}},
            bf16={"immediate_grad_update": True},
        )
    assert {each.field for each in refused.value.problems} == {
        "zero_optimization.stage",
        "zero_optimization.zero_quantized_weights",
        "sparse_gradients",
        "gradient_cliping",
        "optimizer.params.lr",
        "optimizer.params.amsgrad",
        "bf16.immediate_grad_update",
    }
    assert all(each.remedy and each.why for each in refused.value.problems)


def test_rules_that_do_not_depend_on_each_other_are_checked_together(tmp_path: Path) -> None:
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    config = loaded(tmp_path, train_batch_size=7, run={"dir": "r"}, **both).config
    with pytest.raises(CombinedConfigError) as refused:
        resolve(config, world_size=1)
    fields = {each.field for each in refused.value.problems}
    assert fields == {"fp16.enabled", "run.steps / run.tokens", "train_batch_size"}


def test_keys_without_a_meaning_on_engine_torch_are_refused_together(tmp_path: Path) -> None:
    zero = {"stage": 3, "sub_group_size": 10, "reduce_bucket_size": 10}
    config = loaded(tmp_path, engine="torch", zero_optimization=zero).config
    with pytest.raises(CombinedConfigError, match="2 things") as refused:
        resolve(config, world_size=2)
    assert "sub_group_size" in str(refused.value)
    assert "reduce_bucket_size" in str(refused.value)


def test_every_key_of_deepspeeds_zero_section_is_taken_ignored_or_refused_by_name() -> None:
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        for key in {name, field.alias or name}:
            known = OTHER_NAMES.get(f"zero_optimization.{key}", f"zero_optimization.{key}").split(".")[1]
            assert (
                known in ZeroSection.model_fields or known in REFUSED_ZERO or f"zero_optimization.{known}" in IGNORED
            ), key


AUTOEP = {name: value for name, value in parse_autoep_config({}).__dict__.items() if name[0] != "_"}


def test_every_key_of_deepspeeds_expert_parallelism_is_taken_ignored_or_refused_by_name() -> None:
    for key in AUTOEP:
        path = f"expert_parallel.{key}"
        assert key in ExpertParallelSection.model_fields or path in IGNORED, key
    assert set(REFUSED_EXPERT_PARALLEL) < set(AUTOEP)


def test_deepspeeds_own_defaults_of_expert_parallelism_are_ignored(tmp_path: Path) -> None:
    defaults = {name: None if name == "expert_w3" else value for name, value in AUTOEP.items()}
    read = loaded(tmp_path, expert_parallel={**defaults, "enabled": True, "autoep_size": 4, "preset_model": "mixtral"})
    assert len(read.ignored) == len(defaults) - 3
    assert read.config.expert_parallel == ExpertParallelSection(enabled=True, autoep_size=4, comm_backend="comm")
    off = loaded(tmp_path, expert_parallel={"enabled": False, "autoep_size": 4, "load_balance_coeff": None})
    assert (off.ignored, off.config.expert_parallel.size) == (("expert_parallel",), None)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("load_balance_coeff", 1e-3, "use moe.balance bias, and moe.bias_update_rate"),
        ("top_k", 4, "the router is the model's own"),
        ("expert_activation", "swigluoai", "the experts are the model's own"),
        ("expert_tensor_parallel_size", 2, "an expert is whole on its rank"),
    ],
)
def test_what_changes_expert_parallelism_is_refused_by_name(
    tmp_path: Path, key: str, value: object, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"expert_parallel.{key}") as refused:
        loaded(tmp_path, expert_parallel={"enabled": True, "autoep_size": 2, key: value})
    assert remedy in refused.value.remedy


def test_deepspeeds_own_zero_defaults_are_accepted(tmp_path: Path) -> None:
    defaults = DeepSpeedZeroConfig().model_dump(mode="json", by_alias=True)
    assert not translate({"zero_optimization": defaults}).refused
    loaded(tmp_path, zero_optimization={**defaults, "stage": 1})


PARALLEL = {
    "pipeline": get_pipeline_config({}),
    "tensor_parallel": {
        **TPTrainingConfig().model_dump(mode="json", by_alias=True, exclude={"dtype", "tensor_parallel"}),
        "tp": {"tp_size": 1, "tp_grain_size": 1},
    },
}


@pytest.mark.parametrize(
    ("section", "refused"), [("pipeline", REFUSED_PIPELINE), ("tensor_parallel", REFUSED_TENSOR_PARALLEL)]
)
def test_deepspeeds_own_defaults_of_its_parallel_sections_are_accepted_and_other_values_refused_by_name(
    section: str, refused: dict[str, str], tmp_path: Path
) -> None:
    loaded(tmp_path, **{section: PARALLEL[section]})
    assert {f"{section}.{key}" for key in PARALLEL[section]} - IGNORED.keys() <= {"pipeline.stages"}
    for key, remedy in refused.items():
        [found] = translate({section: {key: {"tp_size": 2}}}).refused
        assert (found.field, found.remedy) == (f"{section}.{key}", remedy)


@pytest.mark.parametrize(("stage", "kept"), [(0, False), (2, False), (3, True)])
def test_offload_of_parameters_has_no_effect_below_stage_3_and_that_is_said(
    stage: int, kept: bool, tmp_path: Path
) -> None:
    zero = {"stage": stage, "offload_param": {"device": "cpu"}}
    read = loaded(tmp_path, zero_optimization=zero)
    assert read.ignored == (() if kept else ("zero_optimization.offload_param (no effect below stage 3)",))
    assert read.config.zero_optimization.offload_param.device == ("cpu" if kept else "none")


@pytest.mark.parametrize(
    ("path", "value"), [("bias_correction", False), ("amsgrad", True), ("maximize", True), ("dampening", 0.1)]
)
def test_a_remedy_that_makes_another_curve_says_so(path: str, value: object) -> None:
    [refused] = translate({"optimizer": {"type": "Adam", "params": {path: value}}}).refused
    assert "another loss curve" in refused.remedy


LENGTHS: dict[str, Any] = {"min_difficulty": 8, "max_difficulty": 32}
DISCRETE = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 16, 32], "max_step": [4, 9]}}
LINEAR = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 12, "difficulty_step": 8}}
ROOT = {"schedule_type": "fixed_root", "schedule_config": {**LINEAR["schedule_config"], "root_degree": 2}}
UNEVEN = {**LINEAR, "max_difficulty": 30}
WORDS = {**DISCRETE, "max_difficulty": "c", "schedule_config": {"difficulty": ["a", "b"], "max_step": ["c"]}}


def curriculum(key: str, schedule: dict[str, Any]) -> dict[str, Any]:
    given = {**LENGTHS, **schedule}
    if key == "curriculum_learning":
        return {"enabled": True, "curriculum_type": "seqlen", **given}
    metrics = {"seqlen_truncate": {"clustering_type": "single_cluster", **given}}
    learning = {"enabled": True, "curriculum_metrics": metrics}
    return {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}


@pytest.mark.parametrize("key", ["curriculum_learning", "data_efficiency"])
@pytest.mark.parametrize("schedule", [DISCRETE, LINEAR, ROOT, UNEVEN], ids=["discrete", "linear", "root", "uneven"])
def test_deepspeeds_curriculum_of_lengths_is_refused_with_stages_that_have_its_lengths(
    key: str, schedule: dict[str, Any], tmp_path: Path
) -> None:
    [refused] = translate({key: curriculum(key, schedule)}).refused
    assert refused.field == key
    stages, _, rest = refused.remedy.partition("add ")[2].rpartition(": these")
    assert "DeepSpeed truncates" in rest
    config = tiny_config(tmp_path / "tokens", tmp_path / "run", **json.loads(f"{{{stages}}}"))
    path = write_config(tmp_path / "c.json", config)
    assert headrace(["check", "--config", str(path), "--rules-only"]) == 0
    accounts = resolve(parse(Config, config), world_size=1).accounts
    theirs = CurriculumScheduler({**LENGTHS, **schedule})
    for step in range(1, 21):
        assert accounts.span(step).sequence_length == theirs.update_difficulty(step), step


@pytest.mark.parametrize(
    "schedule",
    [{}, {"schedule_type": "custom"}, {**LINEAR, "max_difficulty": 512}, {**DISCRETE, "schedule_config": {}}, WORDS],
)
def test_a_curriculum_that_is_not_a_few_lengths_is_refused_with_stages_as_a_hint(schedule: dict[str, Any]) -> None:
    for key in ("curriculum_learning", "data_efficiency"):
        [refused] = translate({key: curriculum(key, schedule)}).refused
        assert "an entry of stages with data.sequence_length" in refused.remedy
        assert not translate({key: {"enabled": False}}).refused


@pytest.mark.parametrize(
    ("ours", "other", "value", "different"),
    [
        ("bf16", "bfloat16", {"enabled": False}, {"enabled": True}),
        (
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.max_live_parameters",
            1000,
            2000,
        ),
    ],
)
def test_two_names_of_a_key_are_listed_where_equal_and_refused_where_not(
    ours: str, other: str, value: Any, different: Any
) -> None:
    def given(second: Any) -> dict[str, Any]:
        section, _, name = ours.rpartition(".")
        both = {name: value, other.rpartition(".")[2]: second}
        return {section: both} if section else both

    assert f"{other} (as {ours})" in translate(given(value)).ignored
    assert not translate(given(value)).refused
    (refusal,) = translate(given(different)).refused
    assert (refusal.field, refusal.value) == (other, different)
    assert ours in refusal.why


def test_a_warmup_ratio_is_no_misspelt_warmup_min_ratio(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_ratio": 0.1}}
    with pytest.raises(ConfigError, match=r"scheduler\.params\.warmup_ratio") as refused:
        loaded(tmp_path, scheduler=scheduler)
    assert "use warmup_num_steps" in str(refused.value)
    assert "did you mean" not in str(refused.value)
