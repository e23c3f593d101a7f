"""`python -m pipeline.cluster.node_checks --nodes a=10.0.0.1,b=10.0.0.2 --directory D`: checks of nodes.

Start it on every node with the same arguments. Each checks itself and its links to others and writes D/NODE.json; each
then prints the verdict on all of them, which is in D/verdict.json. Exit codes: 0 no bad node; 3 there are some.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from foundation.cli import guarded, leave
from foundation.command_line import Parser
from foundation.directory import write_json
from foundation.errors import ConfigError
from foundation.paths import LOCAL
from pipeline.cluster.node_checks.before_start import addresses_of
from pipeline.cluster.node_checks.decide import VERDICT, NodesVerdict, decide, partners_of
from pipeline.cluster.node_checks.host import check_host
from pipeline.cluster.node_checks.links import LinkServer, measure_link, measure_links
from pipeline.cluster.node_checks.records import NodeRecord, read_records, write_record
from pipeline.config.load import load_config
from pipeline.config.sections.node_checks import NodeChecksSection

BAD_NODES = 3
"""Exit code if some nodes are bad."""
_POLL_S, _POLL_S_PER_NODE = 0.1, 0.002
_LINKS_SHARE = 0.2
"""Share of the timeout kept for links; a hung check of the node itself cannot use it up."""


@dataclass(frozen=True)
class NodeChecks:
    """The checks of one node.

    Args:
        node: name of this node.
        addresses: node -> address of all nodes, in order.
        directory: directory of the records, shared by all nodes.
        run_dir: the run's directory.
        attempt: name that distinguishes these checks from earlier ones in the directory.
        terms: thresholds.
        devices: number of accelerators that each node has to have; None for any number.
    """

    node: str
    addresses: dict[str, str]
    directory: Path
    run_dir: Path
    attempt: str
    terms: NodeChecksSection
    devices: int | None = None
    _ports: dict[str, int] = field(default_factory=dict)

    def run(self) -> NodesVerdict:
        """Makes the checks, waits for the other nodes' records, and decides; takes `terms.timeout` at most."""
        deadline = time.monotonic() + self.terms.timeout
        self.directory.mkdir(parents=True, exist_ok=True)
        free, payload = threading.Lock(), self.terms.payload_mb * 1_000_000
        server = LinkServer(self.attempt, payload, free, self.addresses[self.node])
        record = NodeRecord(self.node, self.attempt, socket.gethostname(), server.start())
        write_record(self.directory, record)
        with free:  # no links are measured while this node checks itself
            found = check_host(
                self.run_dir,
                terms=self.terms,
                devices=self.devices,
                tell=partial(self._tell, record),
                deadline=deadline - _LINKS_SHARE * self.terms.timeout,
            )
        record = replace(record, stage="links", **asdict(found))
        write_record(self.directory, record)
        links = measure_links(
            partners_of(self.node, tuple(self.addresses), most=self.terms.partners),
            address_of=self._address,
            measure=partial(measure_link, attempt=self.attempt, payload=payload, free=free),
            deadline=deadline - 2.0,
        )
        write_record(self.directory, replace(record, stage="finished", links=tuple(links)))
        return self._verdict(deadline)

    def _tell(self, record: NodeRecord, stage: str) -> None:
        write_record(self.directory, replace(record, stage=stage))

    def _address(self, other: str) -> tuple[str, int] | None:
        if other not in self._ports:
            record = read_records(self.directory, [other], attempt=self.attempt).get(other)
            if record is None:
                return None
            self._ports[other] = record.port
        return self.addresses[other], self._ports[other]

    def _verdict(self, deadline: float) -> NodesVerdict:
        nodes, records = tuple(self.addresses), dict[str, NodeRecord]()
        while True:
            # each node reads all files: finished ones only once, and less often the more nodes there are
            missing = [node for node in nodes if node not in records or not records[node].finished]
            records.update(read_records(self.directory, missing, attempt=self.attempt))
            if time.monotonic() >= deadline or all(node in records and records[node].finished for node in nodes):
                break
            time.sleep(max(_POLL_S, len(nodes) * _POLL_S_PER_NODE))
        verdict = decide(nodes, records, terms=self.terms)
        write_json(self.directory / VERDICT, {"attempt": self.attempt, **asdict(verdict)})
        return verdict


def main(argv: Sequence[str] | None = None) -> int:
    """Checks this node and prints the verdict on all nodes.

    Raises:
        ConfigError: the nodes, this node's name or the config are unusable.
    """
    args = _arguments(argv)
    addresses = addresses_of(args.nodes)
    if args.node not in addresses:
        why = f"--nodes names {', '.join(addresses)}"
        raise ConfigError("--node", args.node, why=why, remedy="name this host as --nodes does")
    terms, run_dir = NodeChecksSection(), args.run_dir
    if args.config is not None:
        config = load_config(args.config, args.overrides)
        terms, run_dir = config.launch.node_checks, run_dir or config.run.local_dir
    run_dir = run_dir or args.directory
    checks = NodeChecks(args.node, addresses, args.directory, run_dir, args.attempt, terms, args.devices)
    verdict = checks.run()
    for line in verdict.lines or ("no bad node",):
        print(f"node checks: {line}", flush=True)
    return BAD_NODES if verdict.bad else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m pipeline.cluster.node_checks",
        description=__doc__,
    )
    add = parser.add_argument
    add("--nodes", required=True, metavar="NAME=ADDRESS,...|@FILE", help="all nodes, in the same order on each")
    name = socket.gethostname().partition(".")[0]
    add("--node", default=name, metavar="NAME", help="this node; default: %(default)s")
    add(
        "--directory",
        required=True,
        type=LOCAL.as_path(),
        metavar="DIR",
        help="directory for the records, shared by all nodes",
    )
    add("--attempt", default="1", metavar="TEXT", help="name of this use of DIR, new for each; default: 1")
    add(
        "--run-dir",
        type=LOCAL.as_path(),
        metavar="DIR",
        help="run directory whose file system is checked; default: the config's, or --directory",
    )
    add("--devices", type=int, metavar="N", help="accelerators that each node has to have; default: any number")
    add("--config", metavar="FILE", type=LOCAL, help="the run's config, for launch.node_checks; default: its defaults")
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override one field of it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    leave(guarded(partial(main, None)))  # threads of checks that hang are left behind
