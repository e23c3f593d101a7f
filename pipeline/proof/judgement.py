"""Whether a layout is what it should be: its outcome against the reference's."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.section import parse
from pipeline.config.batch import resolve_batch
from pipeline.config.schema import Config
from pipeline.proof.case import Case, CaseResult
from pipeline.proof.compare import Gap, compare, differences, first_gradient
from pipeline.proof.tolerance import Tolerance, fp32, half


@dataclass(frozen=True)
class ProofResult:
    """What was found of one layout in one precision.

    Attributes:
        precision: fp32, bf16 or fp16.
        gaps: the largest difference of every kind.
        gradient: tensor -> relative difference of the first gradient.
        tolerance: what was allowed.
        failed: what a rank said last when the run failed; None when it did not.
    """

    precision: str
    gaps: tuple[Gap, ...] = ()
    gradient: dict[str, float] | None = None
    tolerance: Tolerance | None = None
    failed: str | None = None

    @property
    def holds(self) -> bool:
        """The run went well, and every difference is within its tolerance."""
        return self.failed is None and all(gap.holds for gap in self.gaps)

    def beyond(self) -> list[tuple[str, float, float]]:
        """Tensors whose gradients are too far off: name, difference, tolerance; the worst first."""
        assert self.gradient is not None
        assert self.tolerance is not None
        allowed = self.tolerance.gradient
        rows = [(n, d, allowed.get(n, 0.0)) for n, d in self.gradient.items() if not d <= allowed.get(n, 0.0)]
        return sorted(rows, key=lambda row: -row[1])


def judge(
    layout: tuple[Case, CaseResult], reference: tuple[Case, CaseResult], *, exact: tuple[Case, CaseResult]
) -> ProofResult:
    """Compares a layout with the plain reference.

    Args:
        layout: the case and what it gave.
        reference: the plain reference in the layout's precision.
        exact: the plain reference in fp32; the same as `reference` for a layout in fp32.
    """
    case, outcome = layout
    precision = precision_of(case)
    for each in (exact[1], reference[1], outcome):
        if each.failed is not None:
            return ProofResult(precision, failed=each.failed)
    expected = first_gradient(*reference)
    if precision == "fp32":
        tolerance = fp32(list(expected), tokens=tokens_of(case))
    else:
        own_error = differences(expected, first_gradient(*exact))
        tolerance = half(precision, own_error, tokens=tokens_of(case))
    gradient = differences(first_gradient(case, outcome), expected)
    gaps = compare(outcome, reference[1], gradient, tolerance)
    return ProofResult(precision, tuple(gaps), gradient, tolerance)


def precision_of(case: Case) -> str:
    """fp32, bf16 or fp16."""
    on = [name for name in ("bf16", "fp16") if case.config.get(name, {}).get("enabled")]
    return on[0] if on else "fp32"


def tokens_of(case: Case) -> int:
    """Tokens of a step."""
    config = parse(Config, case.config)
    parallel = config.parallel
    dp = case.processes // ((parallel.pp or 1) * (parallel.tp or 1) * (parallel.cp or 1))
    return resolve_batch(config, dp=dp).tokens
