"""Models are compared on tokens with a loss mask, too: they have no bits per byte, and "-" stands in their place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import warm
from tests.evaluation.heldout.small import SEQUENCE, every_third, make_masked
from tests.support import output_of


@pytest.mark.integration  # numbers of masked tokens: evaluation/test_commands.py
def test_bits_per_byte_are_absent_with_a_loss_mask(model: Path, tokens: Path, run_dir: Path, tmp_path: Path) -> None:
    masked = make_masked(tmp_path / "masked", tokens, every_third)
    data = ["--data", masked, "--sequence-length", SEQUENCE, "--max-tokens", 320]
    named = ["--run", f"a={run_dir}", "--model", f"small={model}"]
    said = output_of(warm.run("-m", "pipeline", "report", tmp_path / "r.html", *named, *data))
    assert re.search(r"small .* -  ", said)
    assert "<td>-</td>" in (tmp_path / "r.html").read_text()


@pytest.mark.integration  # numbers of masked tokens: evaluation/test_commands.py
def test_a_model_is_quantized_on_masked_tokens(model: Path, tokens: Path, tmp_path: Path) -> None:
    masked = make_masked(tmp_path / "masked", tokens, every_third)
    data = {"path": str(masked), "sequence_length": SEQUENCE}
    config = {"model": str(model), "output": str(tmp_path / "small"), "scheme": "W8A16", "data": data}
    (tmp_path / "c.json").write_text(json.dumps(config))
    said = output_of(warm.run("-m", "pipeline.quantize", "--config", tmp_path / "c.json"))
    assert re.search(r"bits per byte .* - .* - ", said)
