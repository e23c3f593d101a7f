"""Rules of `loss.function`, a loss that the user wrote, that need neither torch nor the function."""

from __future__ import annotations

from foundation.errors import ConfigError, refuse_all
from pipeline.config.sections.run import Config
from pipeline.config.topology import Topology


def check_own_loss(config: Config, topology: Topology) -> None:
    """Checks that the sections and the layout of a config allow `loss.function`.

    Raises:
        ConfigError: the layout shards the logits, or another section changes the loss, too.
    """
    name = config.loss.function
    if name is None:
        return
    found = {
        "parallel.tp": (topology.tp > 1, "each rank has the logits of a part of the vocabulary only"),
        "loss.z_loss": (config.loss.z_loss > 0, "the function is the whole loss: add the z-loss in it"),
        "loss.mtp": (config.loss.mtp is not None, "the modules' loss is a cross-entropy"),
        "distill": (config.distill is not None, "a distillation has a loss of its own"),
    }
    refuse_all(
        [
            ConfigError(
                "loss.function", name, why=f"{key} is given, and {why}", remedy=f"remove {key} or loss.function"
            )
            for key, (given, why) in found.items()
            if given
        ]
    )
