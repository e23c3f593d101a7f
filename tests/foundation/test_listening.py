"""Where a server of a run listens, in a network namespace whose addresses are made up."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import sys

import pytest

from foundation import listening
from tests.conftest import ROOT

SCRIPT = """
import socket, subprocess, sys
from foundation.listening import bound_socket, listening_socket
addresses, master, wanted, *peers = sys.argv[1:]
subprocess.run("ip link set lo up", shell=True, check=True)
for address in addresses.split(","):
    subprocess.run(f"ip address add {address} dev lo", shell=True, check=True)
store = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
port = store.getsockname()[1]
kept = [socket.create_connection((peer, port)) for peer in peers]
with listening_socket(master, 5, port=port) as found:
    assert found.getsockname()[0] == wanted, found
    for peer in peers:  # whoever has reached the store from elsewhere reaches the server
        if not peer.startswith("127."):
            socket.create_connection((peer, found.getsockname()[1])).close()
with bound_socket(peers[-1] if peers else master, 5) as found:
    assert found.getsockname()[0] == (peers[-1] if peers and not peers[-1].startswith("127.") else "::"), found
"""
CARDS = "10.77.0.1/24,192.168.77.1/24,fd77::1/64"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
@pytest.mark.parametrize(
    ("master", "wanted", "peers"),
    [
        # rank 0 reaches itself by its own name, which Debian gives 127.0.1.1, and others by the network
        ("node01", "10.77.0.1", ("127.0.1.1", "10.77.0.1")),
        ("node01", "192.168.77.1", ("192.168.77.1",)),  # the second card
        ("node01", "fd77::1", ("127.0.1.1", "fd77::1")),
        ("fd77::1", "10.77.0.1", ("10.77.0.1",)),  # the name has IPv6 first, IPv4 leads here
        ("node01", "::", ("10.77.0.1", "192.168.77.1")),  # by both
        ("node01", "127.0.0.1", ("127.0.1.1",)),  # all ranks are on this host
        ("127.0.0.1", "127.0.0.1", ()),
        ("node01", "::", ()),
    ],
)
def test_a_server_listens_on_the_address_by_which_its_peers_have_reached_the_rendezvous(
    master: str, wanted: str, peers: tuple[str, ...]
) -> None:
    command = ["unshare", "--net", sys.executable, "-c", SCRIPT, CARDS, master, wanted, *peers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_address_of_a_proxy_before_this_host_is_not_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "203.0.113.1"  # of no host: RFC 5737
    monkeypatch.setattr(listening, "connected_addresses", lambda _port: {ipaddress.ip_address(address)})
    for found in (listening.listening_socket("node01", 5, port=1234), listening.bound_socket(address, 5)):
        with found:
            assert found.getsockname()[0] in ("::", "0.0.0.0")
