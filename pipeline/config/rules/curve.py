"""The config fields that determine a run's loss curve, stored in checkpoints and compared on resume.

The module also maps these fields to the config keys from which they follow; `run.allow_change` accepts these keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.schedule import Schedule
from pipeline.config.sections.compression import DistillSection
from pipeline.config.sections.data import DataSection
from pipeline.config.sections.groups import IslandsSection
from pipeline.config.sections.run import AnomaliesSection, ModelSection, MoeSection

Curve = dict[str, Any]
"""Settings of a run that determine its loss curve, by name."""

_LENGTH = ("run.steps", "run.tokens")
_WRITTEN: dict[str, tuple[str, ...]] = {
    "scheduler.kind": ("scheduler.type",),
    "scheduler.peak": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "scheduler.floor": (
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_min_ratio",
        "optimizer.params.lr",
    ),
    "scheduler.warmup": ("scheduler.params.warmup_num_steps", *_LENGTH),
    "scheduler.log_warmup": ("scheduler.params.warmup_type", "scheduler.type"),
    "scheduler.total": (*_LENGTH, "scheduler.params.total_num_steps"),
    "scheduler.decay": ("scheduler.params.decay_num_steps", *_LENGTH),
    "scheduler.spans": ("scheduler.count", "train_batch_size", "data.sequence_length", "stages"),
    "scheduler.end_ratio": ("scheduler.params.min_ratio", "scheduler.params.cos_min_ratio"),
    "data.weights": ("data.sources",),
    "data.schedule": ("data.curriculum",),
    "data.budgets.samples": (*_LENGTH, "data.sources"),
    "data.budgets": ("data.sources", *_LENGTH),
    "grad_accum_dtype": ("data_types.grad_accum_dtype",),
    "bf16": ("bf16.enabled",),
    "fp16": ("fp16.enabled",),
    "fp8.experts": ("fp8.experts", "fp8.enabled"),
    "fp8": ("fp8.recipe", "fp8.enabled"),
    "model.resolved": ("model.config", "model.path"),
}
"""Curve field -> the keys from which it follows, the most likely first. Other fields are keys themselves."""
STAGES = "stages"
"""Field with the differences of the stages after the first."""
_STAGED = ("sequence_length", "packing", "fim", "mask_documents")
_FINGERPRINT = ".fingerprint"
_COUNTED_BY = ("data", "run.seed", "train_batch_size")
"""Fields that determine the order of samples, by which the trained samples are counted and looked up."""
_MIXTURE = ("data.weights", "data.schedule")


def curve_fields(run: ResolvedRun) -> Curve:
    """Returns the fields that determine the loss curve, without layout, logging and checkpointing.

    A run may be resumed only if these fields are unchanged. Paths are left out, too: data and models are compared by
    fingerprint. A feature that is off is None, so checkpoints older than the feature can be resumed. The keys are
    stored in checkpoints and keep their names.
    """
    sections, config = run.config, run.config.model_dump(mode="json")
    accounts, ramp = run.accounts, None if run.place is None else run.place.stage.ramp
    return {
        "model": {
            **{key: config["model"][key] for key in ("config", "fresh", "keep_layers")},
            **_parametrization(sections.model),
        },
        "data": {
            **_mixture(sections.data, samples=accounts.samples(run.last_step) - accounts.samples(run.first_step - 1)),
            "packing": None if config["data"]["packing"] == "contiguous" else config["data"]["packing"],
            "fim": config["data"]["fim"],
            "sequence_length": config["data"]["sequence_length"],
            "mask_documents": config["data"]["mask_documents"] or None,
        },
        "distill": _distillation(sections.distill, sequence_length=sections.data.sequence_length),
        "loss.z_loss": config["loss"]["z_loss"] or None,
        "loss.mtp": config["loss"]["mtp"],
        "moe": _balance(sections.moe),
        "train_batch_size": ramp.model_dump(mode="json", exclude_none=True) if ramp else run.batch.samples,
        "optimizer": config["optimizer"],
        "scheduler": run.schedule.describe(),
        "gradient_clipping": config["gradient_clipping"],
        "bf16": config["bf16"]["enabled"],
        # loss scaling determines which steps overflow and are skipped
        "fp16": config["fp16"] if config["fp16"]["enabled"] else None,
        # not emulation, which rounds like the hardware, nor gathering in fp8, which belongs to the layout
        "fp8": config["fp8"]["recipe"] if config["fp8"]["enabled"] else None,
        "quantization_aware": config["quantization_aware"],
        "grad_accum_dtype": config["data_types"]["grad_accum_dtype"] or "fp32",
        "communication_data_type": None if config["communication_data_type"] == "fp32" else "bf16",
        "run.seed": config["run"]["seed"],
        # the rule for spikes, if spikes do not update the weights. The response to non-finite steps is left out: a run
        # that stopped at such a step may be resumed with another response
        "anomalies": _spikes(sections.anomalies),
        # not the number of islands, nor how they find each other
        "islands": _islands(sections.islands),
    }


def joined_curve(stages: Sequence[tuple[ResolvedRun, Curve]]) -> Curve:
    """Returns the fields of a run in stages: those of the first, and by name how each other stage differs from it.

    Args:
        stages: every stage with its own fields, in order; a run without stages keeps its fields.
    """
    first, curve = stages[0]
    if first.place is None or first.place.whole.stages is None:
        return curve
    others = {}
    for run, own in stages[1:]:
        assert run.place is not None
        assert run.place.stage.section is not None
        section, differs = run.place.stage.section, {field: now for field, _, now in changed_fields(curve, own)}
        options: Curve = {"optimizer_states": "fresh"} if section.optimizer_states == "fresh" else {}
        if section.implicit:
            options["implicit"] = True
        if section.continue_sources is not None:
            options["continue_sources"] = section.continue_sources
        others[section.name] = {"after_step": run.first_step - 1, **options, **differs}
    return {**curve, STAGES: others}


def recorded_schedule(curve: Mapping[str, Any], step: int) -> Schedule:
    """Returns the learning-rate schedule that a recorded curve gives a step: that of the step's stage.

    Args:
        curve: fields of a run, as `joined_curve` returns them or a checkpoint's manifest has them.
        step: a step of the run, from 1.
    """
    begun = [stage for stage in (curve.get(STAGES) or {}).values() if stage["after_step"] < step]
    own: Mapping[str, Any] = max(begun, key=lambda stage: int(stage["after_step"]), default={})
    at = "scheduler."
    fields = {**curve["scheduler"], **{key.removeprefix(at): own[key] for key in own if key.startswith(at)}}
    return Schedule(**{key: value for key, value in fields.items() if value is not None})


def changed_fields(was: Any, now: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    """Lists the fields that differ between two curves: (dotted path, before, now)."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = sorted({*was, *now})
        return [row for key in keys for row in changed_fields(was.get(key), now.get(key), f"{at}.{key}" if at else key)]
    return [] if was == now else [(at, was, now)]


