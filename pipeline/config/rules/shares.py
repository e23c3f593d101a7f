"""Rules of `parallel.shares`: layouts in which a step's samples may be divided unevenly, and their batch sizes."""

from __future__ import annotations

import math

from foundation.errors import ConfigError
from pipeline.config.batch import BatchSizes, split_batch
from pipeline.config.rules.layout import micro_batch_constraints
from pipeline.config.rules.precision import block_of
from pipeline.config.sections.run import Config
from pipeline.config.shares import ShareRule, largest_remainder
from pipeline.config.topology import Topology

KEY = "parallel.shares"


def share_rule(config: Config, topology: Topology, batch: BatchSizes) -> ShareRule:
    """Returns the rule by which the samples of a step may be divided in a layout."""
    return _rule(config, topology, samples=batch.samples, micro=batch.micro)


def shared_batch(config: Config, topology: Topology) -> BatchSizes:
    """Derives the batch sizes of a run with `parallel.shares`; with "auto" they are even until speeds are measured.

    Raises:
        ConfigError: the shares do not fit the mesh, the batch or another key.
    """
    given = config.parallel.shares
    assert given is not None
    weights = [1.0] * topology.dp if given == "auto" else [float(each) for each in given]
    _check_weights(config, topology)
    _check_features(config, topology)
    samples = config.largest_batch
    if samples is None:
        micro, accumulation = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        samples, *_ = split_batch(None, micro, accumulation, dp=topology.dp)
    if samples < topology.dp:
        why = f"each of {topology.dp} data-parallel ranks takes at least one sample, whatever its share"
        raise ConfigError("train_batch_size", samples, why=why, remedy=f"use {topology.dp} or more")
    micro = config.train_micro_batch_size_per_gpu or _micro(config, weights, samples)
    rule = _rule(config, topology, samples=samples, micro=min(micro, samples))
    _check_units(rule)
    if rule.lockstep and not rule.unit:
        _check_lockstep(rule, weights)
    shares = rule.divide(weights)
    adjusted = {"gradient_accumulation_steps": (config.gradient_accumulation_steps, shares.most_micro_batches)}
    changed = tuple(f"{key} {before}" for key, (before, after) in adjusted.items() if before not in (None, after))
    length = config.data.sequence_length
    return BatchSizes(samples, rule.micro, shares.most_micro_batches, topology.dp, length, changed, shares)


