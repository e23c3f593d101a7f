"""`parallel.shares` "auto": measures the speed of every data-parallel rank, and divides the batch anew when it pays.

All ranks decide from the same gathered numbers, so they agree without a further message. Speeds are averaged over time
and small gains are ignored, so noise does not move samples back and forth. Shares are not part of the data state: a
resumed run begins with even shares, perhaps on other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.rules.shares import KEY, changes_shapes, share_rule
from pipeline.config.shares import ShareRule, Shares
from pipeline.config.topology import Topology
from pipeline.data.divided import CurrentBatch
from pipeline.data.micro_batch import StepBatch
from pipeline.engines.base import Engine
from pipeline.models.decoder_layers import decoder_layers
from pipeline.runtime.metrics.compute_clock import ComputeClock

EVERY = 5
"""Steps between measurements, each of which may change the shares."""
_NEW = 0.3
"""Smallest weight of a measurement in the mean of a rank's seconds per sample; the first few count equally."""
MIN_GAIN = 0.05
"""Expected gain below which the shares stay: reading and running other shapes takes time, and speeds are noisy."""


@dataclass(frozen=True)
class ShareChange:
    """New shares, from the next step on.

    Attributes:
        shares: samples of every data-parallel rank.
        seconds_per_sample: measured seconds of forward passes per sample, on the slowest rank of every data-parallel
            rank.
        gain: estimated gain in speed of a step's passes: seconds before / seconds after - 1, e.g. 0.3.
    """

    shares: Shares
    seconds_per_sample: tuple[float, ...]
    gain: float

    def row(self) -> dict[str, Any]:
        """Returns the values of an event in the journal."""
        speeds = {"seconds_per_sample": list(self.seconds_per_sample), "gain": self.gain}
        return shares_row(self.shares) | speeds

    def line(self, step: int) -> str:
        """Formats the change as a line for people."""
        slowest = max(range(len(self.seconds_per_sample)), key=self.seconds_per_sample.__getitem__)
        ratio = self.seconds_per_sample[slowest] / min(self.seconds_per_sample)
        why = f"data rank {slowest} takes {ratio:.2f} times as long per sample as the fastest"
        return f"step {step}: {self.shares} from now on: {why}; expected {self.gain:.0%} more samples per second"


def make_balancer(
    run: ResolvedRun, engine: Engine, current: CurrentBatch, *, gpu: bool, stack: ExitStack
) -> ShareBalancer:
    """Makes the balancer of this rank.

    Args:
        run: the resolved config.
        engine: the engine whose forward passes are timed.
        current: batch sizes of the next step.
        gpu: whether the engine computes on a GPU.
        stack: closes the balancer.
    """
    apart = run.config.engine == "deepspeed" and run.config.zero_optimization.stage == 3
    modules = [each for decoder in engine.decoders for each in timed_modules(decoder.causal, gathered_apart=apart)]
    rule = share_rule(run.config, run.topology, run.batch)
    balancer = ShareBalancer(rule, run.topology, current, ComputeClock(modules, gpu=gpu))
    stack.callback(balancer.close)
    return balancer


def timed_modules(causal: nn.Module, *, gathered_apart: bool) -> Iterator[nn.Module]:
    """Yields the modules of a model whose forward passes wait for no data-parallel rank.

    Args:
        causal: Hugging Face's model, or a pipeline stage of it.
        gathered_apart: whether the weights of every module are gathered separately (DeepSpeed's ZeRO-3).
    """
    for layer in decoder_layers(causal).values():
        if not gathered_apart:
            yield layer
            continue
        leaves = (module for module in layer.modules() if next(module.children(), None) is None)
        yield from (leaf for leaf in leaves if next(leaf.parameters(recurse=False), None) is not None)


def check_compiled_shares(run: ResolvedRun, *, compiled: bool) -> None:
    """Refuses shares that would compile layers repeatedly; whether layers are compiled may depend on the machine.

    Raises:
        ConfigError: shares are measured and the size of micro-batches changes.
    """
    if not (compiled and changes_shapes(run.config, run.topology, run.batch)):
        return
    why = "layers are compiled on this machine, again for each size of a micro-batch, and sizes change with the shares"
    whole = "set compile.enabled to true, which moves whole micro-batches, or to false"
    several = run.config.zero_optimization.stage >= 2
    remedy = "set compile.enabled to false, or give fixed shares" if several else whole
    raise ConfigError(KEY, "auto", why=why, remedy=remedy)


def shares_row(shares: Shares) -> dict[str, Any]:
    """Returns the values of an event in the journal."""
    return {"samples": list(shares.counts), "micro_batches": [len(sizes) for sizes in shares.sizes]}


class ShareBalancer:
    """Divides the samples of steps by measured speed. Every method is called by all ranks alike.

    Args:
        rule: rule by which samples may be divided.
        topology: the mesh.
        current: batch sizes of the next step, which get new shares.
        clock: times this rank's forward passes.
    """

    def __init__(self, rule: ShareRule, topology: Topology, current: CurrentBatch, clock: ComputeClock) -> None:
        self._rule, self._topology, self._current, self._clock = rule, topology, current, clock
        self._means: tuple[float, ...] = ()
        self._measurements = 0
        self._warm = False

    def close(self) -> None:
        """Ends the measurements."""
        self._clock.close()

    @property
    def shares(self) -> Shares:
        """The current shares."""
        assert self._current.sizes.shares is not None
        return self._current.sizes.shares

    def begin(self, batch: StepBatch) -> None:
        """Begins to measure a step."""
        if not self._warm:  # the first step compiles, allocates and opens connections
            self._warm = True
            return
        self._clock.begin(sum(len(micro.input_ids) for micro in batch.micro_batches))

    def update(self, step: int) -> ShareChange | None:
        """Gathers speeds after every `EVERY`-th step, and divides samples anew if it pays. Collective."""
        if step % EVERY:
            return None
        seconds, samples = self._clock.take()
        own = torch.tensor([seconds / samples if samples else 0.0], dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        measured = slowest_of_data_ranks(self._topology, [float(each) for each in found])
        if min(measured) <= 0:  # a device has not finished a step yet
            return None
        return self._decide(measured)

    def _decide(self, measured: Sequence[float]) -> ShareChange | None:
        self._measurements += 1
        weight = max(_NEW, 1 / self._measurements)
        before = self._means or measured
        # geometric mean: one step with a long delay says less about a rank's speed than several ordinary steps
        means = tuple(old * (new / old) ** weight for old, new in zip(before, measured, strict=True))
        self._means = means
        shares = self._rule.divide([1 / each for each in means])
        gain = self._rule.seconds(self.shares, means) / self._rule.seconds(shares, means) - 1
        if gain < MIN_GAIN:
            return None
        self._current.sizes = self._current.sizes.with_shares(shares)
        return ShareChange(shares, means, gain)


def slowest_of_data_ranks(topology: Topology, seconds: Sequence[float]) -> list[float]:
    """Returns the largest value of each data-parallel rank's pipeline, cp and tp ranks; 0 if a rank has no value."""
    by_rank: list[list[float]] = [[] for _ in range(topology.dp)]
    for rank, each in enumerate(seconds):
        by_rank[topology.coordinates(rank)["dp"]].append(each)
    return [max(each) if min(each) > 0 else 0.0 for each in by_rank]
