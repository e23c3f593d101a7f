"""Hosts on one machine behind links of a given speed: a network namespace each, joined by a relay that delays packets.

Every host has one interface (a TUN device, which gives its IP packets to the relay). The relay sends a packet on when
the sender's link has carried it and the latency has passed; what does not fit into the link's buffer is dropped. So TCP
is the kernel's own, with its slow start and windows. Linux only, as root; the kernel needs no queueing discipline.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from typing import Any

from pipeline.plan.predict.links import Link

INTERFACE = "uplink"
"""Name of the interface in every host."""
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_HEADER = struct.Struct("=BBHHHH")
"""virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""
_LARGEST = 1 << 17
_LEAST_BUFFER = 1_500_000
"""Bytes: 1000 packets, netem's own limit."""


class ShapedNetwork:
    """Hosts 0 to count - 1; use it as a context manager.

    Args:
        count: of hosts.
        link: of every host, one direction: what it sends. Nothing slows down what it receives.
    """

    def __init__(self, count: int, *, link: Link) -> None:
        self._names = [f"site{os.getpid()}-{host}" for host in range(count)]
        self._link, self._descriptors = link, list[int]()
        self._relay: ForkProcess | None = None

    def __enter__(self) -> ShapedNetwork:
        for host, name in enumerate(self._names):
            _ip("netns", "add", name)
            self._descriptors.append(_open_interface(f"t{os.getpid()}-{host}"))
            _ip("link", "set", f"t{os.getpid()}-{host}", "netns", name, "name", INTERFACE)
            for words in ("link set lo up", f"address add {self.address(host)}/24 dev {INTERFACE}"):
                _ip("-n", name, *words.split())
            _ip("-n", name, *f"link set dev {INTERFACE} mtu 1500 up".split())
        self._relay = get_context("fork").Process(target=_relay, args=(self._descriptors, self._link), daemon=True)
        self._relay.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            self._relay.terminate()
            self._relay.join()
        for descriptor in self._descriptors:
            os.close(descriptor)
        for name in self._names:
            _ip("netns", "delete", name)

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def run(self, host: int, *command: str) -> str:
        """Runs a command on a host and returns its output."""
        return subprocess.run(self.command(host, *command), check=True, capture_output=True, text=True).stdout

    def bytes_sent(self, host: int) -> int:
        """By the kernel's counter of the interface: IP packets with headers, those of a large send counted once."""
        found = json.loads(_ip("-n", self._names[host], "-s", "-j", "link", "show", "dev", INTERFACE))
        return int(found[0]["stats64"]["tx"]["bytes"])


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _open_interface(name: str) -> int:
    """A TUN device whose packets carry a header that lets the kernel leave large sends whole."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return descriptor


@dataclass
class _Relay:
    """Packets on their way.

    Attributes:
        link: of every host.
        free: until when the link of each host is busy, by `time.monotonic`.
        queue: arrival, a number that keeps the order, receiver, packet.
        packets: so far.
    """

    link: Link
    free: list[float]
    queue: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    packets: int = 0

    def take(self, packet: bytes, *, sender: int, now: float) -> None:
        """A packet that a host has sent."""
        address = packet[_HEADER.size + 16 : _HEADER.size + 20]
        receiver = address[3] - 1
        if packet[_HEADER.size] >> 4 != 4 or address[:3] != bytes([10, 77, 0]) or receiver >= len(self.free):
            return
        bandwidth = self.link.bandwidth
        begins = max(now, self.free[sender])
        if (begins - now) * bandwidth > max(_LEAST_BUFFER, 2 * self.link.latency_s * bandwidth):
            return
        self.free[sender] = begins + wire_bytes(packet) / bandwidth
        self.packets += 1
        heapq.heappush(self.queue, (self.free[sender] + self.link.latency_s, self.packets, receiver, packet))

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Receivers and packets that arrive now."""
        found = []
        while self.queue and self.queue[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self.queue)
            found.append((receiver, packet))
        return found


def wire_bytes(packet: bytes) -> int:
    """Bytes of IP packets that carry a large send: every segment has headers of its own.

    Args:
        packet: with its virtio_net_hdr.
    """
    _, kind, headers, segment, _, _ = _HEADER.unpack_from(packet)
    size = len(packet) - _HEADER.size
    return size if not kind else size + (-(-(size - headers) // segment) - 1) * headers


def _relay(descriptors: Sequence[int], link: Link) -> None:
    with suppress(OSError):  # on time, though the hosts' processes are on the same cores
        os.nice(-15)
    relay = _Relay(link, [0.0] * len(descriptors))
    hosts: dict[int, int] = {descriptor: host for host, descriptor in enumerate(descriptors)}
    while True:
        wait = max(0.0, relay.queue[0][0] - time.monotonic()) if relay.queue else None
        readable: Any = select.select(descriptors, [], [], wait)[0]
        for descriptor in readable:
            with suppress(BlockingIOError):
                while True:
                    packet = os.read(descriptor, _LARGEST)
                    relay.take(packet, sender=hosts[descriptor], now=time.monotonic())
        for receiver, packet in relay.due(time.monotonic()):
            with suppress(OSError):  # a host whose interface is going down
                os.write(descriptors[receiver], packet)
