"""A machine under a run's ranks: rates while all devices of a node are busy, or with several ranks per core."""

from __future__ import annotations

from pipeline.runtime.machines.machine import LinkSection, Machine, MeasuredSection, Range


def with_ranks(machine: Machine, ranks_per_node: int) -> Machine:
    """Returns the machine with the rates that each rank gets if `ranks_per_node` ranks share a node.

    A busy node slows a device to `efficiency.all_busy` of its rates alone, in proportion to the number of other devices
    that compute. Cards on a host bridge share its rate, since all ranks communicate at the same time. On a CPU, more
    ranks than cores share the cores, memory and link bandwidth; GPU ranks beyond a node's devices are on further nodes.

    Args:
        machine: machine as shipped or calibrated, with the rates of a device alone.
        ranks_per_node: number of the run's ranks on each host.
    """
    devices = machine.devices_per_node
    others = (min(ranks_per_node, devices) - 1) / max(1, devices - 1)
    share = 1.0 if machine.gpu else min(1.0, devices / ranks_per_node)
    busy = machine.efficiency.all_busy
    products, memory = (1 - (1 - each) * others for each in (busy.products, busy.memory))
    efficiency, links = machine.efficiency, machine.links
    bridged = 1.0
    if links.bridge is not None:
        together = min(ranks_per_node, links.bridge.devices) * links.within.bytes_per_s
        bridged = min(1.0, links.bridge.bytes_per_s / together)
    if products == memory == share == bridged == 1:
        return machine
    update = {
        "products": {dtype: _times(each, products) for dtype, each in efficiency.products.items()},
        "memory": _times(efficiency.memory, memory * share),
    }
    return machine.model_copy(
        update={
            "devices_per_node": max(devices, ranks_per_node) if share < 1 else devices,
            "memory": machine.memory.model_copy(update={"bytes": machine.memory.bytes * share}),
            "peak_flops": {dtype: peak * share for dtype, peak in machine.peak_flops.items()},
            "efficiency": efficiency.model_copy(update=update),
            "links": links.model_copy(
                update={
                    "within": _link(links.within, share, bridged),
                    "between": _link(links.between, share),
                    "operations": {kind: _link(each, share) for kind, each in links.operations.items()},
                }
            ),
            "host": machine.host.model_copy(
                update={"forward_s": machine.host.forward_s / share, "backward_s": machine.host.backward_s / share}
            ),
            "measured": machine.measured and _measured(machine.measured, products * share),
        }
    )


def _measured(own: MeasuredSection, share: float) -> MeasuredSection:
    """Scales the measurements to the rates that a rank gets."""
    products = (each.model_copy(update={"flops_per_s": _times(each.flops_per_s, share)}) for each in own.products)
    return own.model_copy(
        update={"products": tuple(products), "attention_flops_per_s": _times(own.attention_flops_per_s, share)}
    )


def _times(values: Range, factor: float) -> Range:
    return values[0] * factor, values[1] * factor, values[2] * factor


def _link(section: LinkSection, share: float, bridged: float = 1.0) -> LinkSection:
    """Scales a link to a rank's share: fewer bytes per second (also of the bridge's), and a longer latency."""
    return LinkSection(bytes_per_s=section.bytes_per_s * share * bridged, latency_s=section.latency_s / share)
