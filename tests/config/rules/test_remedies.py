"""The remedy of a refusal is taken as it is printed, and the same key is not refused again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from foundation import configfile
from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from tests.config.rules.test_rules import REFUSALS
from tests.conftest import tiny_config, write_config

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
