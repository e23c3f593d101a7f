"""Rules on `replicas`: what does not go together with replicas of the model that come and go."""

from __future__ import annotations

from headrace.base.errors import ConfigError
from pipeline.config.rules.groups import check_addresses, refuse_rollback
from pipeline.config.sections.run import Config

FIELD = "replicas"


def check_replicas_section(config: Config) -> None:
    """Checks what belongs to `replicas`.

    Raises:
        ConfigError: an address without a secret, or a feature that replicas cannot have.
    """
    section = config.replicas
    if section is None:
        return
    check_addresses(section, field=FIELD, groups="replicas")
    refuse_rollback(config, why="a replica that loads an older checkpoint is at another step than the others")
    if config.islands is not None:
        why = "a group of processes is an island, with a curve of its own, or a replica, with the curve of all"
        raise ConfigError(FIELD, why=why, remedy="remove one of the sections islands and replicas")
    if config.engine == "deepspeed":
        why = "DeepSpeed reduces, clips and applies gradients in one call, and nothing can be summed in between"
        raise ConfigError("engine", "deepspeed", why=why, remedy="use engine torch with replicas")
    if config.parallel.shares is not None:
        why = "replicas divide the samples of a step themselves, equally"
        raise ConfigError("parallel.shares", config.parallel.shares, why=why, remedy="remove it, or remove replicas")
    if config.distill is not None and config.distill.on_policy is not None:
        why = "the samples that a replica generates die with it, and the others cannot repeat them"
        raise ConfigError("distill.on_policy", why=why, remedy="remove it, or remove replicas")
    if config.moe.balance != "none":
        why = "the load of experts is counted over the ranks of one replica"
        raise ConfigError("moe.balance", config.moe.balance, why=why, remedy='use "none", or remove replicas')
    batch = config.train_batch_size
    if batch is not None and batch < section.count:
        why = f"the batch of all replicas together, train_batch_size, has {batch} samples"
        raise ConfigError("replicas.count", section.count, why=why, remedy=f"use at most {batch}")
