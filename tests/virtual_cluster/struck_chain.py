"""One submission on four virtual nodes, struck twenty times while it trains: a cell of `make sweep-cluster`.

Nodes that died come back, as after a reboot. Nobody does anything else: every job of the chain has to complete, no step
may be lost or done twice, and the losses have to be those of one process.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from pathlib import Path

from tests.conftest import ROOT, losses, write_config
from tests.virtual_cluster import strikes
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.settings import SITE
from tests.virtual_cluster.slurm_run import SlurmRun
from tests.virtual_cluster.test_submit import on_one_machine, submit, whole_way

CELL = "one submission, struck twenty times"
STEPS = 5000
NODES = {"n1", "n2", "n3", "n4"}
STRIKES: dict[str, tuple[strikes.Strike, int]] = {
    "rank is killed": (strikes.rank_is_killed, 6),
    "rank is frozen": (strikes.rank_is_frozen, 2),
    "agent is killed": (strikes.agent_is_killed, 4),
    "n2 crashes": (lambda run, _: run.cluster.node("n2").crash(), 2),
    "n3 crashes": (lambda run, _: run.cluster.node("n3").crash(), 1),
    "n4 crashes": (lambda run, _: run.cluster.node("n4").crash(), 1),
    "n1 crashes": (strikes.first_node_crashes, 1),  # when it boots again, Slurm queues the whole job again
    "stop is requested": (strikes.stop_is_requested, 2),
}
LAST = "cable of n3 is cut"
"""The last strike: a node that was cut off is used no more in the same job, but in the next one of the chain."""


def run_chain() -> tuple[bool, str]:
    """Runs the chain and the strikes; whether all held, and the seconds of each or what did not hold."""
    draw = random.Random(CELL)
    order = [name for name, (_, times) in STRIKES.items() for _ in range(times)]
    draw.shuffle(order)
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        work = Path(folder)
        (work / "c").mkdir()
        with VirtualCluster(work / "c", nodes=len(NODES), cpus=2, gpus=1, patience=SITE) as cluster:
            try:
                notes = _struck(_submitted(cluster, work), [*order, LAST], draw)
                wrong = _wrong(cluster, work)
            except (TimeoutError, RuntimeError, OSError) as error:
                return False, str(error).partition("\n")[0]
    return not wrong, f"{len(notes)} strikes: " + "; ".join([*notes, *wrong])


def _submitted(cluster: VirtualCluster, work: Path) -> SlurmRun:
    submit(cluster, ROOT, work, *_configs(work), "--nodes", "4,4", "--workers", "2")
    submission = work / "zero3/submissions/1"
    [job] = json.loads((submission / "submission.json").read_text())["jobs"]["train"]
    return SlurmRun(cluster, work / "zero3", submission / f"logs/train-{job}.out", int(job))


def _struck(run: SlurmRun, order: list[str], draw: random.Random) -> list[str]:
    notes = []
    for name in order:
        run.wait_for(lambda: _members(run) == NODES, timeout_s=600)
        run.wait_for_step(max(run.step(), strikes.EVERY) + 5 + draw.randrange(2 * strikes.EVERY), timeout_s=600)
        strike = cable_is_cut if name == LAST else STRIKES[name][0]
        before, note = strikes.timed(run, strike, draw)
        if strikes.resumed_after(run) < before - 2 * strikes.EVERY:
            raise RuntimeError(f"{name}, {note}: resumed after step {strikes.resumed_after(run)}")
        notes.append(f"{name}, {note}")
        print(notes[-1], flush=True)
        if name.endswith(" crashes"):
            run.cluster.node(name.split()[0]).up()
    run.cluster.controller.ip("link set n3 up")
    return notes


def cable_is_cut(run: SlurmRun, _draw: random.Random) -> None:
    """The network of n3 is gone, until the strikes have ended."""
    run.cluster.controller.ip("link set n3 down")


def _members(run: SlurmRun) -> set[str]:
    """Nodes of the newest start, once it has been resumed."""
    tail = run.text().rpartition("agents: start ")[2]
    found = re.match(r"\d+ on ([\w, ]+) \(", tail)
    going = "resuming after" in tail or run.lines_of("agents: start ") == 1
    return set(found[1].split(", ")) if found and going else set()


def _wrong(cluster: VirtualCluster, work: Path) -> list[str]:
    jobs = [job for job in cluster.wait_for_all(timeout_s=3600) if not job.name.startswith("headrace-join")]
    wrong = [f"job {job.name} is {job.state}" for job in jobs if job.state != "COMPLETED"]
    found = losses(work / "zero3")
    if list(found) != list(range(1, STEPS + 1)):
        wrong.append("steps are missing or out of order")
    expected = on_one_machine(work, "train", steps=strikes.LAST + 6)
    differs = [
        step
        for step in range(1, strikes.LAST + 1)
        if abs(found.get(step, 0.0) / expected[step] - 1) > strikes.TOLERANCE
    ]
    return wrong + ([f"other losses at steps {differs[:5]}"] if differs else [])


def _configs(work: Path) -> list[str]:
    """Those of the whole way, with a first training run that is long enough."""
    names = whole_way(work)
    config = json.loads((work / "zero3.json").read_text())
    config["run"] |= {"steps": STEPS, "checkpoint_every": strikes.EVERY}
    config["parallel"] = {"elastic": True}
    config["launch"] = {"node_checks": {"faults": 100}}  # the strikes are the test's, and fall on any node
    config["scheduler"] = {"type": "WSD", "params": {"warmup_num_steps": 3, "decay_num_steps": 5}}
    write_config(work / "zero3.json", config)
    return names
