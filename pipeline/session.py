"""One training session: from a resolved config to a finished run. What train.py and distill.py have in common."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from headrace.directory import write_manifest
from headrace.errors import ConfigError
from pipeline.checkpoint.store import Checkpoint, on_rank_zero
from pipeline.config.rules import ResolvedRun
from pipeline.data.dataset import tokenizer_details
from pipeline.data.loader import StepLoader, heldout_batches
from pipeline.engines.base import Engine, Objective
from pipeline.engines.build import build_engine, pick_device
from pipeline.engines.deepspeed_machine import check_machine
from pipeline.launch import Launch, Meeting, detect, process_group
from pipeline.metrics.console import TrainingDisplay
from pipeline.metrics.journal import Journal
from pipeline.metrics.peak import peak_flops
from pipeline.metrics.wandb_sink import WandbSink
from pipeline.parallel.assemble import stage_lines
from pipeline.parallel.mesh import Mesh, mesh_of
from pipeline.preflight import preflight
from pipeline.prepare import Prepared, prepare
from pipeline.trainer import Sink, Training


def train(run: ResolvedRun, make_objective: Callable[[torch.device], Objective]) -> None:
    """Trains to the end of a run, from where its directory's newest checkpoint stopped.

    Args:
        run: the resolved config.
        make_objective: called with this rank's device; what it returns is minimised.

    Raises:
        HeadraceError: anything the user can mend; before work starts wherever it can be known by then.
    """
    launch = detect()
    _quiet_libraries(launch)
    prepared = prepare(run)
    if run.config.engine == "deepspeed":
        check_machine(run.config)
    device = pick_device(launch)
    mesh: Mesh | None = None
    answered: str | None = None
    with ExitStack() as stack:
        stack.enter_context(_only_one(prepared.run_dir) if launch.rank == 0 else nullcontext())
        if not run.plain:
            opened = process_group(launch, gpu=device.index, config=run.config.launch)
            mesh, answered = _preflight(run, stack.enter_context(opened), device)
        objective = make_objective(device)
        engine = build_engine(run, prepared.model, prepared.values, objective, device=device, mesh=mesh)
        _run(prepared, engine, launch, stack, answered)


def _run(prepared: Prepared, engine: Engine, launch: Launch, stack: ExitStack, answered: str | None) -> None:
    run, shown = prepared.run, launch.rank == 0
    voice = TrainingDisplay(first=0, total=run.steps, shown=shown)
    checkpoint = prepared.store.newest_whole(voice.say)
    done = checkpoint.step if checkpoint else 0
    if checkpoint is not None:
        engine.load(checkpoint.path)
        on_rank_zero(lambda: _tell_run(prepared, done))  # a run killed after its checkpoint has not told yet
    sinks = _open_sinks(prepared, stack, from_step=done) if shown else []
    display = stack.enter_context(TrainingDisplay(first=done, total=run.steps, shown=shown))
    if answered is not None:
        display.say(answered)
    for line in _opening_lines(prepared, engine, launch, checkpoint):
        display.say(line)
    for sink in sinks:
        sink.write("event", done, event="resumed" if checkpoint else "started", world_size=launch.world_size)
    place = run.topology.coordinates(launch.rank)
    share: dict[str, Any] = {
        "dp_rank": place["dp"],
        "cp": run.topology.cp,
        "cp_rank": place["cp"],
        "mask_documents": run.config.data.mask_documents,
    }
    pin = torch.cuda.is_available()
    training = Training(
        run=run,
        engine=engine,
        steps=StepLoader(
            prepared.blend,
            run.batch,
            **share,
            steps=(done + 1, run.steps),
            prefetch=run.config.data.prefetch,
            pin=pin,
        ),
        heldout=prepared.heldout,
        heldout_batches=lambda dataset: heldout_batches(
            dataset,
            batch_size=run.batch.micro,
            dp=run.topology.dp,
            **share,
            samples=run.config.evaluation.samples,
        ),
        save=lambda step: _save(prepared, engine, step),
        sinks=sinks,
        display=display,
        flops_per_token=prepared.size.flops_per_token,
        peak_flops=peak_flops(engine.device_name, bf16=run.config.bf16.enabled),
    )
    training.go()
    display.say(f"finished: {run.steps} steps, in {prepared.run_dir}")


def _save(prepared: Prepared, engine: Engine, step: int) -> Checkpoint:
    run = prepared.run
    details = {
        "step": step,
        "samples": step * run.batch.samples,
        "topology": str(run.topology),
        "engine": run.config.engine,
        "curve": prepared.curve,
        "hf_config": prepared.hf_config,
        "tokenizer": tokenizer_details(prepared.blend.sources[0].manifest),
    }
    config = run.config.model_dump(mode="json")
    parents = prepared.parents
    checkpoint = prepared.store.save(engine.save, step=step, config=config, parents=parents, details=details)

    on_rank_zero(lambda: _tell_run(prepared, step))
    return checkpoint


def _tell_run(prepared: Prepared, step: int) -> None:
    """Writes the run's manifest: how far it has got."""
    run = prepared.run
    summary = {"step": step, "steps": run.steps, "finished": step == run.steps}
    config = run.config.model_dump(mode="json")
    write_manifest(prepared.run_dir, kind="run", config=config, parents=prepared.parents, details=summary)


