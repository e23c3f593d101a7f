"""Starts a virtual Slurm cluster interactively: `python -m tests.virtual_cluster [--nodes 2] [COMMAND ...]`, as root.

Opens a shell (or runs COMMAND) on the login node, where sbatch, squeue and scontrol work. The cluster ends with it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.virtual_cluster.cluster import VirtualCluster, missing_requirements


def main() -> int:
    """Returns the exit code of the shell or the command; 2 where a cluster cannot be started."""
    args = _arguments()
    if (reason := missing_requirements()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="slurm.") as directory,
        VirtualCluster(Path(directory), nodes=args.nodes, cpus=args.cpus, gpus=args.gpus) as cluster,
    ):
        print(f"logs and settings: {cluster.state}")
        for node in cluster.nodes:
            print(f"a shell on {node.name}, from here: nsenter --target={node.machine.pid} --all")
        print("ready", flush=True)
        command = cluster.controller.command(*(args.command or ["bash"]), cwd=Path.cwd())
        return subprocess.run(command, env=cluster.env, check=False).returncode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.virtual_cluster", description="a real Slurm on one machine")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=2, help="of each node, as Slurm counts them")
    parser.add_argument("--gpus", type=int, default=2, help="of each node; Slurm assigns them, they do not exist")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run on the login node; default: a shell")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
