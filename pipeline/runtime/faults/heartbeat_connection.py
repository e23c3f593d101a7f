"""Starts the heartbeat server beside rank 0, publishes its address in the rendezvous store, connects ranks to it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from foundation.listening import listening_socket
from pipeline.config.sections.run import WatchdogSection
from pipeline.runtime.faults.heartbeat_messages import Message, MessageDecoder, encode, greeting
from pipeline.runtime.faults.monitor import ServerAddress
from pipeline.runtime.launch import Launch, Rendezvous
from pipeline.runtime.launch.rendezvous import store_call

_KEY = "watchdog"
_START_S = 60.0
"""Seconds for rank 0 to publish the server's address, and for the server to confirm a registration."""
_CONNECT_S = 5.0
"""Connection timeout for each address of the server, in seconds."""
_MOST_ANSWER = 4096
"""Number of bytes without an end of line after which the other side counts as another program."""
_STRANGERS = 128
"""Number of pending connections of other programs that may wait beside the connections of all ranks."""
_HEARTBEATS_PER_SECOND = 256
"""Largest number of heartbeats per second at the server; with more ranks each rank sends fewer."""


def start_heartbeat_server(
    launch: Launch, rendezvous: Rendezvous | None, *, config: WatchdogSection, run_dir: Path
) -> ServerAddress:
    """Starts the server beside rank 0, and publishes its address.

    The socket listens from here on, so ranks need not wait for the server process to be ready.

    Raises:
        OSError: no port is free, or the process cannot be started.
    """
    host, _, rendezvous_port = launch.master.rpartition(":")
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    address: ServerAddress | None = None
    try:
        reached = "localhost" if rendezvous is None else host
        with listening_socket(reached, launch.world_size + _STRANGERS, port=int(rendezvous_port)) as listener:
            interval_s = heartbeat_interval(launch.world_size)
            bound, port, *_ = listener.getsockname()
            address = ServerAddress(port, secrets.token_hex(8), _addresses(host, bound), interval_s)
            server_config = {
                "listener": listener.fileno(),
                "token": address.token,
                "world_size": launch.world_size,
                "run_dir": str(run_dir.resolve()),
                "silent_s": heartbeat_timeout(config, launch.world_size),
                "stuck_s": config.hang_timeout,
                "interval_s": interval_s,
                "master": "" if rendezvous is None else launch.master,
            }
            # -P: nothing is imported from the working directory
            command = [sys.executable, "-P", "-m", "pipeline.runtime.faults.heartbeat_server"]
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()]
            )
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(json.dumps(server_config).encode())
    finally:
        if rendezvous is not None:
            value = "" if address is None else json.dumps(address.to_json())
            store_call(lambda: rendezvous.store.set(_KEY, value), default=None)
    return address


def find_heartbeat_server(rendezvous: Rendezvous) -> ServerAddress | None:
    """Returns the address that rank 0 has published; None where there is no server."""
    value = store_call(lambda: rendezvous.store.get(_KEY), default=b"", timeout_s=_START_S)
    try:
        return ServerAddress.from_json(json.loads(value)) if value else None
    except (ValueError, RecursionError, KeyError, TypeError):  # not written by rank 0
        return None


def heartbeat_interval(world_size: int) -> float:
    """Returns the seconds between the heartbeats of one rank."""
    return max(1.0, world_size / _HEARTBEATS_PER_SECOND)


def heartbeat_timeout(config: WatchdogSection, world_size: int) -> float:
    """Returns the seconds of silence after which the other end counts as lost: several heartbeats may be late."""
    return max(config.heartbeat_timeout, 4 * heartbeat_interval(world_size))


def connect(
    address: ServerAddress, registration: Message, *, local: bool
) -> tuple[socket.socket, MessageDecoder] | None:
    """Opens a connection and registers on it; None when no address leads to the server.

    Args:
        address: address of the server.
        registration: the first message.
        local: whether the server is on this host.
    """
    for host in ("127.0.0.1", "::1", *address.hosts) if local else address.hosts:
        with suppress(OSError):
            connection = socket.create_connection((host, address.port), timeout=_CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(greeting(address.token) + encode(registration))
            decoder = MessageDecoder()
            try:
                connection.settimeout(_START_S)  # the socket listens before the server process is ready
                if _registered(connection, decoder, address.token):
                    return connection, decoder
                connection.sendall(encode({"finished": True}))
            except OSError:
                connection.close()
                raise
            connection.close()
    return None


def _registered(connection: socket.socket, decoder: MessageDecoder, token: str) -> bool:
    """Tells whether this is our server: a host name may lead to another host, and its port to another program."""
    while (data := connection.recv(4096)) and len(decoder.incomplete) < _MOST_ANSWER:
        for message in decoder.feed(data):
            return isinstance(message, dict) and message.get("registered") == token
    return False


def _addresses(master: str, bound: str) -> tuple[str, ...]:
    """Returns names and IP addresses of this host, in the order in which other hosts should try them."""
    name = socket.gethostname()
    found = [master, name]
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    if bound not in ("::", "0.0.0.0"):  # this host's name may resolve only to its loopback address
        found.append(bound)
    return tuple(dict.fromkeys(found))
