"""Examples: custom loops differ from the plain one in four lines; the coordinate check tells what transfers."""

from __future__ import annotations

import difflib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from examples.coordinate_check.__main__ import main
from examples.coordinate_check.check import Line, coordinate_check, slope
from examples.coordinate_check.picture import save_coordinates, save_rates
from examples.coordinate_check.rates import sweep
from examples.coordinate_check.sizes import Grid, Size, resized
from examples.coordinate_check.text import text_lines
from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.sections.run import Config
from pipeline.plan.proof.tokens import write_tokens
from tests import warm
from tests.conftest import ROOT, write_config
from tests.support import output_of

EXAMPLES = ROOT / "examples"
PAIRS = sorted(path.stem for path in EXAMPLES.glob("own_loop*.py") if not path.stem.endswith("_plain"))
ENGINES = ("torch", "deepspeed")


def losses_printed(script: str, *arguments: str, processes: int = 1) -> list[float]:
    said = output_of(warm.run(EXAMPLES / f"{script}.py", *arguments, cwd=ROOT, processes=processes))
    return [float(number) for number in re.findall(r"^(?:loss|evaluated) (\S+)$", said, re.MULTILINE)]


@pytest.fixture(scope="module", params=PAIRS)
def example(request: pytest.FixtureRequest) -> tuple[str, list[float]]:
    """An example, and the losses of its plain loop."""
    name: str = request.param
    return name, losses_printed(f"{name}_plain")


def code(path: Path) -> list[str]:
    """The lines of a script without its docstring and empty lines."""
    _, _, rest = path.read_text().partition('"""\n')
    return [line for line in rest.splitlines() if line.strip()]


def test_every_way_has_an_example() -> None:
    assert PAIRS == ["own_loop", "own_loop_batchnorm", "own_loop_hf"]


@pytest.mark.parametrize("name", PAIRS)
def test_at_most_four_lines_differ_from_the_plain_loop(name: str) -> None:
    delta = list(difflib.ndiff(code(EXAMPLES / f"{name}_plain.py"), code(EXAMPLES / f"{name}.py")))
    assert sum(line.startswith("+ ") for line in delta) == 4, delta
    # what is taken away is replaced: nothing of the plain loop is lost but these two
    assert sum(line.startswith("- ") for line in delta) == 2, delta


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_the_losses_are_those_of_the_plain_loop(example: tuple[str, list[float]], engine: str, processes: int) -> None:
    name, expected = example
    assert len(expected) >= 8
    assert losses_printed(name, "--config", f"examples/{engine}.json", processes=processes) == pytest.approx(
        expected, rel=1e-5
    )


def test_the_docs_show_the_lines_that_differ() -> None:
    page = (ROOT / "docs/how-to/own-loop.md").read_text()
    delta = difflib.ndiff(code(EXAMPLES / "own_loop_plain.py"), code(EXAMPLES / "own_loop.py"))
    for line in delta:
        if line[0] in "+-":
            assert f"{line[0]} {line[2:]}" in page, line


ADAMW = {"type": "AdamW", "params": {"lr": 4e-3, "betas": [0.9, 0.95]}}
MUON = {"type": "Muon", "params": {"lr": 4e-3}}


def config(tokens: str = "tokens", *, optimizer: dict[str, Any] = ADAMW, **model: Any) -> Config:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    raw = {
        "model": {
            "config": {"model_type": "llama", **sizes, "num_hidden_layers": 2, "initializer_range": 0.05},
            "parametrization": "completep",
            "base": base,
            **model,
        },
        "data": {"sources": [{"path": tokens}], "sequence_length": 32},
        "compile": {"enabled": False},
        "train_batch_size": 8,
        "optimizer": optimizer,
        "gradient_clipping": 0,
        "run": {"dir": "run", "steps": 5},
    }
    return parse(Config, raw)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokens(tmp_path_factory.mktemp("c") / "tokens", vocab_size=128, tokens=12_000, longest=64))


@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["AdamW", "Muon"])
def test_over_the_width_completep_is_flat_and_the_standard_parametrization_grows(
    optimizer: dict[str, Any], tokens: str, tmp_path: Path
) -> None:
    grid = Grid(widths=(32, 64, 128), depths=(2,))
    lines = coordinate_check(config(tokens, optimizer=optimizer), grid, steps=5, seeds=1, step_tokens=256)
    found = {(line.parametrization, line.place): line.slope for line in lines if line.dimension == "width"}
    assert abs(found["completep", "residual stream"]) < 0.25  # 0.04 was seen with larger widths and three seeds
    assert found["standard", "residual stream"] > 0.6
    assert found["standard", "queries"] > 0.3
    save_coordinates(lines, tmp_path / "check.svg")
    text = (tmp_path / "check.svg").read_text()
    assert all(word in text for word in ("CompleteP", "standard", "residual stream", "depth"))


def test_a_sweep_trains_the_base_model_once_and_names_the_best_rate(tokens: str, tmp_path: Path) -> None:
    said: list[str] = []
    grid = Grid(widths=(32, 64), depths=())
    sweeps = sweep(config(tokens), grid=grid, rates=(4e-3, 1e-4), steps=6, seeds=1, report=said.append)
    assert [(each.parametrization, each.size) for each in sweeps] == [
        ("standard", Size(32, 2)),
        ("completep", Size(32, 2)),
        ("standard", Size(64, 2)),
        ("completep", Size(64, 2)),
    ]
    assert len(said) == 6  # two rates for the base model, and two for each parametrization of the other
    assert sweeps[0].losses == sweeps[1].losses
    assert all(each.best == 4e-3 for each in sweeps)
    save_rates(sweeps, tmp_path / "rates.svg")
    assert "peak learning rate" in (tmp_path / "rates.svg").read_text()


