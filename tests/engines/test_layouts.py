"""Laws 3 and 4: layouts of both engines follow one process, and each exchanges its state with it.

The micro-batches are synthetic; `tests/parity` runs complete training runs.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests import warm
from tests.conftest import selected
from tests.engines.comparison import FP32, HALF
from tests.engines.layout_cells import CELLS, Cell
from tests.engines.layout_worker import resolved

TOGETHER = 12
"""Cells of a launch at most: every gloo group that was ever created keeps a busy thread (200 cells: 12 minutes)."""

GRAPHS = {
    "cp 2, ring, full": 10,  # messages between ranks split a layer in five
    "balanced experts, full": 10,  # so does the count of routed tokens
    "chunked loss, inductor": 3,  # the loss and its gradient
    "tp 2, chunked loss": 4,  # and the stride of a batch of one after the embedding
}
"""Compiled layouts with other numbers of graphs than 2."""


class Differences(dict[str, dict[str, float]]):
    """Differences from the reference by name of the cell; the test of a cell without any fails with `output`."""

    output = ""

    def __missing__(self, name: str) -> NoReturn:
        pytest.fail(f"a launch ended before its result:\n{self.output}")


def compare(cells: Mapping[str, Cell], work: Path) -> Differences:
    """Runs all references, all layouts of as many processes together, and all references from the layouts' states."""
    found = Differences()
    failed = run("reference_worker", cells, work)
    assert not failed, failed
    for processes in sorted({cell.processes for cell in cells.values()}):
        names = [name for name, cell in cells.items() if cell.processes == processes]
        for first in range(0, len(names), TOGETHER):
            some = {name: cells[name] for name in names[first : first + TOGETHER]}
            found.output += run("layout_worker", some, work, processes=processes)
    found.output += run("reference_worker", cells, work)
    (work / "compared.jsonl").touch()
    for line in (work / "compared.jsonl").read_text().splitlines():
        found |= json.loads(line)
    return found


def run(worker: str, cells: Mapping[str, Cell], work: Path, *, processes: int = 1) -> str:
    """Runs a worker on cells; returns the end of its output if it has failed."""
    file = work / "cases.json"
    cases = json.dumps({name: {"engine": cell.engine, **cell.keys} for name, cell in cells.items()})
    file.write_text(cases.replace("{work}", str(work)))
    command = ("-m", f"tests.engines.{worker}", file, work)
    try:
        done = warm.run(*command, processes=processes, merged=True, timeout_s=600 + 20 * len(cells))
    except subprocess.TimeoutExpired as error:
        return f"{error}: {error.output}"[-8000:]
    return done.stdout[-8000:] if done.returncode else ""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, work: Path) -> Differences:
    tests = [test for name, test in vars(request.module).items() if name.startswith("test_")]
    wanted = {name for test in tests for name in selected(request.session, test, "name")}
    return compare({name: cell for name, cell in CELLS.items() if name in wanted}, work)


def params(chosen: Callable[[Cell], Any] = bool) -> list[Any]:
    """The names of chosen cells as test parameters, each with the marks of its tier."""
    skipped = () if importlib.util.find_spec("torchao") else (pytest.mark.skip("fp8 needs torchao (extra fp8)"),)
    return [
        pytest.param(name, marks=(*cell.tier, *(skipped if "fp8" in cell.keys else ())))
        for name, cell in CELLS.items()
        if chosen(cell)
    ]


@pytest.mark.parametrize("name", params())
def test_a_layout_follows_one_process_and_exchanges_its_state_with_it(found: Differences, name: str) -> None:
    differences, keys = found[name], CELLS[name].keys
    kind = next((kind for kind in HALF if kind in keys), None)
    if kind is None:
        assert differences["gradient"] < FP32
        assert differences["norm"] < 1e-4  # includes later steps, when the weights already differ by a few roundings
    assert differences["continued"] == 0
    for quantity in ("loss", "evaluation", "requests", "resumed", "resumed by the reference"):
        assert differences[quantity] < (FP32 if kind is None else HALF[kind]), quantity


