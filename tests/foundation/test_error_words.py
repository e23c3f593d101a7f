"""Errors: every field of every config, given every JSON type, in our words, never pydantic's; labels of ranks."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from foundation.config_kinds import KINDS, keys
from foundation.errors import ConfigError
from foundation.json_schema import Key
from foundation.section import Count, Section, parse

VALUES = (None, True, 7, -1, 1.5, math.nan, "word", "", [], [1], ["a", 1], {}, {"a": 1}, {"step": 5})
PYDANTIC = re.compile(
    r"pydantic|Input|input should|valid (dict|integer|string|number|boolean|list)|instance of|Section\b|"
    r"(?<!data)_type:|extra_forbidden|Value error|value_error|union_tag|type=|function-|Traceback",
)
REQUIRED: dict[str, dict[str, Any]] = {
    "run": {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": [{"path": "x"}], "sequence_length": 8},
        "run": {"dir": "d"},
    },
    "corpus": {"output": "o", "sources": [{"path": "x"}], "tokenizer": {"train": "bpe"}},
    "prune": {"model": "m", "output": "o", "data": {"path": "t"}},
    "quantize": {"model": "m", "output": "o", "scheme": "W8A8", "data": {"path": "t"}},
    "compress": {"model": "m", "output": "o", "data": {"path": "t"}, "distill": {"config": "c"}},
    "card": {},
    "site": {"container": {"runtime": "pyxis", "image": "i"}},
}
_FAILING = "from foundation.cli import guarded, leave\nleave(guarded(lambda: 1 / 0))"


def placed(kind: str, key: Key, value: Any) -> dict[str, Any]:
    """A config that is right but for one key."""
    for name in reversed(re.findall(r"\[[^\]]*\]|[^.\[\]]+", key.path)):
        if not name.startswith("["):
            value = {name: value}
        else:
            value = [{**({"step": name[1:-1]} if name != "[]" else {}), **value}]
    name = next(iter(value))
    old = REQUIRED[kind].get(name)
    both = isinstance(old, dict) and isinstance(value[name], dict)
    return {**REQUIRED[kind], name: {**old, **value[name]} if both else value[name]}


def refusals(kind: str) -> Iterator[tuple[Key, ConfigError]]:
    """The errors of all keys with values of all JSON types."""
    section = KINDS[kind].section()
    for key in keys(kind):
        for value in VALUES:
            try:
                parse(section, placed(kind, key, value))
            except ConfigError as error:
                yield key, error


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_speaks_of_pydantic(kind: str) -> None:
    found = list(refusals(kind))
    assert len(found) > 3 * len(keys(kind))  # the walk reached what it is meant to
    for key, error in found:
        said = f"{error.field}: {error.why}: {error.remedy}"
        assert not PYDANTIC.search(said), f"{key.path}: {error}"
        assert error.why
        assert error.remedy


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_of_any_section_is_answered_with_the_nearest(kind: str) -> None:
    section = KINDS[kind].section()
    for key in keys(kind):
        path, _, name = key.path.rpartition(".")
        if not path or key.is_section:
            continue
        wrong = Key(f"{path}.{name}x", key.node, key.schema, required=False)
        with pytest.raises(ConfigError, match=r"no such key\n  try: did you mean|required"):
            parse(section, placed(kind, wrong, 1))


def test_the_message_has_what_was_given_what_is_wanted_and_an_example() -> None:
    class Lengths(Section):
        keep: Count | None = Field(None, description="how many stay")
        share: float = Field(0.5, ge=0, lt=1, description="the share that stays, e.g. 0.25")

    with pytest.raises(ConfigError) as caught:
        parse(Lengths, {"keep": "ten"}, at="run")
    assert str(caught.value).splitlines() == [
        "run.keep = 'ten'",
        "  why: it has to be a whole number, at least 1, or null; this is text",
        "  try: 100 (how many stay)",
    ]
    with pytest.raises(ConfigError) as caught:
        parse(Lengths, {"share": 1})
    assert str(caught.value).splitlines() == [
        "share = 1",
        "  why: it has to be a number, at least 0 and below 1",
        "  try: the share that stays, e.g. 0.25",
    ]


def test_a_section_that_is_no_object_is_refused_with_an_example() -> None:
    section: type[BaseModel] = KINDS["run"].section()
    with pytest.raises(ValidationError):
        section.model_validate({**REQUIRED["run"], "bf16": True})
    with pytest.raises(ConfigError, match=r'bf16 = True\n.*has to be an object; this is true\n.*\{"enabled": true\}'):
        parse(section, {**REQUIRED["run"], "bf16": True})  # type: ignore[type-var]


def test_a_misspelt_choice_is_answered_with_the_nearest() -> None:
    section = KINDS["run"].section()
    with pytest.raises(ConfigError, match=r"did you mean 'rollback'\?"):
        parse(section, {**REQUIRED["run"], "anomalies": {"spikes": "rolback"}})


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "3", "WORLD_SIZE": "4"}, {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}],
)
def test_every_line_of_a_ranks_traceback_names_the_rank(variables: dict[str, str]) -> None:
    done = failing(variables)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "[rank 3] ZeroDivisionError: division by zero"
    assert all(line.startswith("[rank 3] ") for line in lines)


@pytest.mark.parametrize("variables", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}])  # the second: a batch script
def test_a_single_process_has_pythons_own_traceback(variables: dict[str, str]) -> None:
    done = failing(variables)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


def failing(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    return subprocess.run(
        [sys.executable, "-c", _FAILING], env=kept | variables, capture_output=True, text=True, check=False
    )
