"""A machine: nodes of equal devices, as the planner sees them. One small JSON file each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat

from foundation.section import Count, Section

Dtype = Literal["bf16", "fp16", "fp8", "tf32", "fp32"]

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
"""Kinds of collectives."""


CPU = "cpu"
"""Torch's name of a processor, among the devices of a machine without GPUs."""


def _ascending(values: tuple[float, float, float]) -> tuple[float, float, float]:
    if list(values) != sorted(values):
        raise ValueError("the three numbers are low, typical and high, in this order")
    return values


def _shares(values: tuple[float, float, float]) -> tuple[float, float, float]:
    if values[-1] > 1:
        raise ValueError("a share is between 0 and 1")
    return values


def _positive(values: tuple[float, float, float]) -> tuple[float, float, float]:
    if values[0] <= 0:
        raise ValueError("it is a rate over another: above 0")
    return values


MOST_OF_PEAK = 2.0
"""Largest share of a peak in a file; a measured share exceeds 1 where the peak is given for a slower clock."""


def _of_peak(values: tuple[float, float, float]) -> tuple[float, float, float]:
    if values[-1] > MOST_OF_PEAK:
        raise ValueError("it is a share: 36 percent is 0.36")
    return values


def _of_a_device(least: float) -> AfterValidator:
    """Refuses numbers too small for any device, which are in the wrong unit, such as 989.4 for 989.4e12."""

    def check(value: float) -> float:
        if value < least:
            raise ValueError(f"no device has less than {least:g}: it is in bytes, bytes/s or FLOP/s, e.g. 989.4e12")
        return value

    return AfterValidator(check)


OVERLAP = (0.6, 0.85, 1.0)
"""Share of the communication of data parallelism that can run beside kernels of a GPU, where it was not measured.
Assumed: kernels and collectives share multiprocessors and memory bandwidth, and the first gather and the last reduction
have no kernel beside them."""

_NotNegative = Annotated[float, Field(ge=0)]
Range = Annotated[tuple[_NotNegative, _NotNegative, _NotNegative], AfterValidator(_ascending), Field(strict=False)]
"""Low, typical and high value."""
_Share = Annotated[Range, AfterValidator(_of_peak)]
_Rate = Annotated[PositiveFloat, _of_a_device(1e5)]
_Peak = Annotated[PositiveFloat, _of_a_device(1e8)]


class MachineMemory(Section):
    """Memory of a device."""

    bytes: _Rate = Field(description="Memory of a device, e.g. 80e9")
    bytes_per_s: _Rate = Field(description="Its bandwidth, read and written bytes together, e.g. 3.35e12")


class LinkSection(Section):
    """A connection of a device, one direction."""

    bytes_per_s: _Rate = Field(description="Bytes per second in one direction, e.g. 450e9")
    latency_s: PositiveFloat = Field(description="Seconds of an operation that sends no data, e.g. 3e-6")


class BridgeSection(Section):
    """The host bridge of PCIe cards: what the cards of a CPU socket send to one another, one direction."""

    devices: Count = Field(description="Number of devices on a bridge, e.g. those of a socket")
    bytes_per_s: _Rate = Field(description="Bytes per second of these devices together")
    between_bytes_per_s: _Rate = Field(description="Bytes per second from one bridge (socket) to the next")


class LinksSection(Section):
    """Connections of a device."""

    within: LinkSection = Field(description="Between devices of a node")
    between: LinkSection = Field(description="A device's share of its node's network")
    host: LinkSection = Field(description="Between a device and the host's memory")
    within_links: Count = Field(
        1,
        description="Number of links that `within` adds up, if each device has one to every other device of its node:"
        " in a group of g devices each uses g - 1; 1 if a switch gives every pair all of `within`",
    )
    bridge: BridgeSection | None = Field(
        None, description="Host bridge that devices of a node share; null: a link of its own for every device"
    )
    operations: dict[Operation, LinkSection] = Field(
        {}, description="Link within a node for one kind of collective; the others use `within`"
    )


class BusySection(Section):
    """Rates of a device while all devices of the node compute, relative to a device alone."""

    products: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Relative rate of products and attention")
    memory: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Relative bandwidth of memory")


