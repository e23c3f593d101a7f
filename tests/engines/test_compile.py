"""A machine or a backend that cannot compile decoder layers is refused, and a layer that fails to compile is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.sections.run import CompileSection
from pipeline.engines.parallel.compilation import check_compile
from tests import warm
from tests.engines.comparison import layout
from tests.support import output_of


def test_an_unknown_backend_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"compile.backend = 'inducter'\n.*\n  try: did you mean 'inductor'"):
        check_compile(CompileSection(enabled=True, backend="inducter"))
    check_compile(CompileSection(backend="inducter"))  # no GPU, so it is not used


@pytest.mark.parametrize(
    ("gpu", "found", "missing"),
    [
        (False, (), r"there is no g\+\+\n  try: install g\+\+, or set it to false"),
        (True, ("g++",), r"there is no C compiler\n  try: install gcc, or set it to false"),
        (
            True,
            ("gcc",),
            r"includes Python.h, which is not in /nowhere\n  try: install python3-dev, or set it to false",
        ),
        (False, ("clang++",), r"there is no g\+\+"),  # which inductor takes where CXX names it
        (False, ("g++",), r"Python.h"),
    ],
)
def test_inductor_without_what_it_compiles_with_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, found: tuple[str, ...], missing: str
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: "there")
    monkeypatch.setattr("shutil.which", lambda name: name if name in found else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("sysconfig.get_path", lambda *_names: "/nowhere")
    with pytest.raises(ConfigError, match=missing):
        check_compile(CompileSection(enabled=True))
    if "clang++" in found:
        monkeypatch.setenv("CXX", "clang++")
        with pytest.raises(ConfigError, match=r"Python\.h"):
            check_compile(CompileSection(enabled=True))


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
