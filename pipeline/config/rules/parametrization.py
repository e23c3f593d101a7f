"""Rules of `model.parametrization` that need neither torch nor the model: which sections go together."""

from __future__ import annotations

from foundation.errors import ConfigError
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.config.sections.run import ModelSection


def check_parametrization(model: ModelSection, optimizer: OptimizerSection) -> None:
    """Checks `model.parametrization` and `model.base`.

    Raises:
        ConfigError: one key is given without the other, the optimizer has other scaling rules, or layers were removed.
    """
    if model.parametrization == "standard":
        if model.base is not None:
            why = "model.parametrization is standard, which has no base model"
            raise ConfigError("model.base", why=why, remedy='remove it, or set model.parametrization to "completep"')
        return
    if model.base is None or not model.base.model_dump(exclude_none=True):
        why = "completep scales from a base model, whose sizes are not given"
        remedy = (
            'give the sizes at which the learning rate was tuned, e.g. {"hidden_size": 256, "num_hidden_layers": 4}'
        )
        raise ConfigError("model.base", why=why, remedy=remedy)
    if not optimizer.kind.sign_like:
        why = f"CompleteP's rules are derived for Adam: {optimizer.type}'s update grows with the gradient"
        remedy = "use AdamW, or the standard parametrization"
        raise ConfigError("optimizer.type", optimizer.type, why=why, remedy=remedy)
    if model.keep_layers is not None:
        why = "weights that are loaded were trained at the depth before layers were removed"
        remedy = "remove it, or use the standard parametrization"
        raise ConfigError("model.keep_layers", list(model.keep_layers), why=why, remedy=remedy)