class ExchangeSection(Section):
    """The exchange of rows between expert-parallel ranks."""

    deduplicated: bool = Field(
        False,
        description="Whether a token is sent once to a node and spread there, and once to a rank with several"
        " of its experts",
    )
    overlap: Annotated[Range, AfterValidator(_shares)] = Field(
        (0.0, 0.0, 0.0), description="Share of the exchange that runs beside other work of the same micro-batch"
    )


class EfficiencySection(Section):
    """Shares of the peaks that training reaches: low, typical, high."""

    products: dict[Dtype, _Share] = Field(description="Share of peak_flops in products and attention, per dtype")
    attention: _Share | None = Field(
        None, description="Share of the bf16 peak that attention reaches (fp32 peak in fp32 runs); null: as products"
    )
    layer_overlap: Annotated[Range, AfterValidator(_shares)] = Field(
        (0.0, 0.0, 0.0),
        description="Share of the communication within layers (tensor, context parallelism) that runs beside products",
    )
    experts: Annotated[Range, AfterValidator(_positive)] = Field(
        (1.0, 1.0, 1.0),
        description="Rate of a layer's grouped products of experts, over the rate of products, beside the time to read"
        " their weights",
    )
    exchange: ExchangeSection = Field(ExchangeSection(), description="The exchange of expert parallelism")
    expert_layer_s: Range = Field(
        (0.0, 0.0, 0.0),
        description="Least seconds of a layer with experts and a micro-batch, both passes: its dispatch",
    )
    memory: _Share = Field(description="Share of the memory's bandwidth that all other kernels reach")
    links: _Share = Field(description="Share of the links' bandwidth that collectives and messages reach")
    overlap: Annotated[Range, AfterValidator(_shares)] = Field(
        OVERLAP, description="Share of communication that runs beside kernels without slowing them down"
    )
    all_busy: BusySection = Field(BusySection(), description="While all devices of a node compute")


class BestSection(Section):
    """Efficiency of the best published runs of other engines; fields that are absent are as in `efficiency`."""

    products: dict[Dtype, _Share] = Field({})
    attention: _Share | None = None
    layer_overlap: Annotated[Range, AfterValidator(_shares)] | None = None
    experts: Annotated[Range, AfterValidator(_positive)] | None = None
    exchange: ExchangeSection | None = None
    expert_layer_s: Range | None = None


class OverheadSection(Section):
    """Memory that the formulas of tensors do not count: low, typical, high."""

    bytes: Range = Field(description="Bytes of the device's context, of NCCL and of libraries")
    fragmentation: _Share = Field(description="Share of activations and logits that the allocator loses")


class HostSection(Section):
    """The host of a node: its memory and disks, and the time to dispatch a layer.

    The seconds are those of a decoder layer and a micro-batch beside the work in its kernels (dispatch, autograd),
    counted where the host is the device. A GPU computes while its host goes ahead.
    """

    forward_s: _NotNegative = Field(0.0, description="Seconds of a layer's forward pass")
    backward_s: _NotNegative = Field(0.0, description="Seconds of its backward pass")
    memory_bytes: _Rate | None = Field(
        None, description="Memory of a node's host, e.g. 2e12; null: not known, and plans do not check it"
    )
    disk_bytes: _Rate | None = Field(
        None,
        description="Capacity of a node's local NVMe disks, e.g. 30e12; null: not known, and plans do not check it",
    )
    disk_bytes_per_s: Range = Field(
        (3e9, 8e9, 25e9), description="Bytes per second that a node reads from its local NVMe disks; assumed"
    )
    disk_write_bytes_per_s: Range | None = Field(
        None, description="Bytes per second that a node writes to these disks; null: as it reads"
    )


class MeasuredProduct(Section):
    """The matrix products of a linear layer, measured: (M x K) by (K x N), and the two of its backward pass."""

    dtype: Dtype
    m: Count
    k: Count
    n: Count
    flops_per_s: Range = Field(description="Least, median and most of the repeated measurements")


