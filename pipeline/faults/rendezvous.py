"""How a rank finds the hub: rank 0 starts it, and leaves its address in the store where all ranks have met."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.config.schema import WatchdogSection
from pipeline.faults.heartbeat_messages import Lines, line, listen
from pipeline.faults.monitor import Address
from pipeline.launch import Launch, Rendezvous
from pipeline.launch.arrivals import ask

_KEY = "watchdog"
_ARRIVAL_S = 60.0
"""How long a rank waits for rank 0's word of where the hub is."""
_CONNECT_S = 5.0
"""Patience with each address of the hub."""
_RANKS_PER_SECOND = 256
"""Signs of life that the hub takes in per second at most; with more ranks each sends fewer."""


def start_heartbeat_server(
    launch: Launch, meeting: Rendezvous | None, *, config: WatchdogSection, run_dir: Path
) -> Address:
    """Starts the hub beside rank 0, and tells the others where it is.

    The socket listens from here on, so nobody has to wait for the process.

    Raises:
        OSError: no port, or no process.
    """
    host = launch.master.rsplit(":", 1)[0]
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    alone = meeting is None
    address: Address | None = None
    try:
        with listen("localhost" if alone else host, launch.world_size) as listener:
            address = Address(
                listener.getsockname()[1], secrets.token_hex(8), _addresses(host), heartbeat_interval(launch.world_size)
            )
            orders = {
                "listener": listener.fileno(),
                "token": address.token,
                "world_size": launch.world_size,
                "run_dir": str(run_dir.resolve()),
                "silent_s": heartbeat_timeout(config, launch.world_size),
                "stuck_s": config.hang_timeout,
                "beat_s": address.beat_s,
            }
            # -P: nothing of the working directory is imported
            command = [sys.executable, "-P", "-m", "pipeline.faults.heartbeat_server"]
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()]
            )
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(json.dumps(orders).encode())
    finally:
        if meeting is not None:
            told = "" if address is None else json.dumps(address.told())
            ask(lambda: meeting.store.set(_KEY, told), otherwise=None)
    return address


def find_heartbeat_server(meeting: Rendezvous) -> Address | None:
    """Where rank 0 says the hub is; None where there is none."""
    told = ask(lambda: meeting.store.get(_KEY).decode(), otherwise="", patience_s=_ARRIVAL_S)
    return Address.of(json.loads(told)) if told else None


def heartbeat_interval(world_size: int) -> float:
    """Seconds between the signs of life of one rank."""
    return max(1.0, world_size / _RANKS_PER_SECOND)


def heartbeat_timeout(config: WatchdogSection, world_size: int) -> float:
    """Seconds of silence after which the other end counts as lost: more than one sign of life may be late."""
    return max(config.heartbeat_timeout, 4 * heartbeat_interval(world_size))


def connect(address: Address, hello: dict[str, Any], *, local: bool) -> tuple[socket.socket, Lines] | None:
    """A connection over which the hub has proved to be ours, or None when none of its addresses leads there.

    Args:
        address: of the hub.
        hello: the first message; the token is added.
        local: the hub is on this host.
    """
    for host in ("127.0.0.1", "::1") if local else address.hosts:
        with suppress(OSError):
            connection = socket.create_connection((host, address.port), timeout=_CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(line({**hello, "token": address.token}))
            lines = Lines()
            try:
                connection.settimeout(_ARRIVAL_S)  # it listens before its process is ready
                if _welcomed(connection, lines, address.token):
                    return connection, lines
                connection.sendall(line({"left": True}))
            except OSError:
                connection.close()
                raise
            connection.close()
    return None


def _welcomed(connection: socket.socket, lines: Lines, token: str) -> bool:
    """A host name may lead to another host, and a port there to something else."""
    while data := connection.recv(4096):
        for message in lines.feed(data):
            return isinstance(message, dict) and message.get("welcome") == token
    return False


def _addresses(master: str) -> tuple[str, ...]:
    """Names and numbers of this host, in the order in which others should try them."""
    name = socket.gethostname()
    found = [master, name]
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return tuple(dict.fromkeys(found))
