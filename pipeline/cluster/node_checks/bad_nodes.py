"""Bad nodes of a run: `bad-nodes.json` in its directory lists faults by node, and which nodes are left out and why.

A node is left out after `launch.node_checks.faults` faults that began on it; being named by the node checks counts as
one. The list is for people too: a node whose entry is removed takes part again
(`python -m pipeline.cluster.node_checks.bad_nodes RUN --forgive NODE`).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from foundation.cli import guarded
from foundation.command_line import Parser
from foundation.directory import write_json
from foundation.errors import ConfigError, DataError
from foundation.lock import lock_file
from foundation.paths import RUN

NAME = "bad-nodes.json"


@dataclass(frozen=True)
class BadNode:
    """A node's entry in the list.

    Attributes:
        reason: newest fault, or why the node was left out by hand.
        time: time when the reason was noted, in seconds since 1970.
        faults: number of faults that began on the node.
        left_out: whether it gets no ranks any more.
    """

    reason: str
    time: float
    faults: int = 0
    left_out: bool = False


def read_bad_nodes(run_dir: Path) -> dict[str, BadNode]:
    """Reads node -> its entry; empty where there is no list.

    Raises:
        DataError: the list is damaged.
    """
    path = run_dir / NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {node: BadNode(**entry) for node, entry in raw["nodes"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error}\n  try: mend it, or remove it: no node is left out then") from None


def nodes_left_out(run_dir: Path) -> dict[str, str]:
    """Reads node -> why it is left out."""
    return {node: entry.reason for node, entry in read_bad_nodes(run_dir).items() if entry.left_out}


def add_fault(run_dir: Path, node: str, reason: str, *, faults: int) -> BadNode:
    """Notes a fault that began on a node; with the `faults`-th it is left out.

    Returns:
        The entry; `left_out` says whether the node is left out from now on.
    """
    with _changing(run_dir) as nodes:
        count = (nodes[node].faults if node in nodes else 0) + 1
        left_out = count >= faults or (node in nodes and nodes[node].left_out)
        nodes[node] = BadNode(reason, time.time(), count, left_out)
        return nodes[node]


def leave_out(run_dir: Path, node: str, reason: str) -> BadNode:
    """Leaves a node out at once, whatever its number of faults."""
    with _changing(run_dir) as nodes:
        before = nodes.get(node, BadNode(reason, 0.0))
        nodes[node] = replace(before, reason=reason, time=time.time(), left_out=True)
        return nodes[node]


def forgive(run_dir: Path, node: str) -> bool:
    """Removes a node from the list; returns whether it was there."""
    with _changing(run_dir) as nodes:
        return nodes.pop(node, None) is not None


@contextmanager
def _changing(run_dir: Path) -> Iterator[dict[str, BadNode]]:
    """Yields the entries, for changes in place by one process at a time."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / NAME
    with lock_file(run_dir / f".{NAME}.lock", doing=f"changing {path}", timeout_s=math.inf):  # it takes milliseconds
        nodes = read_bad_nodes(run_dir)
        yield nodes
        write_json(path, {"nodes": {node: asdict(entry) for node, entry in nodes.items()}})


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the list of a run, or changes it."""
    parser = Parser(prog="python -m pipeline.cluster.node_checks.bad_nodes", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN", type=RUN.as_path(), help="the run's directory")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--leave-out", metavar="NODE", help="leave a node out")
    group.add_argument("--forgive", metavar="NODE", help="take a node back")
    parser.add_argument("--reason", default="by hand", help="reason for --leave-out; default: %(default)s")
    args = parser.parse_args(argv)
    if not args.run_dir.is_dir():
        raise ConfigError("RUN", str(args.run_dir), why="there is no such directory", remedy="name a run's directory")
    if args.leave_out:
        leave_out(args.run_dir, args.leave_out, args.reason)
    elif args.forgive and not forgive(args.run_dir, args.forgive):
        listed = ", ".join(read_bad_nodes(args.run_dir)) or "no node"
        raise ConfigError("--forgive", args.forgive, why=f"{NAME} lists {listed}", remedy="name one of these")
    for node, entry in read_bad_nodes(args.run_dir).items():
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
        faults = f"{entry.faults} fault{'' if entry.faults == 1 else 's'}"
        print(f"{node}: {'left out' if entry.left_out else 'takes part'}, {faults}, {when}: {entry.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(partial(main, None)))