@pytest.mark.parametrize("name", params(lambda cell: "communication_data_type" in cell.keys))
def test_gradients_are_reduced_in_bf16(found: Differences, name: str) -> None:
    # every rank's gradient is rounded to bf16, and so is their sum, each by at most 2^-9
    assert 1e-4 < found[name]["gradient"] < 2**-8


@pytest.mark.parametrize("name", params(lambda cell: "fp16" in cell.keys))
def test_fp16_skips_the_steps_that_overflow_and_no_others(found: Differences, name: str) -> None:
    assert 0 < found[name]["skipped"] < 4  # of 4 steps


@pytest.mark.parametrize(
    ("name", "share", "tolerance"),
    [
        ("sharding, torch on 2: weights gathered per step", 1 / 2, 1e-6),
        ("sharding, torch on 4: hybrid", 1 / 2, 1e-6),
        ("sharding, torch on 4: experts", 1 / 4, 0.01),  # rows that 4 does not divide
        ("sharding, torch on 4: pp 2 x tp 2, untied", 1 / 4, 0.1),  # norms are on every tp rank
    ],
)
def test_a_rank_keeps_its_share_of_the_weights_and_asks_for_no_other_values(
    found: Differences, name: str, share: float, tolerance: float
) -> None:
    # layout_worker.make_engine asserts in every layout that the first values a rank has asked for are its shards
    assert found[name]["share"] == pytest.approx(share, rel=tolerance)


@pytest.mark.parametrize("name", ["experts, torch on 4: ep 2 x edp 2"])
def test_the_rows_of_the_busiest_rank_are_reported(found: Differences, name: str) -> None:
    mean = 32 * 2  # positions of a micro-batch of one sample, each for two experts
    assert mean < found[name]["rows"] <= 2 * mean


@pytest.mark.parametrize("name", params(lambda cell: cell.subject == "balance of experts"))
def test_the_logged_load_of_experts_is_that_of_one_process(found: Differences, name: str) -> None:
    # a rounding to bf16 or fp16 moves single tokens
    assert found[name]["balance"] < (0.2 if {*HALF} & CELLS[name].keys.keys() else FP32)


@pytest.mark.parametrize("name", params(lambda cell: "qk_clip" in cell.keys.get("optimizer", {}).get("params", ())))
def test_heads_are_clipped_and_the_largest_logit_is_that_of_one_process(found: Differences, name: str) -> None:
    assert found[name]["clipped"] > 0
    assert found[name]["logits"] < (2**-6 if "bf16" in CELLS[name].keys else FP32)  # bf16: two roundings


@pytest.mark.parametrize("name", params(lambda cell: cell.subject == "compiled"))
def test_decoder_layers_of_a_kind_are_one_graph(found: Differences, name: str) -> None:
    # of all layers together: one with gradients, one for the evaluation
    assert found[name]["graphs"] == GRAPHS.get(name.partition(": ")[2], 2)


@pytest.mark.parametrize("name", params(lambda cell: "fp8" in cell.keys))
def test_the_first_gradient_in_fp8_is_that_of_one_process(found: Differences, name: str) -> None:
    # of one tensor, the largest; a gradient in bf16 differs from one in fp8 by more than 1e-2 over all tensors. Other
    # roundings to fp8: shards of a tensor have scales of their own under tp; what is gathered is fp32 before, not bf16
    keys = CELLS[name].keys
    rounds_otherwise = "tp" in keys["parallel"] or keys["fp8"]["fsdp_all_gather"]
    assert found[name]["gradient"] < (0.2 if rounds_otherwise else 5e-3)


@pytest.mark.parametrize("name", params(lambda cell: cell.subject == "NVMe"))
def test_optimizer_states_are_on_the_disk(found: Differences, name: str, work: Path) -> None:
    assert found[name]
    assert list(work.glob("headrace-*/zero_stage_3/optimizer/rank1/*.swp"))


def test_cells_are_legal_and_no_two_are_the_same() -> None:
    cases = {json.dumps([cell.engine, cell.processes, cell.keys], sort_keys=True) for cell in CELLS.values()}
    assert len(cases) == len(CELLS)
    for cell in CELLS.values():
        keys = {key: value for key, value in cell.keys.items() if key != "steps"}
        assert not resolved({"engine": cell.engine, **keys}, processes=cell.processes).alone
