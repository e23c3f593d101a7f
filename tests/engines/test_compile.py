"""Compiled decoder layers train as uncompiled ones, in every layout, and each kind of layer is one graph."""

from __future__ import annotations

from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.sections.run import CompileSection
from pipeline.engines.parallel.compilation import check_compile
from tests.engines.comparison import EXPERTS, assert_within_tolerance, differences_fixture, layout, layout_params

AOT = {"compile": {"enabled": True, "backend": "aot_eager"}}
CLIPPED = {"type": "Muon", "params": {"lr": 3e-3, "qk_clip": 0.05}}
INDUCTOR = {"compile": {"enabled": True}}
GRAPHS = {
    "cp 2, ring, full": 10,  # messages between ranks split a layer in five
    "balanced experts, full": 10,  # so does the count of routed tokens
    "chunked loss, inductor": 3,  # the loss and its gradient
    "tp 2, chunked loss": 4,  # and the stride of a batch of one after the embedding
}
"""Layouts with other numbers of graphs than 2."""


def compiled(stage: int, *, how: dict[str, Any] = AOT, memory: str = "none", **keys: Any) -> dict[str, Any]:
    return {**layout(stage, **keys), **how, "memory": {"activation_checkpointing": memory}}


NATIVE = {
    "dp 2, selective": compiled(3, memory="selective"),
    "dp 2, full, inductor": compiled(3, how=INDUCTOR, memory="full"),
    "cp 2, ring, full": compiled(3, memory="full", parallel={"cp": 2, "cp_method": "ring"}),
    "chunked loss, inductor": compiled(3, how=INDUCTOR, loss={"chunk": 8, "z_loss": 1e-3}),
    "tp 2, chunked loss": compiled(2, parallel={"tp": 2}, loss={"chunk": 8}),
    "QK-Clip, selective": compiled(3, memory="selective", optimizer=CLIPPED),
    "pp 2, full, zero bubble": compiled(2, memory="full", parallel={"pp": 2, "schedule": "zero_bubble"}),
    "balanced experts, full": compiled(
        3, memory="full", model=EXPERTS, moe={"balance": "aux_loss", "aux_loss_coef": 0.5}, micro=2
    ),
}
DEEPSPEED = {
    "ZeRO-2, inductor": compiled(2, how=INDUCTOR),
    "ZeRO-3, full": compiled(3, memory="full"),
    "ZeRO-1, pp 2": compiled(1, parallel={"pp": 2}),
}

SWEPT = {
    "ZeRO-3, full",
    "balanced experts, full",
    "QK-Clip, selective",
    "pp 2, full, zero bubble",
    "tp 2, chunked loss",
    "chunked loss, inductor",
    "ZeRO-2, inductor",
    "ZeRO-1, pp 2",
    "cp 2, ring, full",
}
"""Layouts for the sweep alone: each of their options is compiled in another layout, with one that is harder."""


found = differences_fixture(
    "test_a_compiled_layout_trains_as_the_reference", {"torch": {2: NATIVE}, "deepspeed": {2: DEEPSPEED}}
)


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    layout_params({"dp 2, selective"}, NATIVE, DEEPSPEED, integration={*NATIVE, *DEEPSPEED} - SWEPT),
)
def test_a_compiled_layout_trains_as_the_reference(name: str, found: dict[str, dict[str, float]]) -> None:
    assert_within_tolerance(found[name], name)
    # of all layers together: one with gradients, one for the evaluation
    assert found[name]["graphs"] == GRAPHS.get(name, 2)


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
