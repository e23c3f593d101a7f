"""Strikes against a training run on four nodes of a virtual Slurm, at a site's own time limits: `make sweep-cluster`.

Each strike has a cluster and a run of its own. The run must make more steps than before without a person, resume from
one of its two newest checkpoints, and have the losses of one process that nobody disturbed.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.conftest import launch, losses, make_tokens, text_folders, tiny_config, write_config
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.settings import SITE
from tests.virtual_cluster.slurm_run import SlurmRun

NODES = 4
EVERY = 20
"""Steps between checkpoints."""
LAST = 160
"""Step up to which the losses are compared."""
FAR = 100_000
TOLERANCE = 1e-4
"""Of losses in fp32 at another number of ranks, relative."""

Strike = Callable[[SlurmRun, random.Random], None]


def first_node_crashes(run: SlurmRun, _draw: random.Random) -> None:
    """Power failure of the node of the batch script, Slurm's srun and rank 0."""
    run.cluster.node("n1").crash()


def node_crashes(run: SlurmRun, draw: random.Random) -> None:
    """Power failure of another node."""
    run.cluster.node(draw.choice(["n2", "n3", "n4"])).crash()


def cable_is_cut(run: SlurmRun, draw: random.Random) -> None:
    """The node's network is gone; its disk, which all nodes share here, is not."""
    run.cluster.controller.ip(f"link set {draw.choice(['n2', 'n3', 'n4'])} down")


def cable_of_the_first_node_is_cut(run: SlurmRun, _draw: random.Random) -> None:
    """Of the batch script, rank 0 and the heartbeat server; the agents' files are reached still."""
    run.cluster.controller.ip("link set n1 down")


def rank_is_killed(run: SlurmRun, draw: random.Random) -> None:
    """SIGKILL, as by the out-of-memory killer."""
    _signal_rank(run, draw, "KILL")


def rank_is_frozen(run: SlurmRun, draw: random.Random) -> None:
    """SIGSTOP: it answers to nobody."""
    _signal_rank(run, draw, "STOP")


def agent_is_killed(run: SlurmRun, draw: random.Random) -> None:
    """SIGKILL of the agent, whose ranks end with it."""
    run.cluster.node(_node(draw)).machine.run(
        "pkill", "-KILL", "--oldest", "-f", "[-]m pipeline.cluster.elastic --nodes"
    )


def stop_is_requested(run: SlurmRun, _draw: random.Random) -> None:
    """What Slurm sends three minutes before the time limit."""
    run.cluster.run("scancel", "--signal=USR1", str(run.job))


@dataclass(frozen=True)
class Kind:
    """A kind of strike, and how often it is done."""

    strike: Strike
    times: int


KINDS = {
    "first node crashes": Kind(first_node_crashes, 5),
    "another node crashes": Kind(node_crashes, 3),
    "cable of the first node is cut": Kind(cable_of_the_first_node_is_cut, 1),
    "cable of another node is cut": Kind(cable_is_cut, 1),
    "rank is killed": Kind(rank_is_killed, 3),
    "rank is frozen": Kind(rank_is_frozen, 2),
    "agent is killed": Kind(agent_is_killed, 3),
    "stop is requested": Kind(stop_is_requested, 2),
}


def cells() -> dict[str, list[str]]:
    return {name: [f"{name} {number}" for number in range(1, kind.times + 1)] for name, kind in KINDS.items()}


def run_strike(cell: str) -> tuple[bool, str]:
    """Runs one strike; whether all held, and the seconds or what did not hold."""
    name, draw = cell.rpartition(" ")[0], random.Random(cell)
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        work = Path(folder)
        (work / "c").mkdir()
        with VirtualCluster(work / "c", nodes=NODES, cpus=2, patience=SITE) as cluster:
            run = SlurmRun(cluster, work / "run", work / "train.out")
            run.submit(
                write_config(work / "train.json", _config(work / "run", FAR)), [f"--nodes={NODES}", "--time=600"]
            )
            try:
                note = _struck(run, KINDS[name].strike, draw)
            except (TimeoutError, RuntimeError) as error:
                return False, str(error).partition("\n")[0]
            return _judged(run, note)


def _struck(run: SlurmRun, strike: Strike, draw: random.Random) -> str:
    run.wait_for_step(EVERY + 1 + draw.randrange(EVERY), timeout_s=400)
    before, note = timed(run, strike, draw)
    run.wait_for_step(max(before, run.step()) + EVERY)
    return note


def timed(run: SlurmRun, strike: Strike, draw: random.Random) -> tuple[int, str]:
    """Strikes; the step before, and the seconds of each phase until the run steps again."""
    before, words = run.step(), ("agents: start ", "preflight: ", "resuming after")
    counts = {word: run.lines_of(word) for word in words}
    strike(run, draw)
    seconds = [run.wait_for(lambda at=word: run.lines_of(at) > counts[at], timeout_s=400) for word in words]  # type: ignore[misc]
    seconds.append(run.wait_for(lambda: 0 < run.step() != before))
    detected, started, loaded, stepped = seconds
    phases = f"detect {detected:.0f}, start {started:.0f}, load {loaded:.0f}, first step {stepped:.0f}"
    return before, f"step {before}: {sum(seconds):.0f} s ({phases})"


def _judged(run: SlurmRun, note: str) -> tuple[bool, str]:
    before, resumed = int(note.split()[1].rstrip(":")), resumed_after(run)
    if resumed < before - 2 * EVERY:
        return False, f"{note}; resumed after step {resumed}"
    found, expected = run.losses(), _undisturbed()
    wrong = [step for step in found if step <= LAST and abs(found[step] / expected[step] - 1) > TOLERANCE]
    return not wrong, f"{note}; resumed after step {resumed}" + (
        f"; other losses at steps {wrong[:5]}" if wrong else ""
    )


def resumed_after(run: SlurmRun) -> int:
    """Step of the checkpoint that the newest start has taken."""
    line = [line for line in run.text().splitlines() if line.startswith("resuming after")][-1]
    return int(line.split()[3])


@cache
def _tokens() -> Path:
    return make_tokens(Path(tempfile.mkdtemp(prefix="hr-tokens-")), text_folders())


@cache
def _undisturbed() -> dict[int, float]:
    work = Path(tempfile.mkdtemp(prefix="hr-alone-"))
    launch("train.py", write_config(work / "alone.json", _config(work / "run", LAST + 6)))
    return losses(work / "run")


def _config(run_dir: Path, steps: int) -> dict[str, object]:
    section = {"dir": str(run_dir), "steps": steps, "seed": 7, "checkpoint_every": EVERY}
    return tiny_config(_tokens(), run_dir, run=section, parallel={"elastic": True})


def _node(draw: random.Random) -> str:
    return draw.choice(["n1", "n2", "n3", "n4"])


def _signal_rank(run: SlurmRun, draw: random.Random, name: str) -> None:
    """A process that was started as a rank, or waited to be one, whose input is a pipe until then."""
    pids = "$(pgrep -f '[-]m pipeline[.](train --config|elastic[.]warm_rank)')"
    one = f'[ "$(readlink /proc/$p/fd/0)" != /dev/null ] || {{ kill -{name} $p; echo $p; }}'
    found = run.cluster.node(_node(draw)).machine.run("sh", "-c", f"for p in {pids}; do {one}; done")
    assert found, "no rank runs there"
