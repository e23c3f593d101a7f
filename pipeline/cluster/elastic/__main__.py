"""`python -m pipeline.cluster.elastic --nodes a=10.0.0.1,b=10.0.0.2 --directory D pipeline.train ...`: a host's agent.

Start it on every host with the same arguments, by whatever starts processes there (ssh, pdsh, systemd, a batch system).
A host that dies is left out; a host on which the agent is started again takes part from the next checkpoint on.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from zlib import crc32

from foundation.cli import add_config_arguments, guarded
from foundation.command_line import Parser
from foundation.errors import ConfigError, HeadraceError
from foundation.paths import LOCAL
from pipeline.checkpoint.memory.memory_folder import MemoryFolder, remove, used
from pipeline.cluster.elastic.agent import Agent
from pipeline.cluster.elastic.commands import Commands
from pipeline.cluster.elastic.files import DEAD_S, StateFiles
from pipeline.cluster.elastic.leader import Terms
from pipeline.cluster.elastic.local_ranks import Command
from pipeline.cluster.elastic.questions import Questions
from pipeline.cluster.elastic.slurm_requeue import SlurmJob
from pipeline.cluster.elastic.warm_ranks import WarmRanks
from pipeline.cluster.node_checks.before_start import addresses_of
from pipeline.config.load import load_config
from pipeline.config.sections.node_checks import NodeChecksSection
from pipeline.config.sections.run import Config, RunSection

_OWN = ("node", "guest", "stopped", "module", "arguments")
"""Arguments that are not handed to the agent of another job."""


def main(argv: Sequence[str] | None = None) -> int:
    """Keeps the run going; returns the exit code of the run.

    Raises:
        ConfigError: the nodes or this node's name are unusable.
    """
    args = _arguments(argv)
    addresses, guest = addresses_of(args.nodes), args.guest is not None
    if args.node not in addresses and not guest:
        why = f"--nodes names {', '.join(addresses)}"
        raise ConfigError("--node", args.node, why=why, remedy="name this host as --nodes does")
    directory, output = Path(args.directory), Path(args.output) if args.output else None
    nodes = tuple(dict.fromkeys([*addresses, args.node]))
    files = StateFiles(directory, node=args.node, nodes=nodes, dead_s=args.dead)
    if guest:
        files.announce(args.guest)
    arguments = (sys.executable, "-m", args.module, *args.arguments)
    command = Command(arguments, args.tasks, directory / "logs", output)
    commands = Commands()
    config = ranks_config(args.arguments)
    node_checks = NodeChecksSection() if config is None else config.launch.node_checks
    asks = Questions(args.arguments, args.tasks, partial(_write, output), commands, node_checks)
    wanted, checks = args.wanted or len(addresses), directory / "checks"
    terms = Terms(
        addresses,
        least=args.least,
        restarts=args.restarts,
        job=crc32(str(directory.absolute()).encode()),
        refusal=cache(asks.refusal),
        step=asks.step,
        wanted=wanted,
        left_out=asks.left_out,
        note_fault=asks.note_fault,
        note_silent=asks.note_silent,
        faults=node_checks.faults,
        checks=args.node_checks,
        bad=partial(asks.bad_nodes, checks),
    )
    say, slurm = partial(_say, output), None if args.slurm_job is None else _slurm_job(args, wanted, commands)
    script = slurm is not None and not guest and args.node == args.batch_host
    check = partial(asks.check_nodes, args.node, checks) if args.node_checks else None
    warm = None if args.no_warm_ranks else WarmRanks(command, args.node)
    agent = Agent(args.node, command, terms, files, args.join, say, slurm, guest, script, warm, check)
    commands.tick = agent.tick
    if args.stopped:
        agent.stop()
    with kept_while_here(None if config is None else config.run):
        outcome = agent.run().outcome
    assert outcome is not None
    return outcome


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m pipeline.cluster.elastic",
        description=__doc__,
    )
    add = parser.add_argument
    add("--nodes", required=True, metavar="NAME=ADDRESS,...|@FILE", help="all hosts; the first that is alive leads")
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    add("--node", default=host, metavar="NAME", help="this host; default: %(default)s")
    add(
        "--directory",
        required=True,
        metavar="DIR",
        type=LOCAL,
        help="directory for the agents' files: shared by all hosts, new for every job",
    )
    add("--tasks", type=int, default=1, metavar="N", help="ranks of each host: its GPUs; default: %(default)s")
    add("--least", type=int, default=1, metavar="N", help="fewest hosts to go on with; default: %(default)s")
    add(
        "--restarts",
        type=int,
        default=20,
        metavar="N",
        help="most starts in a row without a new checkpoint; default: %(default)s",
    )
    add("--join", type=float, default=120.0, metavar="S", help="seconds that all hosts have to join; default: 120")
    add(
        "--dead",
        type=float,
        default=DEAD_S,
        metavar="S",
        help="seconds of silence after which a host counts as dead; default: 20",
    )
    add(
        "--node-checks",
        action="store_true",
        help="check the hosts before the first start, and leave bad ones out",
    )
    add("--output", metavar="FILE", type=LOCAL, help="log of rank 0 and of the agents; default: this terminal")
    add("--no-warm-ranks", action="store_true", help="keep no processes for the next start with their imports done")
    add("--wanted", type=int, metavar="N", help="hosts that the run should have; default: all in --nodes")
    add("--guest", metavar="ADDRESS", help="take part as one more host; the others reach it at this address")
    slurm = parser.add_argument_group("under Slurm (slurm/ranks.sh sets them)")
    slurm.add_argument("--slurm-job", metavar="ID", help="queue this job again when the run asks for it")
    slurm.add_argument("--batch-host", metavar="NAME", help="host that runs the job's batch script")
    slurm.add_argument("--stopped", action="store_true", help="the job was asked to stop before the agent began")
    slurm.add_argument(
        "--join-script",
        metavar="FILE",
        type=LOCAL,
        help="batch script to submit for a host that replaces a lost one",
    )
    add("module", choices=("pipeline.train", "pipeline.distill"), help="module that the ranks run")
    add("arguments", nargs=argparse.REMAINDER, help="--config FILE [--set KEY=VALUE ...]")
    args = parser.parse_args(argv)
    for name in ("tasks", "least"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name}", getattr(args, name), why="it is below 1", remedy="use 1 or more")
    return args


def _slurm_job(args: argparse.Namespace, wanted: int, commands: Commands) -> SlurmJob:
    directory, join = Path(args.directory), _join_command(args) if args.join_script else []
    return SlurmJob(
        args.slurm_job, args.batch_host, directory.parent, directory / "outcome", args.tasks, wanted, commands, join
    )


def _join_command(args: argparse.Namespace) -> list[str]:
    """Builds the command line of a guest's agent, with this agent's options; the guest's script adds the address."""
    options: list[str] = []
    for name, value in vars(args).items():
        if name not in _OWN and value is not None and value is not False:
            options += [f"--{name.replace('_', '-')}"] + [str(value)] * (value is not True)
    return [args.join_script, *options, args.module, *args.arguments]


