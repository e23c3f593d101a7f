"""Rules on `islands` and `replicas`: addresses to listen on, and features that do not combine with them."""

from __future__ import annotations

import ipaddress

from foundation.errors import ConfigError
from foundation.paths import is_url
from pipeline.config.sections.groups import QuorumSection
from pipeline.config.sections.run import AnomaliesSection, Config

REPLICAS = "replicas"


def refuse_remote_groups(config: Config) -> None:
    """Refuses groups of processes with their directory in an object store, since they read each other's files there.

    Raises:
        ConfigError: a section needs a shared directory; the error names it.
    """
    if is_url(config.run.dir) and (config.islands or config.replicas):
        field = "islands" if config.islands else REPLICAS
        why = f"with {field}, run.dir has to be a path, where processes find each other's files"
        raise ConfigError("run.dir", config.run.dir, why=why, remedy=f"a path, or remove the section {field}")


def check_islands(config: Config) -> None:
    """Checks the section `islands`, and the features used beside it.

    Raises:
        ConfigError: an address has no secret, or an island does not support a feature.
    """
    section = config.islands
    if section is None:
        return
    check_addresses(section, field="islands", groups="islands")
    if section.overlap >= section.steps:
        why = f"an exchange ends before the next one begins, {section.steps} steps later"
        remedy = f"islands.overlap below islands.steps, e.g. {section.steps // 2}"
        raise ConfigError("islands.overlap", section.overlap, why=why, remedy=remedy)
    if section.overlap and section.mode == "asynchronous":
        why = "asynchronous islands never wait for an exchange, so there is nothing to overlap"
        raise ConfigError("islands.overlap", section.overlap, why=why, remedy="0 with islands.mode asynchronous")
    if section.outer.momentum_follows_lr and section.mode == "asynchronous":
        why = "asynchronous islands mix pseudo-gradients of different rounds and learning rates"
        raise ConfigError("islands.outer.momentum_follows_lr", True, why=why, remedy="false, or mode synchronous")
    if section.outer.momentum_follows_lr and not section.outer.momentum:
        why = "there is no momentum that could follow"
        raise ConfigError("islands.outer.momentum_follows_lr", True, why=why, remedy="false, or a momentum such as 0.7")
    refuse_rollback(
        config.anomalies,
        why="an island that loads an older checkpoint has left the round that it shares with the others",
    )
    if config.distill is not None:
        why = "a teacher's cached logits and on-policy samples are read in a run's own order"
        raise ConfigError("islands", why=why, remedy="distill in an ordinary run, or remove the section distill")


def check_addresses(section: QuorumSection, *, field: str, groups: str) -> None:
    """Checks the addresses at which a group of processes listens and finds the others.

    Args:
        section: the config's `islands` or `replicas`.
        field: name of the section.
        groups: name of the groups in messages, e.g. "islands".

    Raises:
        ConfigError: an address has no secret, or there is no address.
    """
    if not is_loopback(section.bind) and section.secret_file is None:
        why = f"other hosts could connect there, and nothing would prove that they are {groups} of this run"
        remedy = f"give {field}.secret_file, the same secret on all {groups}, or bind to 127.0.0.1"
        raise ConfigError(f"{field}.bind", section.bind, why=why, remedy=remedy)
    host, _, port = section.lighthouse.rpartition(":")
    if not host or not port.isdigit():
        remedy = "e.g. 127.0.0.1:29510"
        raise ConfigError(f"{field}.lighthouse", section.lighthouse, why="it is HOST:PORT", remedy=remedy)


def refuse_rollback(anomalies: AnomaliesSection, *, why: str) -> None:
    """Refuses a policy that loads an older checkpoint.

    Raises:
        ConfigError: the policy is rollback; the error gives `why`.
    """
    for field in ("non_finite", "spikes"):
        value = getattr(anomalies, field)
        if value == "rollback":
            raise ConfigError(f"anomalies.{field}", value, why=why, remedy="use skip")


def is_loopback(address: str) -> bool:
    """Tells whether only this host can connect to an address."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def check_replicas_section(config: Config) -> None:
    """Checks the section `replicas`, and the features used beside it.

    Raises:
        ConfigError: an address has no secret, or replicas do not support a feature.
    """
    section = config.replicas
    if section is None:
        return
    check_addresses(section, field=REPLICAS, groups="replicas")
    refuse_rollback(config.anomalies, why="a replica that loads an older checkpoint is at another step than the others")
    if config.islands is not None:
        why = "a group of processes is an island, with a curve of its own, or a replica, with the curve of all"
        raise ConfigError(REPLICAS, why=why, remedy="remove one of the sections islands and replicas")
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
    if config.optimizer.params.qk_clip is not None:
        why = "each replica sees its own largest attention logits, and would scale other weights"
        given = config.optimizer.params.qk_clip
        raise ConfigError("optimizer.params.qk_clip", given, why=why, remedy="remove it, or remove replicas")
    batch = config.train_batch_size
    if batch is not None and batch < section.count:
        why = f"the batch of all replicas together, train_batch_size, has {batch} samples"
        raise ConfigError("replicas.count", section.count, why=why, remedy=f"use at most {batch}")
