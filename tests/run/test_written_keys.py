"""`run.allow_change` takes the keys that a person writes, and a refusal names those."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import CheckpointError, ConfigError
from pipeline import train
from pipeline.config.load import load_config
from pipeline.config.rules.curve import curve_fields, written_keys
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.config.sections.run import Config
from pipeline.run.prepare import prepare
from pipeline.run.same_run import learning_rate_change, refuse_other_curve
from tests.conftest import launch, tiny_config, write_config


class Saved:
    """Stands for a checkpoint of step 20: its curve, its samples and its path."""

    def __init__(self, curve: dict[str, Any]) -> None:
        self.path, self.step, self.manifest = Path("run/checkpoints/step-20"), 20, self
        self.details = {"curve": curve, "samples": 20 * curve["train_batch_size"]}


def curve(work: Path, *sets: str) -> dict[str, Any]:
    config = tiny_config(work / "tokens", work / "run", engine="torch", zero_optimization={"stage": 0})
    del config["scheduler"]
    return curve_fields(resolve(load_config(write_config(work / "c.json", config), list(sets)), world_size=1))


COSINE = "scheduler.type=WarmupCosineLR", "scheduler.params.warmup_num_steps=2"
CHANGES = {
    "optimizer.params.lr": ((), ("optimizer.params.lr=0.001",)),
    "run.steps": (COSINE, (*COSINE, "run.steps=40")),
    "scheduler.params.warmup_num_steps": (COSINE, (*COSINE, "scheduler.params.warmup_num_steps=4")),
    "scheduler.params.cos_min_ratio": (COSINE, (*COSINE, "scheduler.params.cos_min_ratio=0.5")),
    "bf16.enabled": ((), ("bf16.enabled=true",)),
    "loss.z_loss": ((), ("loss.z_loss=0.1",)),
}


@pytest.mark.parametrize("key", CHANGES)
def test_the_key_that_was_changed_is_enough_to_allow_it(tmp_path: Path, key: str) -> None:
    before, after = (curve(tmp_path, *sets) for sets in CHANGES[key])
    refuse_other_curve(Saved(before), after, allowed=[key])
    with pytest.raises(CheckpointError) as refused:
        refuse_other_curve(Saved(before), after, allowed=[])
    named = re.findall('"([^"]+)"', str(refused.value).partition("run.allow_change: [")[2])
    assert all(Config.model_fields.get(name.split(".")[0]) for name in named), named
    refuse_other_curve(Saved(before), after, allowed=named)
    with pytest.raises(ConfigError, match="no such field"):
        refuse_other_curve(Saved(before), after, allowed=[f"{key}x"])


TWO = 'data.sources=[{"path": "x", "weight": 3}, {"path": "y"}]'
BUDGET = 'data.sources=[{"path": "x", "epochs": 2}, {"path": "y"}]'


def stages(*stages: tuple[int, int]) -> tuple[str, str]:
    """Two sources with a curriculum: the step after which each stage begins, and the weight of the first source."""
    rows = ", ".join(f'{{"after_step": {step}, "weights": {{"x": {weight}, "y": 1}}}}' for step, weight in stages)
    return 'data.sources=[{"path": "x"}, {"path": "y"}]', f"data.curriculum=[{rows}]"


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ((), ("data.sequence_length=64",), "data.sequence_length: was 32, now 64"),
        ((), ("data.mask_documents=true",), "data.mask_documents: was None, now True"),
        ((), ("data.packing=best_fit",), "data.packing: was None, now 'best_fit'"),
        ((), ('data.fim={"rate": 0.5}',), "data.fim: was None, now"),
        ((), ("run.seed=8",), "run.seed: was 7, now 8"),
        ((), ("train_batch_size=16",), "train_batch_size: was 8, now 16"),
        ((), ('data.sources=[{"path": "x", "source": "web"}]',), "data.sources: was None, now ['web']"),
        ((TWO,), (TWO.replace("3", "2"),), "data.sources (data.weights): was [3.0, 1.0], now [2.0, 1.0]"),
        (
            (TWO,),
            stages((0, 3), (19, 1)),
            "data.curriculum (data.schedule): was None, now [[0, [3.0, 1.0]], [19, [1.0, 1.0]]]",
        ),
        (stages((0, 3), (10, 1)), stages((0, 3), (10, 2)), "data.curriculum (data.schedule): was [[0,"),
        ((BUDGET,), (BUDGET, "run.steps=40"), "run.steps (data.budgets.samples): was 160, now 320"),
    ],
)
def test_what_past_steps_are_counted_by_does_not_change(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...], line: str
) -> None:
    """Tokens, the EU summary and `samples` would tell of steps that were not trained."""
    was, now = curve(tmp_path, *before), curve(tmp_path, *after)
    with pytest.raises(CheckpointError, match=r"run\.allow_change cannot allow that") as refused:
        refuse_other_curve(Saved(was), now, allowed=["data", "run", "train_batch_size"])
    assert f"    {line}" in str(refused.value)
    assert "headrace export run MODEL, then train with --set model.config=auto --set model.path=MODEL" in str(
        refused.value
    )


@pytest.mark.parametrize("before", [(TWO,), stages((0, 3)), stages((0, 3), (25, 7))])
def test_a_mixture_may_change_in_steps_to_come(tmp_path: Path, before: tuple[str, ...]) -> None:
    was, now = curve(tmp_path, *before, "run.steps=40"), curve(tmp_path, *stages((0, 3), (20, 1)), "run.steps=40")
    with pytest.raises(CheckpointError, match="in keys that change the loss curve"):
        refuse_other_curve(Saved(was), now, allowed=[])
    refuse_other_curve(Saved(was), now, allowed=["data"])


def test_experts_go_on_in_the_precision_that_they_had(tokens: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="fp8 needs torchao (extra fp8)")
    curves = {}
    for kind in ("llama", "mixtral"):
        config = tiny_config(tokens, tmp_path / "run", bf16={"enabled": True}, fp8={"enabled": True, "emulate": True})
        config["model"]["config"]["model_type"] = kind
        for name in ("fp8.experts=true", "fp8.experts=false"):
            run = resolve(load_config(write_config(tmp_path / "c.json", config), [name]), world_size=1)
            curves[kind, name] = prepare(run).curve
    assert curves["llama", "fp8.experts=true"] == curves["llama", "fp8.experts=false"]
    old, new = (curves["mixtral", f"fp8.experts={value}"] for value in ("false", "true"))
    assert "fp8.experts" not in old  # as in checkpoints that are older than the key
    for before, after in ((old, new), (new, old)):
        with pytest.raises(CheckpointError, match=r'run.allow_change: \["fp8.experts"\]'):
            refuse_other_curve(Saved(before), after, allowed=[])
        refuse_other_curve(Saved(before), after, allowed=["fp8.experts"])


def test_a_longer_run_says_what_happens_to_the_learning_rate(tmp_path: Path) -> None:
    before, after = curve(tmp_path, *COSINE), curve(tmp_path, *COSINE, "run.steps=40")
    with pytest.raises(CheckpointError, match=r"learning rate of step 21 is then 0\.00\d+; by the checkpoint's"):
        refuse_other_curve(Saved(before), after, allowed=[])


def test_every_field_of_the_curve_is_named_by_keys_of_the_config(tmp_path: Path) -> None:
    """Every change of a field, whichever it is, is refused and allowed under keys that can be written in a config."""
    schema = describe()
    for field in leaves(curve(tmp_path, *COSINE)):
        for key in written_keys(field):
            assert is_key(schema, key), f"{field}: {key}"


def test_one_key_does_not_allow_another_and_a_refusal_has_one_line_for_each(tmp_path: Path) -> None:
    before = curve(tmp_path, *COSINE)
    after = curve(tmp_path, *COSINE, "run.steps=40", "optimizer.params.lr=0.001")
    with pytest.raises(CheckpointError) as refused:
        refuse_other_curve(Saved(before), after, allowed=[])
    lines = [line.strip() for line in str(refused.value).splitlines() if ": was " in line]
    assert lines == ["optimizer.params.lr: was 0.003, now 0.001", "run.steps (scheduler.total): was 20, now 40"]
    with pytest.raises(CheckpointError, match=r'run.allow_change: \["optimizer.params.lr"\]'):
        refuse_other_curve(Saved(before), after, allowed=["run.steps"])


def leaves(value: Any, at: str = "") -> list[str]:
    """Dotted paths of everything in nested dicts that is no dict."""
    if not isinstance(value, dict) or not value:
        return [at]
    return [path for key, inner in value.items() for path in leaves(inner, f"{at}.{key}" if at else key)]


def describe() -> dict[str, Any]:
    return Config.model_json_schema()


def is_key(schema: dict[str, Any], key: str) -> bool:
    """Whether the schema has a key of this dotted path; what is inside a free-form section counts, too."""
    at: Any = schema
    for name in key.split("."):
        options = [at, *at.get("anyOf", []), *at.get("allOf", [])]
        options = [schema["$defs"][o["$ref"].rpartition("/")[2]] if "$ref" in o else o for o in options]
        found = [option["properties"][name] for option in options if name in option.get("properties", {})]
        if not found:
            return any(option.get("additionalProperties") or option.get("type") == "array" for option in options)
        at = found[0]
    return True


def test_an_ordinary_run_refuses_a_checkpoint_of_islands_whatever_is_allowed(tmp_path: Path) -> None:
    """Its place in the data would be counted in steps, and samples that other islands had would come again."""
    island, plain = curve(tmp_path, 'islands={"name": "a"}'), curve(tmp_path)
    refuse_other_curve(Saved(plain), island, allowed=["islands"])
    with pytest.raises(ConfigError, match=r"islands\n  why: islands made the checkpoint"):
        refuse_other_curve(Saved(island), plain, allowed=["islands"])


def test_a_run_begun_under_older_defaults_goes_on_with_the_words_that_the_refusal_prints(tmp_path: Path) -> None:
    """Without `gradient_clipping` it was 0, and without a section `optimizer` AdamW at DeepSpeed's 1e-3."""
    config = tiny_config(tmp_path / "tokens", tmp_path / "run", engine="torch", zero_optimization={"stage": 0})
    for key in ("gradient_clipping", "optimizer"):
        del config[key]
    path = write_config(tmp_path / "c.json", config)

    def now(*sets: str) -> dict[str, Any]:
        return curve_fields(resolve(load_config(path, list(sets)), world_size=1))

    section = OptimizerSection().model_dump(mode="json")
    older = {**now("optimizer.params.lr=1e-3"), "gradient_clipping": 0.0, "optimizer": section}
    assert section["params"]["lr"] == 1e-3
    with pytest.raises(CheckpointError) as refused:
        refuse_other_curve(Saved(older), now(), allowed=[])
    printed = shlex.split(str(refused.value).partition("put the fields back (")[2].partition(")")[0])
    assert printed[::2] == ["--set"] * 2
    assert set(printed[1::2]) == {"gradient_clipping=0.0", "optimizer.params.lr=0.001"}
    refuse_other_curve(Saved(older), now(*printed[1::2]), allowed=[])


