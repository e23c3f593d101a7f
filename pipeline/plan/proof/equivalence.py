"""Decides whether a layout is equivalent to the reference run, within tolerance."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foundation.section import parse
from pipeline.config.batch import resolve_batch
from pipeline.config.sections.run import Config
from pipeline.plan.proof.case import Case, CaseResult
from pipeline.plan.proof.compare import Comparison, compare, first_gradient, relative_differences
from pipeline.plan.proof.tolerance import Tolerance, fp32_tolerance, half_tolerance

NOISE_FACTOR = 10.0
"""Largest allowed ratio of a layout's difference to that of noise on the initial values: a layout rounds differently in
each of 20 steps, and noise is added once."""


@dataclass(frozen=True)
class ProofResult:
    """Result of the comparison of one layout in one precision.

    Attributes:
        precision: fp32, bf16 or fp16.
        comparisons: the largest difference of every quantity.
        gradient: tensor -> relative difference of the first gradient.
        tolerance: allowed differences.
        error: last lines of output of a rank when a run failed; None otherwise.
        noise: largest difference, by quantity, of a reference run whose initial values have noise as large as rounding;
            None where there was no such run.
    """

    precision: str
    comparisons: tuple[Comparison, ...] = ()
    gradient: dict[str, float] | None = None
    tolerance: Tolerance | None = None
    error: str | None = None
    noise: dict[str, float] | None = None

    @property
    def inconclusive(self) -> bool:
        """Whether the curves differ, but no more than rounding explains.

        Then the first gradients are equal, and one plain process with noise as large as rounding differs from itself
        about as much.
        """
        failed = [each for each in self.comparisons if not each.passed]
        if self.error is not None or not failed or self.noise is None:
            return False
        curve = {name: NOISE_FACTOR * value for name, value in self.noise.items()}
        # a quantity compared after a resume is a loss, too
        return all(each.difference <= curve.get(each.quantity, curve["loss"]) for each in failed) and not any(
            each.quantity == "gradient" for each in failed
        )

    @property
    def passed(self) -> bool:
        """Whether the runs succeeded and every difference is within its tolerance."""
        return self.error is None and all(comparison.passed for comparison in self.comparisons)

    def wrong_gradients(self) -> list[tuple[str, float, float]]:
        """Tensors with gradients out of tolerance: (name, difference, tolerance), the largest difference first."""
        assert self.gradient is not None
        assert self.tolerance is not None
        allowed = self.tolerance.gradient
        rows = [(n, d, allowed.get(n, 0.0)) for n, d in self.gradient.items() if not d <= allowed.get(n, 0.0)]
        return sorted(rows, key=lambda row: -row[1])


def check_equivalence(
    layout: tuple[Case, CaseResult], reference: tuple[Case, CaseResult], *, fp32_reference: tuple[Case, CaseResult]
) -> ProofResult:
    """Compares a layout with the reference run.

    Args:
        layout: the case and its result.
        reference: the reference run in the layout's precision.
        fp32_reference: the reference run in fp32; the same as `reference` for a layout in fp32.
    """
    case, result = layout
    precision = precision_of(case)
    for each in (fp32_reference[1], reference[1], result):
        if each.error is not None:
            return ProofResult(precision, error=each.error)
    expected = first_gradient(*reference)
    if precision == "fp32":
        tolerance = fp32_tolerance(list(expected), tokens=tokens_of(case))
    else:
        own_error = relative_differences(expected, first_gradient(*fp32_reference))
        tolerance = half_tolerance(precision, own_error, tokens=tokens_of(case))
    gradient = relative_differences(first_gradient(case, result), expected)
    comparisons = compare(result, reference[1], gradient, tolerance)
    return ProofResult(precision, tuple(comparisons), gradient, tolerance)


def with_noise(
    result: ProofResult, perturbed: tuple[Case, CaseResult], reference: tuple[Case, CaseResult]
) -> ProofResult:
    """The result, with the differences between a reference with noise and the reference.

    Args:
        result: result of a layout, in the precision of both references.
        perturbed: the reference with noise on its initial values.
        reference: the reference run.
    """
    if perturbed[1].error is not None or result.tolerance is None:
        return result
    gradient = relative_differences(first_gradient(*perturbed), first_gradient(*reference))
    noise = compare(perturbed[1], reference[1], gradient, result.tolerance)
    return replace(result, noise={each.quantity: each.difference for each in noise})


def precision_of(case: Case) -> str:
    """The precision of a case: fp32, bf16 or fp16."""
    on = [name for name in ("bf16", "fp16") if case.config.get(name, {}).get("enabled")]
    return on[0] if on else "fp32"


def tokens_of(case: Case) -> int:
    """Tokens of a step."""
    config = parse(Config, case.config)
    parallel = config.parallel
    dp = case.processes // ((parallel.pp or 1) * (parallel.tp or 1) * (parallel.cp or 1))
    return resolve_batch(config, dp=dp).tokens