def _parametrization(model: ModelSection) -> Curve:
    base = model.base.model_dump(exclude_none=True) if model.base is not None else None
    return {"parametrization": None if model.parametrization == "standard" else model.parametrization, "base": base}


def _distillation(section: DistillSection | None, *, sequence_length: int) -> Curve | None:
    """Returns the fields of a distillation except its folders, which are compared by fingerprint."""
    if section is None:
        return None
    fields: Curve = {"temperature": section.temperature, "alpha": section.alpha}
    if section.divergence != "forward_kl":
        fields["divergence"] = section.divergence
    if section.divergence == "jsd":
        fields["beta"] = section.beta
    for name in ("hidden_states", "attentions"):
        matching = getattr(section, name)
        if matching is not None:
            fields[name] = matching.model_dump(mode="json")
    if section.on_policy is not None:
        # not the number of samples continued at a time, nor whether keys and values are cached
        length = section.on_policy.length(sequence_length)
        kept = section.on_policy.model_dump(include={"fraction", "prompt_tokens", "temperature"})
        fields["on_policy"] = {**kept, "new_tokens": length}
    return fields


def _mixture(data: DataSection, *, samples: int) -> Curve:
    """Returns the fields that determine the order in which sources are sampled; names and repetition limits do not."""
    labels = [source.source for source in data.sources]
    budgets = [{"epochs": source.epochs, "tokens": source.tokens} for source in data.sources]
    budgeted = any(value is not None for budget in budgets for value in budget.values())
    stages = [[stage.after_step, [stage.weights.get(n) for n in data.names]] for stage in data.curriculum or ()]
    return {
        # a source without a weight and without a budget has weight 1
        "weights": [source.weight or (None if source.epochs or source.tokens else 1.0) for source in data.sources],
        "sources": labels if any(labels) else None,
        # the mixing weight equivalent to a budget depends on the length of the run
        "budgets": {"sources": budgets, "samples": samples} if budgeted else None,
        "schedule": stages or None,
    }


