"""Listening sockets of a run's servers, on the address at which peers have reached this host, if it is known."""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

_ESTABLISHED = "01"
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_socket(address: str, backlog: int, *, port: int = 0) -> socket.socket:
    """A listening socket on a free port.

    The socket is bound to the loopback address if `address` is one, or if all peers are on this host. If peers have
    reached the rendezvous at exactly one other address of this host, it is bound to that address: a host name may lead
    to 127.0.1.1, to another network card, or to IPv6 first where only IPv4 works. Otherwise it is bound to all
    addresses, IPv6 and IPv4.

    Args:
        address: The address of rank 0's host, as given to the ranks.
        backlog: How many connections may wait to be accepted.
        port: The rendezvous' port; 0 if there is none.
    """
    if address in ("localhost", "::1") or address.startswith("127."):
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    used = connected_addresses(port) if port else set()
    outside = {each for each in used if not each.is_loopback}
    if used and not outside:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if len(outside) == 1 and not (own := outside.pop()).is_link_local:
        return bound_socket(str(own), backlog)
    return _bound("", backlog)


def bound_socket(address: str, backlog: int) -> socket.socket:
    """A listening socket on a free port of one of this host's addresses.

    The socket is bound to all addresses if `address` is a name, a loopback address or not this host's (behind a proxy).
    """
    with suppress(ValueError, OSError):
        if not ipaddress.ip_address(address).is_loopback:
            return _bound(address, backlog)
    return _bound("", backlog)


def connected_addresses(port: int) -> set[_Address]:
    """This host's addresses in TCP connections with a port at either end; empty if the system does not report them."""
    found: set[_Address] = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, local, remote, state, *_ = line.split()
                ports = (int(end.rpartition(":")[2], 16) for end in (local, remote))
                if state == _ESTABLISHED and port in ports:
                    found.add(_address(local.rpartition(":")[0]))
    return found


def _address(text: str) -> _Address:
    """Decodes an address in `/proc/net/tcp`: 32-bit words of network order, each as a number of this machine."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    found = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    return getattr(found, "ipv4_mapped", None) or found


def _bound(address: str, backlog: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is compiled in, but disabled
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)
