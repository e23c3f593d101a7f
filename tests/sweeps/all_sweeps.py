"""Every sweep there is, by name. A sweep is made when it is asked for: enumerating the cells of some takes seconds."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from tests.conftest import ROOT, make_tokens, text_folders
from tests.data_prep import campaign as data_prep_campaign
from tests.demo import killed_way
from tests.evaluation.consumers import cells as cells_of_compress
from tests.parity.choice import full
from tests.parity.matrix import curve_of, name_of
from tests.parity.run import failure_text, run
from tests.plan.fake_gpu import cells as fake_gpu
from tests.run.groups.islands import struck
from tests.run.uploads import killed_runs
from tests.runtime.faults.campaign.driver import Campaign, violations_of
from tests.runtime.faults.campaign.injections import FAULTS
from tests.runtime.faults.campaign.layouts import LAYOUTS
from tests.scale import cells as cells_of_scale
from tests.sweeps.families import families as every_family
from tests.sweeps.layout_table import SUFFIX, note_of, summary
from tests.sweeps.mutants import drawn as drawn_mutants
from tests.sweeps.mutations import body as killed_mutants
from tests.sweeps.mutations import run_mutant
from tests.sweeps.run_families import run_family
from tests.sweeps.run_layouts import run_layouts
from tests.sweeps.sweep import STATE, Sweep
from tests.virtual_cluster import strikes, struck_chain

Outcomes = Mapping[str, tuple[bool, str]]
FAULTS_EACH = 10
"""How often every kind of fault is injected."""
KILLS_EACH, KILLS_ON_THE_WAY = 4, 10
"""Of one run in an object store, and of all stages."""


def parity() -> Sweep:
    """Every legal layout against the one-process reference."""
    drawn = {group: random.Random(0).sample(cells, len(cells)) for group, cells in full().items()}
    # cells of a batch share references, and resume from one another's checkpoints
    groups = {
        group: {name_of(values): values for values in sorted(cells, key=lambda values: repr(curve_of(values)))}
        for group, cells in drawn.items()
    }
    by_name = {name: values for cells in groups.values() for name, values in cells.items()}

    def run_batch(cells: Sequence[str]) -> Outcomes:
        with tempfile.TemporaryDirectory(prefix="headrace-parity-") as work:
            found = run([by_name[cell] for cell in cells], Path(work))
        notes = {cell: "" if result.passed else failure_text(cell, result) for cell, result in found.items()}
        return {cell: (result.passed, notes[cell]) for cell, result in found.items()}

    return Sweep(
        name="parity",
        title="every legal layout against one plain process",
        what="A cell is a layout with a precision and options. It runs 20 steps, which are compared with one plain"
        " process (losses, gradient norms, every tensor of the first gradient, held-out loss), and resumes another"
        " layout's checkpoint for 5 steps.",
        groups={group: list(cells) for group, cells in groups.items()},
        run=run_batch,
        batch=8,
    )


def faults() -> Sweep:
    """Every kind of fault injected into training runs."""

    def inject(cells: Sequence[str]) -> Outcomes:
        (cell,) = cells
        kind = cell.removeprefix("training: ")
        work = Path(tempfile.mkdtemp(prefix="headrace-faults-"))
        lines: list[str] = []
        campaign = Campaign(
            work,
            make_tokens(work, text_folders()),
            LAYOUTS,
            ["warm", "warm", "warm", "nproc", "torchrun", "deepspeed"],
            random.Random(cell).getrandbits(16),
            report=lambda outcome: lines.append(str(outcome)),
            log=lines.append,
        )
        outcomes = campaign.run([kind] * FAULTS_EACH, jobs=os.cpu_count() or 2)
        wrong = [f"{violation.sort}: {violation.what}" for _, violation in violations_of(outcomes)]
        seconds = median(outcome.seconds for outcome in outcomes)
        note = f"{len(outcomes)} faults, median {seconds:.1f} s until all processes had ended"
        return {cell: (not wrong, "; ".join(wrong) or note)}

    def inject_into_data_prep(cells: Sequence[str]) -> Outcomes:
        (cell,) = cells
        with data_prep_campaign.small_disk() as work:
            campaign = data_prep_campaign.Campaign(work, random.Random(cell).getrandbits(16))
            campaign.run(FAULTS_EACH, log=[].append, kinds=[cell.removeprefix("data prep: ")])
        wrong = [why for entry in campaign.results.values() for why in entry.wrong]
        return {cell: (not wrong, "; ".join(wrong) or f"{FAULTS_EACH} faults")}

    training = [f"training: {kind}" for kind in FAULTS]
    prep = [f"data prep: {kind}" for kind in data_prep_campaign.FAULTS]
    return Sweep(
        name="faults",
        title="faults injected at random moments",
        what=f"A cell is a kind of fault: a kill, a stop, a full disk, a damaged checkpoint. {FAULTS_EACH} of them are"
        " injected at random moments into training runs of several layouts and launchers, or into data-prep jobs. After"
        " each one, all processes must be gone, nothing may look finished that is not, and the run or job must resume"
        " with the result of an undisturbed one.",
        groups={"training": training, "data prep": prep},
        run=lambda cells: inject(cells) if cells[0] in training else inject_into_data_prep(cells),
    )


def families() -> Sweep:
    """Every causal language model of transformers, tiny."""

    def run_batch(cells: Sequence[str]) -> Outcomes:
        found: dict[str, tuple[bool, str]] = {}
        with tempfile.TemporaryDirectory(prefix="headrace-families-") as work:
            trained = [cell for cell in cells if not cell.endswith(SUFFIX)]
            tokens = make_tokens(Path(work), text_folders()) if trained else Path()
            for kind in trained:
                result = run_family(kind, tokens, Path(work) / kind)
                found[kind] = (result.trained, result.note)
        for cell in set(cells) - set(trained):
            outcomes = run_layouts(cell.removesuffix(SUFFIX))
            wrong = any(outcome.startswith(("differs", "failed")) for outcome in outcomes.values())
            found[cell] = (not wrong, note_of(outcomes))
        return found

    groups: dict[str, list[str]] = {}
    for kind in every_family():
        groups.setdefault(next(name for name in _LETTERS if name[0] <= kind[0] <= name[-1]), []).append(kind)
    groups |= {f"{name}, layouts": [kind + SUFFIX for kind in kinds] for name, kinds in groups.items()}
    return Sweep(
        name="families",
        title="every causal language model of transformers, trained, exported and loaded again",
        what="A cell is an architecture (`model_type`), as a tiny model. It trains 3 steps on two processes under"
        " ZeRO-1, ZeRO-3 and FSDP2; every run is exported, the export is loaded by transformers, and its held-out loss"
        " must be the run's to 1e-4 nats. It trains with its sequence divided in two (cp 2), to the same loss, and from"
        " three of the four layers of its export, or is refused. Sequences cross the thresholds in its config. Where"
        " headrace's own attention is refused, eager is used. What did not pass is listed with the property of the"
        " architecture that forces the refusal, or with the fault. A cell of layouts trains the tiny model 3 steps in"
        " every column's layout on two ranks, if `headrace check` accepts it there. Losses, gradient norms and every"
        " tensor of the first gradient must be those of one process with transformers' eager attention, to the"
        " [tolerances](../reference/parity.md); it has every document of masked and packed samples by itself. It passes"
        " where nothing differs or fails; refusals are counted below.",
        groups=groups,
        run=run_batch,
        batch=8,
        failed="Refused, and failed",
        body=summary,
    )


def gpu() -> Sweep:
    """Every shipped config, as one training step on a GPU that is not there."""
    cases = fake_gpu.shipped_cases()

    def run_batch(cells: Sequence[str]) -> Outcomes:
        found: dict[str, tuple[bool, str]] = {}
        for cell in cells:
            (result,) = fake_gpu.run_cases([cases[cell]])
            found[cell] = fake_gpu.judged(cell, result)
        return found

    groups: dict[str, list[str]] = {}
    for cell, case in cases.items():
        groups.setdefault(fake_gpu.engine_of(case), []).append(cell)
    return Sweep(
        name="gpu",
        title="a training step of every shipped config on a GPU that is not there",
        what="A cell is a config at its real size and number of ranks, on one rank of its pipeline: forward and"
        " backward passes of all micro-batches and the update, by the engine itself on fake tensors. It fails on any"
        " error, on collectives, host reads, copies from pageable memory or FLOPs that differ from"
        " [Communication and memory](../reference/communication.md), and on another peak.",
        groups=groups,
        run=run_batch,
        failed="Refused, and failed",
    )


def compress() -> Sweep:
    """Architecture x scheme x tokenizer, scored by what serves it."""
    work = ROOT / "out" / "sweep-compress"

    def run_batch(cells: Sequence[str]) -> Outcomes:
        return {cell: cells_of_compress.run_cell(cell, work) for cell in cells}

    return Sweep(
        name="compress",
        title="compressed models, scored by the programs that serve them",
        what="A cell is an architecture, a scheme and a kind of tokenizer, as a tiny model in bf16 trained for some"
        " seconds. It is compressed, and every consumer that takes the scheme scores it: mean KL to the original in"
        " nats, and how often both have the same likeliest token. bf16 is the original itself. vLLM is run where"
        " HEADRACE_VLLM_PYTHON names its Python.",
        groups=cells_of_compress.groups(),
        run=run_batch,
        failed="Refused, and failed",
        passed="Accepted",
    )


def cluster() -> Sweep:
    """Strikes against a run under Slurm."""

    def run_one(cell: str) -> tuple[bool, str]:
        return struck_chain.run_chain() if cell == struck_chain.CELL else strikes.run_strike(cell)

    return Sweep(
        name="cluster",
        title="strikes against a run on four nodes of a virtual Slurm",
        what="A cell is a strike at a random moment, on a cluster with a site's own time limits (SlurmdTimeout 300,"
        " cred_expire 120, MinJobAge 300). The run must make more steps than before without a person, resume from one"
        " of its two newest checkpoints, and have the losses of one process. Seconds are from the strike: until the"
        " agents have decided on another start (detect), then until its process group is formed (start), until its"
        " checkpoint is chosen (load), and until its first step; a stop request is followed by a requeue. All nodes"
        " share the cores of one machine. One cell is a submission of the whole way (tokens, two training runs, export,"
        " prune, distil, quantize) whose first training run is struck twenty times; every job has to complete.",
        groups={**strikes.cells(), struck_chain.CELL: [struck_chain.CELL]},
        run=lambda cells: {cell: run_one(cell) for cell in cells},
        passed="Strikes",
    )


def islands() -> Sweep:
    """Islands that are killed, and that come late."""
    return Sweep(
        name="islands",
        title="islands are killed, and come late",
        what="A cell is a run of two islands of a tiny model, 30 rounds of 5 steps. Either one island is killed"
        " (SIGKILL) at a random moment, and in about half of the cells started again up to 2 s later; or a third"
        " one joins at a random moment. All processes must end, the survivor must have made all rounds (but for three"
        " at most in which it was silent and done without, which its cell says), what its weights contain and what was"
        " lost must be every sample once, and one that came late or back must have trained and have the held-out loss"
        " of the others. A cell says so where its loss lies outside of the range of three undisturbed seeds by more"
        " than the range's width. Seconds are of the run.",
        groups=struck.cells(),
        run=lambda cells: {cell: struck.run_cell(cell, STATE / "islands-undisturbed.json") for cell in cells},
        passed="Runs",
    )


def buckets() -> Sweep:
    """Runs in an object store that are killed, and the demo's whole way."""

    def run_one(cell: str) -> tuple[bool, str]:
        if cell.startswith("way "):
            return killed_way.run_cell(cell, kills=KILLS_ON_THE_WAY)
        return killed_runs.run_cell(cell, kills=KILLS_EACH)

    return Sweep(
        name="buckets",
        title="runs in an object store are killed, and the store has faults",
        what="A cell is a seed. Two ranks: a run whose directory is in a bucket (moto, an S3 server) is killed"
        f" (SIGKILL) {KILLS_EACH} times at random moments, in half of the rounds with the host's cache deleted, in two"
        " thirds with faults in 10 or 20 % of the requests: 503, a reset, a stall, an answer lost after the last byte."
        " After each kill every checkpoint that the bucket shows must have the checksums of its manifest, and all that"
        " were said to be uploaded must be there; at its end the run must have the losses of an undisturbed one, to"
        " the last bit. The whole way: the demo's stages (prep, train, export, prune, cache-logits, distill, export,"
        " quantize, GGUF, eval, cards), of a small config, with every directory in a bucket, are started one after the"
        f" other, and {KILLS_ON_THE_WAY} times one of them is killed with all its processes, at a random"
        " moment or at a random write to the store, and the same command is started again, in about a third of the"
        " cases with the host's cache deleted. After each kill every directory that has a manifest must have its"
        " checksums; at the end tokens, checkpoints, logits and models must have the files of a way on a disk, byte for"
        " byte, and nothing else may be there.",
        groups={
            "two ranks": [f"seed {number}" for number in range(100 // KILLS_EACH)],
            "the whole way": [f"way {number}" for number in range(2)],
        },
        run=lambda cells: {cell: run_one(cell) for cell in cells},
        passed="Runs",
    )


def mutations() -> Sweep:
    """Small faults in the product code, each of which a test should find."""
    return Sweep(
        name="mutations",
        title="small faults in the code, and the tests that find them",
        what="A cell is a mutant: one comparison, operator, whole number, order of arguments or statement is changed in"
        " a copy of the code, drawn by a seed over eight subjects. CI's tests in the folder that mirrors its module run"
        " until one fails, and the parity matrix where none does, or the tests of its package. A cell passes if a test"
        " fails that passes again without the mutant, or if the tests hang.",
        groups={subject: [each.name for each in found] for subject, found in drawn_mutants().items()},
        run=lambda cells: {cell: run_mutant(cell) for cell in cells},
        failed="Survived",
        body=killed_mutants,
    )


def scale() -> Sweep:
    """Parts of the product at the size of a thousand nodes."""
    return Sweep(
        name="scale",
        title="Scale: what grows with the size of a run",
        what="A cell is a part of the product, measured at four sizes or more with real servers, files and code, and"
        " simulated ranks, hosts and tasks. Figures are for the process with the most work. The target is 1,000"
        " nodes of 8 GPUs, a 405B, 10^13 tokens, 10^9 documents, 2 million steps and 500 attempts. Where that size"
        " was not measured, figures are extrapolated by the larger of two exponents: over all sizes, and over the"
        " two largest. At the target one process may use a minute of CPU, 2 GiB, and 1,000 file operations a"
        " second, and its cost may grow linearly. Wall-clock seconds were measured on two busy cores.",
        groups=cells_of_scale.groups(),
        run=cells_of_scale.run_cells,
        batch=4,
        failed="Failed cells",
        page=ROOT / "docs" / "reference" / "scale.md",
        body=cells_of_scale.body,
    )


_LETTERS = ("a to d", "e to g", "h to m", "n to z")

SWEEPS: dict[str, Callable[[], Sweep]] = {
    "parity": parity,
    "faults": faults,
    "families": families,
    "gpu": gpu,
    "compress": compress,
    "cluster": cluster,
    "islands": islands,
    "buckets": buckets,
    "mutations": mutations,
    "scale": scale,
}