def _say(output: Path | None, line: str) -> None:
    _write(output, f"agents: {line}\n")


def _write(output: Path | None, text: str) -> None:
    if output is None:
        print(text, end="", flush=True)
        return
    try:
        with output.open("a") as file:
            file.write(text)
    except OSError:  # a full disk must not end the agent: its own log may be on another
        print(text, end="", file=sys.stderr, flush=True)


def ranks_config(arguments: Sequence[str]) -> Config | None:
    """Loads the config that the ranks' arguments name; None where it is refused: the ranks report why.

    Args:
        arguments: --config and --set.
    """
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_config_arguments(parser)
    with suppress(HeadraceError, OSError, argparse.ArgumentError, SystemExit):
        given, _ = parser.parse_known_args(list(arguments))
        return load_config(given.config, given.overrides)
    return None


@contextmanager
def kept_while_here(section: RunSection | None) -> Iterator[None]:
    """Keeps checkpoint copies in memory between the starts of this job; removes them when the agent ends. No torch.

    A killed agent leaves the copies: the next agent on this node, or the next start of the run, uses or removes them.

    Args:
        section: section `run` of the ranks' config; None where the config is refused.
    """
    memory = _folder(section)
    with ExitStack() as stack:
        if memory is not None:
            stack.callback(remove, memory)
            with suppress(OSError):  # the ranks report it
                stack.enter_context(used(memory))
        yield


def _folder(section: RunSection | None) -> MemoryFolder | None:
    """Returns the run's folder of memory copies; None where the config names none, or is refused."""
    if section is None or section.in_memory_checkpoints is None:
        return None
    return MemoryFolder.of(section.in_memory_checkpoints, section.local_dir)


if __name__ == "__main__":
    sys.exit(guarded(partial(main, None)))