def _rule(config: Config, topology: Topology, *, samples: int, micro: int) -> ShareRule:
    """Returns the rule: lockstep if gradients are reduced after each micro-batch, as at stage 2 without a pipeline."""
    lockstep = config.zero_optimization.stage >= 2 and topology.pp == 1
    least, multiple = micro_batch_constraints(config.parallel, topology)
    whole = topology.pp > 1 or (config.compile.enabled is True and not lockstep)
    unit = multiple if whole else 0
    return ShareRule(samples, topology.dp, micro, lockstep=lockstep, unit=unit, least=-(-least // max(1, unit)))


def _micro(config: Config, weights: list[float], samples: int) -> int:
    """Derives a missing micro-batch size: the largest share divided into the given number of micro-batches."""
    counts = largest_remainder(weights, samples, least=1)
    return math.ceil(max(counts) / (config.gradient_accumulation_steps or 1))


def _check_weights(config: Config, topology: Topology) -> None:
    given = config.parallel.shares
    if given is None or given == "auto":
        return
    if config.parallel.elastic or config.launch.fallback_layouts:
        other = "parallel.elastic" if config.parallel.elastic else "launch.fallback_layouts"
        why = f"with {other} the number of data-parallel ranks may change, and the list has one number for each"
        raise ConfigError(KEY, given, why=why, remedy='use "auto", which measures the ranks that there are')
    if len(given) != topology.dp:
        why = f"it has {len(given)} numbers, and the mesh has dp {topology.dp} ({topology})"
        remedy = f'give {topology.dp}, e.g. {[1] * topology.dp}, or "auto"'
        raise ConfigError(KEY, given, why=why, remedy=remedy)
    if not all(math.isfinite(each) and each > 0 for each in given):
        why = "every data-parallel rank takes part in every step, with at least one sample"
        remedy = 'use numbers above 0, in proportion to the speeds of the ranks, e.g. [3, 3, 2], or "auto"'
        raise ConfigError(KEY, given, why=why, remedy=remedy)


def _check_features(config: Config, topology: Topology) -> None:
    """Refuses features that assume equally many samples on all ranks."""
    given, stage = config.parallel.shares, config.zero_optimization.stage
    remove = f"remove {KEY}"
    if config.engine == "reference":
        why = "the reference is one process, and has no ranks to divide a batch over"
        raise ConfigError(KEY, given, why=why, remedy="use engine torch or deepspeed, or remove it")
    if topology.pp > 1 and stage == 3:
        why = "a pipeline's micro-batches have one size, and at ZeRO stage 3 all ranks run equally many of them"
        raise ConfigError(KEY, given, why=why, remedy=f"use zero_optimization.stage 0 or 2, or {remove}")
    if config.distill is not None and config.distill.on_policy is not None:
        why = "the samples that a student writes are spread evenly over the ranks"
        raise ConfigError(KEY, given, why=why, remedy=f"remove distill.on_policy, or {remove}")
    if config.fp8.enabled and topology.pp == 1 and config.compile.enabled is not True:
        block = block_of(config.fp8)
        if config.data.sequence_length // topology.cp % block:
            why = f"micro-batches have different sizes, and fp8 kernels take multiples of {block} tokens"
            remedy = f"use a data.sequence_length of a multiple of {block * topology.cp}, or {remove}"
            raise ConfigError(KEY, given, why=why, remedy=remedy)
    if given == "auto" and config.compile.enabled is True and stage >= 2 and topology.pp == 1:
        why = (
            f"at ZeRO stage {stage} the sizes of micro-batches change with the shares, and every new size is compiled"
            " again"
        )
        raise ConfigError(KEY, given, why=why, remedy="set compile.enabled to false, or give fixed shares")


def _check_units(rule: ShareRule) -> None:
    if not rule.unit:
        return
    size, units = rule.unit * rule.micro, rule.samples / (rule.unit * rule.micro)
    what = f"whole micro-batches of {rule.micro}" + (f", {rule.unit} at a time" if rule.unit > 1 else "")
    if rule.samples % size:
        why = f"ranks take {what} (the shapes of a pipeline and of compiled layers stay the same)"
        below = rule.samples // size * size
        remedy = f"use {below} or {below + size}" if below else f"use {size}"
        raise ConfigError("train_batch_size", rule.samples, why=why, remedy=f"{remedy}, or a smaller micro-batch")
    if units < rule.dp * rule.least:
        why = f"ranks take {what}, at least {rule.least * rule.unit} each, and a step has {units * rule.unit:.0f}"
        remedy = f"use {rule.dp * rule.least * size} or more, or a smaller train_micro_batch_size_per_gpu"
        raise ConfigError("train_batch_size", rule.samples, why=why, remedy=remedy)


def _check_lockstep(rule: ShareRule, weights: list[float]) -> None:
    """Refuses a list of shares that lockstep cannot realize; "auto" has even weights here and always passes."""
    wanted = largest_remainder(weights, rule.samples, least=1)
    count = -(-max(wanted) // rule.micro)
    if min(wanted) < count:
        near = -(-max(wanted) // min(wanted))
        why = (
            f"every micro-batch is a collective at ZeRO stage 2 and 3, so that the rank with {min(wanted)} samples runs"
            f" as many micro-batches as the one with {max(wanted)}: {count} of at most {rule.micro}"
        )
        remedy = f"use {near} or more, more even shares, or ZeRO stage 0 or 1"
        raise ConfigError("train_micro_batch_size_per_gpu", rule.micro, why=why, remedy=remedy)


def changes_shapes(config: Config, topology: Topology, batch: BatchSizes) -> bool:
    """Tells whether new measurements of shares change the sizes of a run's micro-batches."""
    return config.parallel.shares == "auto" and topology.dp > 1 and share_rule(config, topology, batch).shapes_change