def test_another_run_is_refused_before_ranks_are_started(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", train_micro_batch_size_per_gpu=4)
    del config["scheduler"]
    path = write_config(tmp_path / "c.json", config)
    launch("train.py", path, "run.steps=5", "evaluation.samples=0")

    def started(*_words: object, **_options: object) -> None:
        raise InterruptedError  # in place of starting ranks

    monkeypatch.setattr("pipeline.runtime.launch.arguments.supervise", started)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)

    def resume(*sets: str) -> None:
        words = [word for each in ("run.steps=5", *sets) for word in ("--set", each)]
        train.run(parser.parse_args(["--config", str(path), "--nproc", "2", *words]))

    with pytest.raises(InterruptedError):
        resume("evaluation.samples=0")
    with pytest.raises(CheckpointError, match=r"optimizer\.params\.lr: was 0\.003, now 0\.001") as refused:
        resume("optimizer.params.lr=0.001")
    for words in (re.findall(r"--set (\S+)\)", str(refused.value)), ['run.allow_change=["optimizer.params.lr"]']):
        with pytest.raises(InterruptedError):
            resume("optimizer.params.lr=0.001", *words)
    with pytest.raises(CheckpointError, match=r"run\.seed: was 7, now 8"):
        resume("run.seed=8", 'run.allow_change=["run.seed"]')
    with pytest.raises(ConfigError, match=r"step-00000005 is of step 5 already"):
        resume("run.steps=4")
    with pytest.raises(ConfigError, match=r"it holds step-00000005, and run\.resume is never"):
        resume("run.resume=never")


def test_two_rates_are_printed_in_digits_that_differ(tmp_path: Path) -> None:
    then, now = curve(tmp_path, *COSINE, "run.steps=20000"), curve(tmp_path, *COSINE, "run.steps=20100")
    line = learning_rate_change(Saved(then), then, now) or ""
    rates = re.findall(r"0\.\d+", line)
    assert len({*rates}) == 2, line
    plain = "run.steps=2000", "scheduler.type=WSD", "scheduler.params.warmup_num_steps=2"
    wsd = [curve(tmp_path, *plain, f"scheduler.params.decay_num_steps={steps}") for steps in (9, 99)]
    assert "is 0.003 by both schedules: they differ later" in (learning_rate_change(Saved(wsd[0]), *wsd) or "")