def _balance(moe: MoeSection) -> Curve | None:
    if moe.balance == "none":
        return None
    return {"balance": moe.balance, "aux_loss_coef": moe.coefficient, "bias_update_rate": moe.bias_rate}


def _islands(section: IslandsSection | None) -> Curve | None:
    if section is None or section.name is None:
        return None
    # absent from checkpoints older than these fields
    newer = {"overlap": section.overlap, "mode": section.mode}
    newer = {key: value for key, value in newer.items() if value not in (0, "synchronous")}
    outer = section.outer.model_dump(exclude=None if section.outer.momentum_follows_lr else {"momentum_follows_lr"})
    return section.model_dump(include={"steps", "compress"}) | {"outer": outer} | newer


def _spikes(section: AnomaliesSection) -> Curve | None:
    return None if section.spikes == "ignore" else section.model_dump(include={"spikes", "window", "deviations"})


def written_keys(field: str) -> tuple[str, ...]:
    """Returns the config keys from which a curve field, or a field inside it, follows; the most likely first."""
    if field.endswith(_FINGERPRINT):
        return (field.removesuffix(_FINGERPRINT),)
    for derived, keys in _WRITTEN.items():
        if f"{field}.".startswith(f"{derived}."):
            return keys
    return (field,)


def miscounts(field: str, was: Mapping[str, Any], now: Mapping[str, Any], *, samples: int, step: int) -> bool:
    """Tells whether a changed field alters the samples of the steps up to a checkpoint, their text or their number.

    Args:
        field: dotted path within the curve.
        was: the checkpoint's curve.
        now: the config's curve.
        samples: number of samples in the run's order up to the checkpoint.
        step: the checkpoint's step.
    """
    if field.partition(".")[0] == STAGES:
        return _miscounts_stages(field, was.get(STAGES) or {}, now.get(STAGES) or {}, step=step)
    if not any(f"{field}.".startswith(f"{name}.") for name in _COUNTED_BY):
        return False
    # weights that change later do not affect earlier samples; islands are ahead of their steps in the order of samples
    same = not was.get("islands") and _stages(was, until=samples) == _stages(now, until=samples)
    return not (same and field in _MIXTURE)


def _miscounts_stages(field: str, was: Mapping[str, Any], now: Mapping[str, Any], *, step: int) -> bool:
    """Tells whether a changed field of a stage alters the samples of steps up to a checkpoint."""
    _, name, rest = [*field.split(".", 2), "", ""][:3]
    counted = not rest or any(
        f"{rest}.".startswith(f"{key}.") for key in (*_COUNTED_BY, "after_step", "continue_sources")
    )
    names = [name] if name else [each for each in {*was, *now} if was.get(each) != now.get(each)]
    begun = [stage["after_step"] for each in names for stage in (was.get(each), now.get(each)) if stage]
    return counted and min(begun, default=step) < step


def _stages(curve: Mapping[str, Any], *, until: int) -> list[Any]:
    """Returns the mixture's stages that begin before sample `until`, as (step, weights of the sources)."""
    data = curve["data"]
    stages = data.get("schedule") or [[0, data["weights"]]]
    return [stage for stage in stages if stage[0] == 0 or stage[0] * curve["train_batch_size"] < until]


def allows_stage(field: str, *curves: Mapping[str, Any]) -> bool:
    """Tells whether a change of a field by which samples are counted may make a stage (`config.past_stages`).

    The seed may not change, nor what follows from the whole run: budgets, a curriculum, the rounds of groups.
    """
    whole = any(curve.get("islands") or curve.get("distill") for curve in curves)
    whole = whole or any(curve["data"].get(key) for curve in curves for key in ("budgets", "schedule"))
    counted = ("train_batch_size", *(f"data.{key}" for key in ("weights", "sources", *_STAGED)))
    return not whole and any(f"{field}.".startswith(f"{key}.") for key in counted)


def is_implicit(field: str, was: Any, now: Any) -> bool:
    """Tells whether a changed field is a stage, or all stages, that a resume has made by `run.allow_change`."""
    if field.partition(".")[0] != STAGES or was is not None or not now:
        return False
    return all(stage.get("implicit") for stage in (now.values() if field == STAGES else [now]))


def is_allowed(field: str, name: str) -> bool:
    """Tells whether a name in `run.allow_change` covers a curve field, by its path or a key from which it follows."""
    return any(f"{key}.".startswith(f"{name}.") for key in (field, *written_keys(field)))