def test_a_power_law_has_its_exponent_as_slope() -> None:
    assert slope((64, 128, 256), (3.0, 6.0, 12.0)) == pytest.approx(1.0)
    assert math.isnan(slope((64, 128), (0.0, 1.0)))


@pytest.mark.parametrize(("dimension", "flat"), [("width", False), ("depth", True)])
def test_what_layers_do_not_learn_alike_may_shrink_with_depth_alone(dimension: str, flat: bool) -> None:
    assert Line("completep", "residual stream", dimension, (2, 8), (2.0, 1.0)).flat is flat
    assert not Line("completep", "logits", dimension, (2, 8), (2.0, 1.0)).flat
    assert not Line("completep", "residual stream", dimension, (2, 8), (1.0, 2.0)).flat


def test_what_shrinks_with_depth_is_printed_and_not_called_flat() -> None:
    text = list(text_lines([Line("completep", "residual stream", "depth", (2, 8), (2.0, 1.0))]))
    assert text[-2].startswith("shrinks with depth: residual stream, slope -0.50")
    assert text[-1] == "CompleteP does not grow"
    text = list(text_lines([Line("completep", "residual stream", "depth", (2, 8), (1.0, 1.1))]))
    assert text[-1] == "CompleteP is flat"


@pytest.mark.parametrize(("step_tokens", "accumulated"), [(1, 1), (256, 1), (257, 2), (4096, 16)])
def test_steps_have_as_many_of_the_config_s_batches_as_their_tokens_need(step_tokens: int, accumulated: int) -> None:
    run = resized(config(), Size(64, 2), parametrization="completep", lr=None, seed=0, steps=1, step_tokens=step_tokens)
    assert (run.batch.micro, run.batch.accumulation) == (8, accumulated)


def test_the_proportions_of_the_base_model_are_kept() -> None:
    run = resized(config(), Size(96, 3), parametrization="completep", lr=1e-2, seed=5, steps=7)
    model = run.config.model.config
    assert {key: model[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")} == {
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_hidden_layers": 3,
    }
    assert (model["num_attention_heads"], model["num_key_value_heads"]) == (6, 3)
    assert (run.config.optimizer.params.lr, run.config.run.seed, run.steps) == (1e-2, 5, 7)
    base = config().model.base
    assert base.num_hidden_layers is None
    # the config's own two layers: with those of the resized model nothing would be scaled over the depth
    assert run.config.model.base == base.model_copy(update={"num_hidden_layers": 2})


@pytest.mark.parametrize("width", [40, 48])
def test_a_width_of_another_head_size_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match="--widths"):
        resized(config(), Size(width, 2), parametrization="completep", lr=None, seed=0, steps=1)


def test_a_config_without_completep_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.parametrization"):
        coordinate_check(config(parametrization="standard", base=None), Grid((32,), (2,)), steps=1, seeds=1)


@pytest.fixture
def config_words(tokens: str, tmp_path: Path) -> list[str]:
    raw = config(tokens).model_dump(mode="json", exclude_unset=True, by_alias=True)
    return ["--config", str(write_config(tmp_path / "c.json", raw)), "--output", str(tmp_path / "check")]


def test_the_script_writes_slopes_and_a_picture(config_words: list[str], tmp_path: Path) -> None:
    sizes = ("--widths", "32,64", "--depths", "2", "--steps", "5", "--step-tokens", "256")
    # logits of so narrow models on so few tokens are not flat: -0.46 was seen, and 0.15 is allowed
    assert main(["coordinates", *config_words, *sizes]) == 1
    found = json.loads((tmp_path / "check/coordinates.json").read_text())
    slopes = {(each["parametrization"], each["place"], each["dimension"]): each["slope"] for each in found["lines"]}
    assert slopes["standard", "residual stream", "width"] > 0.6
    assert slopes["completep", "residual stream", "depth"] is None  # one depth has no slope
    assert "residual stream" in (tmp_path / "check/coordinates.svg").read_text()


def test_the_script_writes_the_best_rates_and_a_picture(config_words: list[str], tmp_path: Path) -> None:
    assert main(["rates", *config_words, "--widths", "32,64", "--steps", "5", "--rates", "4e-3,1e-4"]) == 0
    found = json.loads((tmp_path / "check/rates.json").read_text())
    sizes = [(each["parametrization"], each["width"], each["best"]) for each in found["sweeps"]]
    assert sizes == [(name, width, 4e-3) for width in (32, 64) for name in ("standard", "completep")]
    assert "peak learning rate" in (tmp_path / "check/rates.svg").read_text()


def test_one_size_has_no_slope_and_passes(config_words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--widths", "32", "--depths", "2", "--steps", "1", "--step-tokens", "1")
    assert main(["coordinates", *config_words, *words]) == 0
    assert capsys.readouterr().out.endswith("CompleteP is flat\n")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("rates",), "--rates"),
        (("rates", "--rates", "1e-3,-1"), "--rates"),
        (("rates", "--rates", "1e-3,0"), "--rates"),
        (("coordinates", "--seeds", "0"), "--seeds"),
        (("coordinates", "--widths", "32;64"), "--widths"),
        (("coordinates", "--depths", "0,2"), "--depths"),
        (("coordinates", "--steps", "0"), "--steps"),
    ],
)
def test_options_that_are_no_numbers_above_zero_are_refused_before_the_config(
    words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--config", "nowhere.json"])
    assert option in capsys.readouterr().err.splitlines()[-1]
