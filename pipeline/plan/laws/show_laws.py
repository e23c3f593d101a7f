"""Suggestions of the published laws for a planned run, as lines of its plan and in its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.plan.laws.batch_ramp import ramp_texts
from pipeline.plan.laws.law_warnings import Training, shown, training_of, warnings
from pipeline.plan.laws.laws import Quantity, Suggestion
from pipeline.plan.predict.planned_run import PlannedRun

_LABELS = {Quantity.LEARNING_RATE: "learning rate", Quantity.TOKENS: "tokens"}
"""Labels of lines that are shorter than their quantity's name."""


def training_of_plan(planned: PlannedRun) -> Training | None:
    """Collects the hyperparameters of a planned run, for the laws.

    Returns:
        None where the laws do not apply. They hold for AdamW's rates, for training from initial values on the
        next-token loss, and for the standard parametrization, in which learning rate and weight decay depend on the
        size.
    """
    config = planned.run.config
    loaded = config.model.path is not None and not config.model.fresh
    if loaded or config.distill is not None or config.model.parametrization != "standard":
        return None
    hf_config: Any = planned.costs.model.config
    tied = bool(getattr(hf_config, "tie_word_embeddings", False))
    run = planned.run
    training = training_of(
        run.batch,
        run.schedule,
        run.config.optimizer,
        tokens=run.accounts.tokens(run.steps),
        parameters_non_embedding=planned.costs.size.non_embedding(tied=tied),
    )
    ramping = [each.place.stage.number for each in run.stages if each.place is not None and each.ramps]
    texts = tuple(text for stage in ramping for text in ramp_texts(run.accounts, stage, training.parameters))
    return replace(training, ramps=texts) if training.adamw else None


def law_lines(training: Training) -> Iterator[tuple[str, str]]:
    """Labels and texts: the laws' suggestions for each quantity beside the config's value, and warnings."""
    found = training.suggestions()
    for quantity in Quantity:
        laws = "; ".join(_law(each) for each in found if each.quantity is quantity)
        name, _, unit = quantity.partition(", ")
        value = f"{shown(training.value(quantity))}{' ' if unit else ''}{unit}"
        yield _LABELS.get(quantity, name), f"{value}; suggested {laws}"
    yield from (("batch ramp", text) for text in training.ramps)
    yield from (("warning", text) for text in warnings(training))


def laws_json(training: Training) -> dict[str, Any]:
    """The laws for JSON: parameters, tokens, a list of suggestions and a list of warnings."""
    return {
        "parameters_non_embedding": training.parameters,
        "tokens": training.tokens,
        "suggestions": [
            {
                "quantity": each.quantity.name.lower(),
                "unit": each.quantity.value,
                "config": training.value(each.quantity),
                "suggested": each.value,
                "law": each.law,
                "formula": each.formula,
                "source": each.source,
                "fitted_on": each.fitted_on,
                "in_range": each.in_range,
            }
            for each in training.suggestions()
        ],
        "ramps": list(training.ramps),
        "warnings": list(warnings(training)),
    }


def _law(each: Suggestion) -> str:
    return f"{shown(each.value)} by {each.law} ({each.source}{'' if each.in_range else '; extrapolated'})"
