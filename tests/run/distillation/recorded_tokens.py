"""A distillation whose every rank also writes what its student has sampled: step, samples' indices, tokens.

python -m tests.run.distillation.recorded_tokens FOLDER --config F
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from foundation.cli import guarded
from pipeline.distill import main
from pipeline.run.distillation.on_policy import OnPolicySamples
from pipeline.runtime.launch import detect


def record(folder: Path) -> None:
    """Makes every step append a line to `folder`/RANK.jsonl."""
    continued: Any = OnPolicySamples._continued

    def recorded(self: Any, batch: Any, rows: Tensor, **options: Any) -> Tensor:
        tokens: Tensor = continued(self, batch, rows, **options)
        line = {"step": options["step"], "samples": self._rows[rows.numpy()].tolist(), "tokens": tokens.tolist()}
        with (folder / f"{detect().rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return tokens

    OnPolicySamples._continued = recorded  # type: ignore[method-assign]


def read(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(step, sample) -> its tokens, of all ranks, which must agree where they have the same sample."""
    found: dict[tuple[int, int], list[int]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            for sample, tokens in zip(line["samples"], line["tokens"], strict=True):
                assert found.setdefault((line["step"], sample), tokens) == tokens
    return found


if __name__ == "__main__":
    into = Path(sys.argv.pop(1))
    into.mkdir(parents=True, exist_ok=True)
    record(into)
    sys.exit(guarded(main))
