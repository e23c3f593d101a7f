"""Remedies for a result that the gate does not accept: keys of the config, with values that it would accept.

No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil, floor, isfinite, log, log10
from typing import Any

Figures = Mapping[str, Mapping[str, Any]]
"""Consumer -> its figures, or {"not_run": reason}."""

_MORE_BITS = {
    **dict.fromkeys(("W4A16", "W8A8", "FP8"), "W8A16"),
    **dict.fromkeys(("Q2_K", "Q3_K_M", "Q4_0"), "Q4_K_M"),
    **dict.fromkeys(("Q4_K_M", "Q5_K_M"), "Q6_K"),
    "Q6_K": "Q8_0",
    "Q8_0": "F16",
    "F16": "F32",
    "BF16": "F32",
}
"""Scheme -> a scheme that rounds less."""
_FLOATS = {"float32", "bfloat16", "float16", "F32", "BF16", "F16"}


def of_quantization(figures: Figures, wrong: Sequence[str], *, scheme: str, worst: str | None) -> str:
    """Remedies for a quantization that was not accepted.

    Args:
        figures: consumer -> its figures, or {"not_run": reason}.
        wrong: names of the consumers that do not accept the result.
        scheme: name of the scheme in the config.
        worst: the decoder layer that loses most, where it is known.
    """
    ways = []
    if scheme == "F32" and all(_same_ids(figures[name]) for name in wrong):
        return " or ".join([*_without(figures, wrong), _ANOTHER_MODEL])
    if all(_same_ids(figures[name]) for name in wrong):
        needed = max(_needed_kl(figures[name]) for name in wrong)
        if isfinite(needed):
            ways.append(f'"max_mean_kl": {_rounded_up(needed)}, if that is near enough')
        if scheme in _MORE_BITS:
            ways.append(f'"scheme": "{_MORE_BITS[scheme]}"')
        if worst is not None:
            layer = "re:" + worst.replace(".", r"\.") + r"\..*"
            ways.append(f'{json.dumps(layer)} added to "skip"')
    return " or ".join([*ways, *_without(figures, wrong)]) or _OTHER_PROGRAM


_ANOTHER_MODEL = (
    "a scheme of a Hugging Face folder, e.g. W8A16: F32 rounds nothing, so that the program computes another model than"
    " config.json describes, which no bound and no skipped layer changes"
)
_OTHER_PROGRAM = "another kind of file: a GGUF type instead of a Hugging Face folder, or the other way around"


def of_pruning(figures: Figures, wrong: Sequence[str], *, scheme: str) -> str:
    """Remedies for a pruning that was not accepted.

    Args:
        figures, wrong: the arguments of `of_quantization`.
        scheme: dtype of the weights.
    """
    ways = [] if scheme == "float32" else ['"dtype": "float32"']
    return " or ".join([*ways, *_without(figures, wrong)]) or "a larger target"


def of_verification(figures: Figures, wrong: Sequence[str]) -> str:
    """Remedies for a model that was accepted when written, but not by `headrace compress verify`."""
    others = _accepting(figures, wrong)
    ways = [f"--consumers {','.join(others)}"] if others else []
    return " or ".join(["make it again: its files or the programs have changed since it was accepted", *ways])


def _accepting(figures: Figures, wrong: Sequence[str]) -> list[str]:
    return sorted(name for name, found in figures.items() if "not_run" not in found and name not in wrong)


def _without(figures: Figures, wrong: Sequence[str]) -> list[str]:
    """The remedy to leave out the consumers that do not accept the result, if other consumers do."""
    others = _accepting(figures, wrong)
    return [f'"consumers": {json.dumps(others)}, if it is served by no other'] if others else []


def _same_ids(found: Mapping[str, Any]) -> bool:
    return bool(found["texts_with_equal_ids"] == found["texts"])


def _needed_kl(found: Mapping[str, Any]) -> float:
    """The smallest `max_mean_kl` that admits these figures; see `bound_within`."""
    ratio = found["perplexity"] / found["original_perplexity"]
    return max(float(found["mean_kl"]), log(ratio) if ratio > 0 else 0.0)


def _rounded_up(value: float) -> float:
    """Rounds up to two digits, after adding a twentieth: a program may sum in another order the next time."""
    wanted = 1.05 * value
    unit = 10.0 ** (floor(log10(wanted)) - 1)
    return float(f"{ceil(wanted / unit) * unit:.2g}")
