"""Compares the hyperparameters of a checkpoint's optimizer with those of a run, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeline.checkpoint.importing.source import SourceCheckpoint
from pipeline.config.sections.optimizers import OptimizerParams

_SAME = 1e-6
"""Largest relative difference of learning rates that count as equal: formulas may differ in rounding."""
_COMPARED = ("betas", "eps", "momentum", "nesterov")
_AS_HERE = {"amsgrad": False, "maximize": False, "dampening": 0, "bias_correction": True, "lr_mult": 1}
"""Other hyperparameters of optimizers, each with the value at which updates equal those of a run."""
_NO_EFFECT = {
    *("params", "param_names", "name", "step", "initial_lr", "foreach", "fused", "capturable", "differentiable"),
    *("lr", "weight_decay", "decoupled_weight_decay", "wd_mult", "pre_wd_mult", "pre_lr_mult", "max_lr", "min_lr"),
    *("start_wd", "end_wd", "is_expert_parallel", "is_decoupled_lr", "is_vision_model_param", "default_config"),
}
"""Keys that are compared elsewhere or change no update; Megatron's are already part of its rates and decays."""


def compare_rates(
    source: SourceCheckpoint, params: OptimizerParams, *, lr: float, parameters: Sequence[str]
) -> Iterator[str]:
    """Compares the run's learning rate of the next step with the checkpoint's; yields lines for people.

    Args:
        source: the checkpoint.
        params: hyperparameters of the run's optimizer.
        lr: the run's learning rate of the next step, by its schedule.
        parameters: names of all parameters.
    """
    groups = [(_number(group["lr"]), names) for group, names in _groups(source, parameters) if "lr" in group]
    ours = [*params.rates_at(lr).values()]
    rates = sorted({rate for rate, _ in groups if rate is not None})
    if not groups:
        return
    if None in (rate for rate, _ in groups) or not rates:
        yield "learning rate: the checkpoint's is not readable; compare it with the scheduler section"
        return
    of = {rate: [name for each, names in groups if each == rate for name in names] for rate in rates}
    named = len(rates) > 1 and all(of.values())
    shown = ", ".join(f"{rate:.6g}{f' ({_some(of[rate])})' if named else ''}" for rate in rates)
    same = all(any(abs(rate - own) <= _SAME * max(abs(own), abs(rate)) for own in ours) for rate in rates)
    verdict = "" if same else "; DIFFERENT: the scheduler section decides"
    yield f"learning rate of step {source.step + 1:,}: {lr:.6g} by the config, {shown} by its schedule{verdict}"


def compare_params(
    source: SourceCheckpoint, params: OptimizerParams, *, decays: Mapping[str, float], l2: bool
) -> Iterator[str]:
    """Compares the other hyperparameters of both optimizers; yields a line per difference.

    Args:
        source: the checkpoint.
        params: hyperparameters of the run's optimizer.
        decays: parameter name -> the run's weight decay.
        l2: whether the run's weight decay is added to the gradient.
    """
    for name in _COMPARED:
        ours, theirs = getattr(params, name, None), _values(source, name)
        if ours is not None and theirs and theirs != [_plain(ours)]:
            shown = ", ".join("not readable" if each is None else str(each) for each in theirs)
            yield f"differs: optimizer.params.{name}: checkpoint {shown}, config {ours}; the config's is used"
    yield from _compare_decays(source, decays, l2=l2)
    for name in sorted({key for group in source.groups for key in group} - _NO_EFFECT - {*_COMPARED}):
        theirs = _values(source, name)
        if name not in _AS_HERE or theirs != [_AS_HERE[name]]:
            yield f"differs: the checkpoint's optimizer has {name} {', '.join(map(str, theirs))}, and a run does not"


def _compare_decays(source: SourceCheckpoint, decays: Mapping[str, float], *, l2: bool) -> Iterator[str]:
    """Compares weight decays, by parameter if the checkpoint records which group a parameter is in."""
    every = [(group, names) for group, names in _groups(source, [*decays]) if "weight_decay" in group]
    groups = [(_number(group["weight_decay"]), group, names) for group, names in every]
    if None in (decay for decay, *_ in groups):
        yield "weight decay: the checkpoint's is not readable; compare it with optimizer.params.weight_decay"
        return
    theirs = {name: decay for decay, _, names in groups for name in names}
    if groups and not theirs:  # one of two groups usually has no weight decay: norms and biases
        found = sorted(decay for decay, *_ in groups if decay is not None)
        theirs = {name: found[-1] if own else found[0] for name, own in decays.items()}
    pairs = {(decay, decays[name]) for name, decay in theirs.items() if name in decays and decay != decays[name]}
    for decay, own in sorted(pairs, key=str):
        names = [name for name in decays if (theirs.get(name), decays[name]) == (decay, own)]
        yield f"differs: weight decay of {_some(names)}: checkpoint {decay}, config {own:g}; the config's is used"
    if not l2 and any(decay and group.get("decoupled_weight_decay") is False for decay, group, _ in groups):
        yield (
            "differs: weight decay: the checkpoint's Adam adds it to the gradient (L2), and its moments contain it; a"
            " run's is decoupled (AdamW)"
        )


def _groups(source: SourceCheckpoint, parameters: Sequence[str]) -> list[tuple[Mapping[str, Any], Sequence[str]]]:
    """Returns the non-empty groups with their parameter names; names are empty if the checkpoint records none."""
    if len(source.groups) == 1:
        return [(source.groups[0], parameters)]
    if not any(source.members):
        return [(group, ()) for group in source.groups]
    return [(group, names) for group, names in zip(source.groups, source.members, strict=True) if names]


def _values(source: SourceCheckpoint, name: str) -> list[Any]:
    """Returns the distinct values of a hyperparameter over the groups."""
    return list(dict.fromkeys(_plain(group[name]) for group in source.groups if name in group))


def _plain(value: Any) -> Any:
    """Converts a value to a form that can be compared and hashed."""
    if isinstance(value, Tensor):
        value = value.tolist()
    return (
        tuple(map(_plain, value)) if isinstance(value, list | tuple) else str(value) if _is_not_plain(value) else value
    )


def _is_not_plain(value: Any) -> bool:
    return not isinstance(value, int | float | str | None)


def _number(value: Any) -> float | None:
    value = _plain(value)
    return float(value) if isinstance(value, int | float) else None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
