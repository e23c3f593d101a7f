"""Runs cells of the parity matrix and their reference runs in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.plan.proof.case import Case, CaseResult, read_result, write_cases
from pipeline.plan.proof.equivalence import ProofResult, check_equivalence
from pipeline.plan.proof.tokens import write_tokens
from tests import warm
from tests.parity.matrix import LONG, SEQUENCE, VOCABULARY, RunLength, Values, case_of, reference_of
from tests.support import output_of


def cases_of(
    cells: Iterable[Values], tokens: str, *, length: RunLength = LONG
) -> tuple[list[Case], dict[str, tuple[str, str]]]:
    """The cases to run, references first, and the names of each cell's reference and fp32 reference.

    At its end, every cell resumes from the state of the previous cell with the same reference, so that states are
    exchanged between layouts of all kinds.
    """
    references: dict[str, Case] = {}
    cases: list[Case] = []
    reference_names: dict[str, tuple[str, str]] = {}
    previous: dict[str, str] = {}
    for values in cells:
        reference = reference_of(values, tokens, length=length)
        fp32 = reference_of({**values, "precision": "fp32"}, tokens, length=length)
        references |= {reference.name: reference, fp32.name: fp32}
        origin = (previous.get(reference.name, reference.name), length.saved)
        case = case_of(values, tokens, length=length, resume_from=origin)
        previous[reference.name] = case.name
        reference_names[case.name] = (reference.name, fp32.name)
        cases.append(case)
    return [*references.values(), *cases], reference_names


def run(cells: list[Values], work: Path, *, length: RunLength = LONG) -> dict[str, ProofResult]:
    """Runs cells in one launch; the results by name of the cell."""
    tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=12_000, longest=2 * SEQUENCE)
    cases, reference_names = cases_of(cells, str(tokens), length=length)
    known = launch(cases, work)
    return {
        name: check_equivalence(known[name], known[reference], fp32_reference=known[fp32])
        for name, (reference, fp32) in reference_names.items()
    }


def launch(cases: list[Case], work: Path) -> dict[str, tuple[Case, CaseResult]]:
    """Runs cases in one launch; every case and its result, by name."""
    write_cases(cases, work / "cases.json")
    output_of(warm.run("-m", "pipeline.plan.proof.worker", work / "cases.json", work, merged=True, timeout_s=86_400))
    return {case.name: (case, read_result(work / case.name)) for case in cases}


def failure_text(name: str, result: ProofResult) -> str:
    if result.error is not None:
        return f"{name}: {result.error}"
    failed = [
        f"{each.quantity} {each.difference:.1e} (tolerance {each.tolerance:.1e}, {each.location})"
        for each in result.comparisons
        if not each.passed
    ]
    wrong = [f"{tensor} {difference:.1e}" for tensor, difference, _ in result.wrong_gradients()[:8]]
    return f"{name}: {'; '.join(failed)}" + (f"\n  gradients: {', '.join(wrong)}" if wrong else "")
