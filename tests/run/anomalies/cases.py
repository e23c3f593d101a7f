"""Runs a module on several ranks with a file of cases, and returns its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import warm
from tests.support import output_of


def run_cases(module: str, cases: Any, work: Path, *, processes: int) -> dict[str, Any]:
    """Runs MODULE CASES.json RESULTS.json on so many ranks; returns the content of RESULTS.json."""
    cases_file, results_file = work / f"cases{processes}.json", work / f"results{processes}.json"
    cases_file.write_text(json.dumps(cases))
    output_of(warm.run("-m", module, cases_file, results_file, processes=processes))
    results: dict[str, Any] = json.loads(results_file.read_text())
    return results
