"""Cases that a module tries on several ranks, and what it has found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import warm


def try_cases(module: str, cases: Any, work: Path, *, processes: int) -> dict[str, Any]:
    """Hands a module's ranks a file of cases, and reads the file of results that they write."""
    given, results = work / f"cases{processes}.json", work / f"results{processes}.json"
    given.write_text(json.dumps(cases))
    done = warm.run("-m", module, given, results, processes=processes)
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-40_000:]}"  # the first to fail may not be the last
    found: dict[str, Any] = json.loads(results.read_text())
    return found