class MeasuredCollective(Section):
    """Measured seconds of a collective; `bytes` is the size of the whole tensor."""

    kind: Operation = "all_reduce"
    axis: Literal["within", "between"]
    ranks: Count
    bytes: Count
    seconds: Range = Field(description="Least, median and most of the repeated measurements")


class MeasuredSection(Section):
    """Measurements of `headrace plan --calibrate`."""

    date: str
    device: str = Field(description="Name that PyTorch gives it")
    torch: str
    products: tuple[MeasuredProduct, ...] = Field(strict=False)
    attention_flops_per_s: Range
    copy_bytes_per_s: Range = Field(description="Read and written bytes together")
    host_bytes_per_s: Range
    collectives: tuple[MeasuredCollective, ...] = Field((), strict=False)


class ScoredSection(Section):
    """The runs that `headrace plan --score --save-calibration` fitted the efficiencies and overheads to."""

    date: str
    device: str = Field(description="Name that PyTorch gives it")
    torch: str
    runs: tuple[str, ...] = Field(strict=False, description="Their directories")
    step_error: Range = Field(description="Least, median and most of measured over fitted step time")


class Machine(Section):
    """A kind of machine.

    Every number is of one device. Rates are peaks; `efficiency` says what share of them training reaches.
    """

    name: str = Field(description="Name in messages, e.g. H100 SXM")
    devices: tuple[str, ...] = Field((), strict=False, description="Words in torch's name of the device, e.g. H100")
    devices_per_node: Count
    gpu: bool = Field(True, description="false: devices are cores of a CPU, on which nothing is compiled by default")
    compute_capability: tuple[int, int] | None = Field(
        None, strict=False, description="Compute capability by torch, e.g. [9, 0]: decides fp8 support; null: unknown"
    )
    memory: MachineMemory
    peak_flops: dict[Dtype, _Peak] = Field(description="Dense FLOP/s by dtype")
    links: LinksSection
    efficiency: EfficiencySection
    best: BestSection | None = Field(None, description="Efficiency of the best published runs of other engines")
    overhead: OverheadSection
    host: HostSection = HostSection()
    storage_bytes_per_s: Range = Field(
        (0.5e9, 2e9, 5e9), description="Bytes per second that a node writes to the file system of checkpoints; assumed"
    )
    sources: dict[str, str] = Field({}, description="Where the numbers come from")
    measured: MeasuredSection | None = None
    scored: ScoredSection | None = None

    @property
    def calibrated(self) -> bool:
        """Whether its rates were measured, in benchmarks or in runs."""
        return self.measured is not None or self.scored is not None

    def as_best_published(self) -> Machine | None:
        """Returns this machine at the efficiency of other engines' best published runs; None if no run is known."""
        if self.best is None:
            return None
        given = {name: value for name, value in self.best if value is not None}
        given["products"] = self.efficiency.products | self.best.products
        return self.model_copy(update={"efficiency": self.efficiency.model_copy(update=given), "measured": None})

    def attention_rate(self, dtype: str) -> tuple[float, float, float]:
        """Returns the FLOP/s of attention in a dtype: low, typical and high."""
        share = self.efficiency.attention
        if share is None:
            return self.rate(dtype)
        peak = self.peak_flops[self._computed_in(dtype)]
        return peak * share[0], peak * share[1], peak * share[2]

    def _computed_in(self, dtype: str) -> Dtype:
        return next(each for each in _WIDER.get(dtype, ("fp32",)) if each in self.peak_flops)

    def rate(self, dtype: str) -> tuple[float, float, float]:
        """Returns the FLOP/s of matrix products in a dtype: low, typical and high.

        A dtype that the machine lacks is computed in the next wider one: fp8 in bf16, bf16 in fp32. A dtype without its
        own efficiency uses bf16's or, failing that, fp32's.
        """
        found = self._computed_in(dtype)
        shares = self.efficiency.products
        share = next(shares[each] for each in (found, "bf16", "fp32") if each in shares)
        peak = self.peak_flops[found]
        return peak * share[0], peak * share[1], peak * share[2]


_WIDER: dict[str, tuple[Dtype, ...]] = {
    "fp8": ("fp8", "bf16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "fp32"),
}
"""Dtype -> dtypes that can stand in for its products; the first that the machine has is used."""
