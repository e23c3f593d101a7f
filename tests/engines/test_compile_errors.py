"""A layer that cannot be compiled, forward or backward, is named on both engines, with the key that turns it off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.engines.comparison import layout
from tests.support import output_of

FORWARD, BACKWARD = "model.layers.0 cannot be compiled", "the backward pass of model.layers.0 cannot be compiled"


def failing(engine: str, when: str, stage: int, **keys: Any) -> dict[str, Any]:
    model = {"hidden_act": f"fails_{when}"}
    return {"engine": engine, **layout(stage, **keys), "compile": {"enabled": True}, "model": model}


CASES = {
    "FSDP2, forward": failing("torch", "forward", 3),
    "FSDP2, backward": failing("torch", "backward", 3),
    "FSDP2, backward, recomputed": failing("torch", "backward", 2, memory={"activation_checkpointing": "full"}),
    "ZeRO-2, forward": failing("deepspeed", "forward", 2),
    "ZeRO-2, backward": failing("deepspeed", "backward", 2),
    "ZeRO-3, backward": failing("deepspeed", "backward", 3),
}
PIPELINE = failing("torch", "backward", 2, parallel={"pp": 2})


def messages(work: Path, cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Runs cases on two ranks: name -> what the user is told."""
    (work / "cases.json").write_text(json.dumps(cases))
    command = ("-m", "tests.engines.failing_compile", work / "cases.json", work / "results.json")
    done = warm.run(*command, processes=2)
    assert (work / "results.json").exists(), done.stderr[-4000:]
    read: dict[str, str] = json.loads((work / "results.json").read_text())
    return read


def assert_named(message: str, *, layer: str) -> None:
    assert message.startswith("compile.enabled = True\n  why: "), message
    assert layer in message
    assert "no kernel for this operator" in message
    assert message.endswith("try: set it to false")


IN_CI = {"FSDP2, backward, recomputed", "ZeRO-2, forward"}


@pytest.mark.integration
@pytest.mark.parametrize(
    "names", [IN_CI, pytest.param({*CASES} - IN_CI, marks=pytest.mark.sweep)], ids=["each engine", "others"]
)
def test_a_failed_compilation_names_the_layer_and_the_key_on_both_engines(names: set[str], tmp_path: Path) -> None:
    found = messages(tmp_path, {name: CASES[name] for name in sorted(names)})
    for name in names:
        assert_named(found[name], layer=FORWARD if "forward" in name else BACKWARD)


@pytest.mark.integration
@pytest.mark.sweep
def test_a_failed_compilation_in_a_pipeline_is_not_hidden_by_torchs_schedule(tmp_path: Path) -> None:
    found = messages(tmp_path, {"pipeline": PIPELINE})
    # the last stage's backward pass is the first: of a model of four layers it has the last two
    assert_named(found["pipeline"], layer=BACKWARD.replace("0", "2"))


_COMPILES = """
import torch
from foundation.errors import ConfigError
from pipeline.engines.parallel.compilation import NamingBackend, named

layer = named(torch.compile(lambda x: x.sin() * 2, backend=NamingBackend("inductor", "default")), "model.layers.0")
try:
    layer(torch.ones(64))
except ConfigError as error:
    print(error)
"""


@pytest.mark.sweep
def test_what_a_killed_compiler_has_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert output_of(warm.run("-c", _COMPILES)) == ""
    for compiled in (tmp_path / "cache").rglob("*.so"):
        compiled.write_bytes(b"")
    told = output_of(warm.run("-c", _COMPILES))
    assert f"try: rm -r {tmp_path / 'cache'} (a killed compilation left incomplete files there), or set" in told
    shutil.rmtree(tmp_path / "cache")
    assert output_of(warm.run("-c", _COMPILES)) == ""
