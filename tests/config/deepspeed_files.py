"""Public DeepSpeed files as keys and values (`tests/fixtures/deepspeed_files.json`), each completed by what is ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foundation.configfile import set_value
from tests.conftest import ROOT, tiny_config, write_config

FILES: dict[str, dict[str, Any]] = {
    each["source"]: each["keys"]
    for each in json.loads((ROOT / "tests/fixtures/deepspeed_files.json").read_text())["files"]
}
"""Source (repository@commit:path) -> dotted key -> value."""


def write(source: str, folder: Path, *, tokens: Path) -> Path:
    """The file, with a tiny model, its data and a run of two steps."""
    ours = tiny_config(tokens, folder / "run")
    raw: dict[str, Any] = {key: ours[key] for key in ("model", "data", "run")}
    raw["run"]["steps"] = 2
    for key, value in FILES[source].items():
        set_value(raw, key, value)
    return write_config(folder / "ds.json", raw)


def processes(source: str) -> int:
    """The fewest processes that the file can run on."""
    return int(FILES[source].get("tensor_parallel.autotp_size", 1))
