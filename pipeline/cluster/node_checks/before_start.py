"""Commands that start the checks of nodes, for agents and job scripts, and the verdict.

Imports no torch. The checks run in a process of their own, since they import torch and may hang with a device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from foundation.directory import write_text
from foundation.errors import ConfigError
from pipeline.cluster.node_checks.decide import VERDICT, NodesVerdict

_LONGEST = 100_000
"""Largest size of an argument in bytes; Linux allows 128 KiB."""


def addresses_of(text: str) -> dict[str, str]:
    """Parses `--nodes NAME=ADDRESS,...` to node -> address, in order; a name alone is its own address.

    `@FILE` names a file with one node per line: the system's limit for an argument, 128 KiB, holds some 5,000 nodes.

    Raises:
        ConfigError: a name is unusable, or the file cannot be read.
    """
    found: dict[str, str] = {}
    for each in _listed(text):
        name, _, address = each.strip().partition("=")
        if not name or name in found or "/" in name:
            why = "a name is empty, has a /, or comes twice"
            raise ConfigError("--nodes", text, why=why, remedy="write --nodes a=10.0.0.1,b=10.0.0.2")
        found[name] = address or name
    return found


def _listed(text: str) -> list[str]:
    if not text.startswith("@"):
        return text.split(",")
    try:
        return Path(text[1:]).read_text(encoding="utf-8").split()
    except OSError as error:
        remedy = "write a file that all nodes see, with NAME=ADDRESS in each line"
        raise ConfigError("--nodes", text, why=str(error.strerror), remedy=remedy) from None


def check_command(
    nodes: Mapping[str, str], node: str, directory: Path, *, attempt: str, arguments: Sequence[str] = ()
) -> list[str]:
    """Returns the command that checks one node; start it on all nodes within some seconds.

    Args:
        nodes: node -> address of the nodes that are checked, in the same order everywhere.
        node: name of this node.
        directory: directory shared by all nodes; gets a file with `nodes` if they exceed the length of an argument.
        attempt: name of these checks, different for each use of the directory.
        arguments: `--config FILE`, `--set KEY=VALUE`, `--devices N` and so on.
    """
    listed = [f"{name}={address}" for name, address in nodes.items()]
    named = ",".join(listed)
    if len(named) > _LONGEST:
        file = directory / f"nodes-{attempt}.txt"
        directory.mkdir(parents=True, exist_ok=True)
        write_text(file, "\n".join(listed))
        named = f"@{file}"
    given = ["--nodes", named, "--node", node, "--directory", str(directory), "--attempt", attempt, *arguments]
    return [sys.executable, "-m", "pipeline.cluster.node_checks", *given]


def read_verdict(directory: Path, *, attempt: str) -> NodesVerdict | None:
    """Reads the verdict of an attempt; None while there is none."""
    try:
        raw = json.loads((directory / VERDICT).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing so far, or on a file system that fails for a moment
        return None
    if raw["attempt"] != attempt:
        return None
    bad = {node: tuple(why) for node, why in raw["bad"].items()}
    return NodesVerdict(bad, tuple(raw["common"]), tuple(raw["warnings"]))
