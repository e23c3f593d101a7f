"""Runs cells of the matrix and their references in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.proof.case import Case, CaseResult, read_outcome, write_cases
from pipeline.proof.judgement import ProofResult, judge
from pipeline.proof.tokens import write_tokens
from tests import warm
from tests.parity.matrix import SAVED, SEQUENCE, VOCABULARY, Values, case_of, reference_of


def cases_of(cells: Iterable[Values], tokens: str) -> tuple[list[Case], dict[str, tuple[str, str]]]:
    """The cases to run, references first, and for every cell's case the names of its reference and the fp32 one.

    Every cell, when it is done, goes on from the state of the cell before it that follows the same curve: so that
    states travel between layouts of all kinds.
    """
    references: dict[str, Case] = {}
    cases: list[Case] = []
    against: dict[str, tuple[str, str]] = {}
    before: dict[str, str] = {}
    for values in cells:
        reference = reference_of(values, tokens)
        exact = reference_of({**values, "precision": "fp32"}, tokens)
        references |= {reference.name: reference, exact.name: exact}
        case = case_of(values, tokens, again=(before.get(reference.name, reference.name), SAVED))
        before[reference.name] = case.name
        against[case.name] = (reference.name, exact.name)
        cases.append(case)
    return [*references.values(), *cases], against


def run(cells: list[Values], work: Path) -> dict[str, ProofResult]:
    """Runs cells in one launch; the verdicts by the cells' names."""
    tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=12_000, longest=2 * SEQUENCE)
    cases, against = cases_of(cells, str(tokens))
    known = launch(cases, work)
    return {name: judge(known[name], known[a], exact=known[b]) for name, (a, b) in against.items()}


def launch(cases: list[Case], work: Path) -> dict[str, tuple[Case, CaseResult]]:
    """Runs cases in one launch; every case and what it gave, by name."""
    write_cases(cases, work / "cases.json")
    done = warm.run("-m", "pipeline.proof.worker", work / "cases.json", work, merged=True, timeout_s=86_400)
    assert done.returncode == 0, done.stdout[-4000:]
    return {case.name: (case, read_outcome(work / case.name)) for case in cases}


def told(name: str, verdict: ProofResult) -> str:
    """A verdict in words, for a test that fails."""
    if verdict.failed is not None:
        return f"{name}: {verdict.failed}"
    gaps = [f"{g.what} {g.difference:.1e} (allowed {g.tolerance:.1e}, {g.at})" for g in verdict.gaps if not g.holds]
    wrong = [f"{tensor} {off:.1e}" for tensor, off, _ in verdict.beyond()[:8]]
    return f"{name}: {'; '.join(gaps)}" + (f"\n  gradients: {', '.join(wrong)}" if wrong else "")