def _opening_lines(prepared: Prepared, engine: Engine, launch: Launch, checkpoint: Checkpoint | None) -> Iterator[str]:
    run, size = prepared.run, prepared.size
    samples = run.steps * run.batch.samples
    epochs = max(prepared.blend.order.epochs(samples))
    yield f"{launch} on {engine.device_name}; {run.layout}"
    yield f"{size.parameters:,} parameters, {run.precision}; {run.batch}"
    yield from stage_lines(run, prepared.model)
    yield (
        f"{run.steps:,} steps = {run.steps * run.batch.tokens:,} tokens,"
        f" {epochs:.2f} epochs of {prepared.blend.tokens:,}"
    )
    if checkpoint is not None:
        yield f"resuming after step {checkpoint.step} from {checkpoint.path}"


def _open_sinks(prepared: Prepared, stack: ExitStack, *, from_step: int) -> list[Sink]:
    run_dir = prepared.run_dir
    journal = Journal(run_dir, from_step=from_step)
    stack.callback(journal.close)
    sinks: list[Sink] = [journal]
    if prepared.run.config.wandb.enabled:
        wandb_sink = WandbSink(prepared.run.config, run_dir)
        stack.callback(wandb_sink.close)
        sinks.append(wandb_sink)
    return sinks


def _preflight(run: ResolvedRun, meeting: Meeting, device: torch.device) -> tuple[Mesh | None, str | None]:
    if meeting.world_size == 1:
        return None, None

    def make() -> Mesh:
        mesh = mesh_of(run, device.type)
        assert mesh is not None
        return mesh

    return preflight(meeting, make, device=device)


@contextmanager
def _only_one(run_dir: Path) -> Iterator[None]:
    """Holds the run's directory against a second run. The lock goes with the process, however it ends."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "another process is training there"
            raise ConfigError(
                "run.dir", str(run_dir), why=why, remedy="wait for it, or choose another run.dir"
            ) from None
        except OSError as error:  # a file system without locks, such as Lustre mounted without flock
            print(
                f"warning: {run_dir} cannot be locked ({error}): see to it that only one run uses it", file=sys.stderr
            )
        yield


def _quiet_libraries(launch: Launch) -> None:
    """Libraries report on every rank; errors and our own lines are what a user needs."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torch 2.13 deprecates collectives that DeepSpeed 0.19 calls at every step
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    for name in ("DeepSpeed", "deepspeed", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING if launch.rank == 0 else logging.ERROR)
