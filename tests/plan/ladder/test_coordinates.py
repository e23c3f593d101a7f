"""`headrace ladder --coordinate-check` and `--rate-check` run the checks, and refuse what does not go with them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from pipeline.plan.ladder.command import add_arguments, run
from pipeline.plan.proof.tokens import write_tokens
from tests.conftest import write_config
from tests.plan.ladder.coordinate_check.test_coordinate_check import config


def parsed(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    tokens = write_tokens(tmp_path / "tokens", vocab_size=128, tokens=12_000, longest=64)
    raw = config(str(tokens)).model_dump(mode="json", exclude_unset=True, by_alias=True)
    raw["run"]["dir"] = str(tmp_path / "run")
    return Path(write_config(tmp_path / "c.json", raw))


def test_the_ladder_s_check_writes_figures_and_a_picture(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", config_file, "--steps", 5, "--step-tokens", 256)
    code = run(parsed(*words, "--coordinate-check", "--widths", "32,64", "--depths", "2", "--json"))
    # logits of so narrow models on so few tokens are not flat: -0.46 was seen, and 0.15 is allowed
    assert code == 1
    written = tmp_path / "run-ladder"
    found = json.loads((written / "coordinate_check.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    slopes = {(each["parametrization"], each["place"], each["dimension"]): each["slope"] for each in found["lines"]}
    assert slopes["standard", "residual stream", "width"] > 0.6
    assert slopes["completep", "residual stream", "depth"] is None  # one depth has no slope
    assert "residual stream" in (written / "coordinate_check.svg").read_text()
    assert not (tmp_path / "run").exists()


def test_the_ladder_s_rate_check_writes_figures_and_a_picture(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", config_file, "--steps", 5)
    assert run(parsed(*words, "--rate-check", "--widths", "32,64", "--rates", "4e-3,1e-4", "--json")) == 0
    written = tmp_path / "run-ladder"
    found = json.loads((written / "rate_check.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    sizes = [(each["parametrization"], each["width"], each["best"]) for each in found["sweeps"]]
    assert sizes == [(name, width, 4e-3) for width in (32, 64) for name in ("standard", "completep")]
    assert "peak learning rate" in (written / "rate_check.svg").read_text()


def test_one_size_has_no_slope_and_passes(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--coordinate-check", "--widths", "32", "--depths", "2", "--steps", 1, "--step-tokens", 1)
    assert run(parsed("--config", config_file, *words)) == 0
    assert capsys.readouterr().out.endswith("CompleteP is flat\n")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--widths", "32,64"), "--widths"),
        (("--steps", "5"), "--steps"),
        (("--rates", "1e-3"), "--rates"),
        (("--step-tokens", "512"), "--step-tokens"),
        (("--rate-check", "--rates", "1e-3", "--step-tokens", "512"), "--step-tokens"),
        (("--rate-check",), "--rates"),
        (("--rate-check", "--rates", "1e-3,-1"), "--rates"),
        (("--rate-check", "--rates", "1e-3", "--plan"), "--plan"),
        (("--coordinate-check", "--rate-check", "--rates", "1e-3"), "--rate-check"),
        (("--coordinate-check", "--rates", "1e-3"), "--rates"),
        (("--coordinate-check", "--plan"), "--plan"),
        (("--coordinate-check", "--slurm"), "--slurm"),
        (("--coordinate-check", "--laws"), "--laws"),
        (("--coordinate-check", "--widths", "32;64"), "--widths"),
        (("--coordinate-check", "--depths", "0,2"), "--depths"),
        (("--coordinate-check", "--steps", "0"), "--steps"),
        (("--coordinate-check", "--seeds", "0"), "--seeds"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_the_config(words: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        run(parsed("--config", "nowhere.json", *words))
