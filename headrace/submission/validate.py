"""Refuses a submission before any job is queued, by its configs, layouts and memory, and by Slurm's own checks.

An earlier stage may make a stage's input. Checks that need the input are then left to the job, when it starts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from foundation.errors import ConfigError, DataError, refuse_all
from foundation.section import parse, suggest
from foundation.slurm import run_slurm
from headrace.submission.configs import Element, Given
from headrace.submission.site import StageSettings


def check_training(
    given: Given, overrides: Sequence[str], *, processes: int, memory: str | None, sweep: Sequence[Element], left: str
) -> list[str]:
    """Runs `headrace check` on a training config and every element of its sweep, for the number of processes.

    Args:
        memory: memory of a GPU, e.g. 80GB; a config whose ranks need more is refused. None for no check.
        left: why the config's inputs are not here, and are checked when the job starts; "" if they are.

    Returns:
        the lines of the summary.

    Raises:
        ConfigError, DataError: the config cannot run, the number of processes is wrong, or the run does not fit in
            memory.
    """
    from pipeline.config.load import read_config  # noqa: PLC0415
    from pipeline.plan import check  # noqa: PLC0415

    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    options = ["--config", str(given.file), f"--processes={processes}"]
    options += [f"--memory={memory}"] if memory is not None else []
    lines: list[str] = []
    for number, values in enumerate([each.overrides for each in sweep] or [[]]):
        words = [*overrides, *values]
        # elements differ only in values: data and model are checked once
        rules_only = ["--rules-only"] if left or number > 0 else []
        entries = check.summary(read_config(given.file, words), parser.parse_args([*options, *rules_only]))
        lines = lines or [f"{entry.label:>14}  {entry.text}" for entry in entries]
        for entry in entries:
            if entry.label == "memory fit" and not entry.values["fits"]:
                why, remedy = f"a rank {entry.text}", "more nodes, a smaller micro-batch, or another layout"
                raise ConfigError("device_memory", memory, why=why, remedy=remedy)
    if left:
        lines.append(f"{'left':>14}  data, model and memory are checked at the start of the job: {left}")
    return lines


def check_corpus(given: Given, overrides: Sequence[str], *, alone: bool) -> bool:
    """Checks a corpus config and, if they are `alone`, its inputs; returns whether its output already exists.

    Raises:
        ConfigError, DataError: the job would be refused.
    """
    from data_prep.config.corpus import load  # noqa: PLC0415
    from data_prep.job import prepare  # noqa: PLC0415

    config = load(given.file, list(overrides))
    return alone and prepare.output_is_complete(prepare.inspect(config))


def check_model_stage(given: Given, *, alone: bool) -> None:
    """Checks a prune, quantize or compress config, as far as its model exists.

    Raises:
        ConfigError, DataError: the job would be refused.
    """
    if given.kind == "compress":
        _check_recipe(given, alone=alone)
    elif given.kind == "prune":
        from pipeline.compress.pruning import rules  # noqa: PLC0415
        from pipeline.compress.pruning.config import PruneConfig  # noqa: PLC0415

        pruning = parse(PruneConfig, given.raw)
        if alone:
            rules.prepare(pruning)
    else:
        from pipeline.compress.quantization import rules as quantizing  # noqa: PLC0415
        from pipeline.compress.quantization.config import QuantizeConfig  # noqa: PLC0415

        config = parse(QuantizeConfig, given.raw)
        if alone:
            quantizing.prepare(config)


def _check_recipe(given: Given, *, alone: bool) -> None:
    from pipeline.compress.recipe.check import check_names, check_recipe, check_steps  # noqa: PLC0415
    from pipeline.compress.recipe.config import RecipeConfig  # noqa: PLC0415
    from pipeline.compress.recipe.steps import is_folder, plan_steps  # noqa: PLC0415

    config = parse(RecipeConfig, given.raw)
    (check_recipe if alone else check_names)(config)
    if config.distill is not None:
        from pipeline.config.load import load_config  # noqa: PLC0415

        places = {"model.path": config.output, "distill.teacher": config.output, "run.dir": config.output}
        words = [f"{key}={json.dumps(value)}" for key, value in places.items()]
        load_config(config.distill.config, [*config.distill.overrides, *words])
    recipe = plan_steps(config)
    if alone and is_folder(recipe.original):
        check_steps(recipe)


def check_partitions(stages: dict[str, StageSettings]) -> None:
    """Checks that the partitions exist, if Slurm can be asked.

    Args:
        stages: name of a stage -> its settings.

    Raises:
        ConfigError: a partition does not exist.
    """
    done = run_slurm("sinfo", "--noheader", "--format=%R")
    known = sorted(set(done.stdout.split()))
    if done.returncode or not known:
        return
    problems = []
    for name, settings in stages.items():
        wrong = [each for each in (settings.partition or "").split(",") if each and each not in known]
        for each in wrong:
            near = suggest(each, known)
            remedy = f"did you mean '{near}'?" if near else f"one of {', '.join(known)}"
            problems.append(ConfigError("partition", each, why=f"Slurm has no such partition ({name})", remedy=remedy))
    refuse_all(problems)


def check_not_queued(makes: dict[str, Path]) -> None:
    """Checks that no submitted job has the same output: the second would fail because the first holds the lock.

    Args:
        makes: name of a stage -> directory that it writes.

    Raises:
        ConfigError: Slurm does not answer.
        DataError: a job with the same output is queued or running.
    """
    done = run_slurm("squeue", "--noheader", "--format=%F|%T|%k")
    if done.returncode:
        told = done.stderr.strip().splitlines()[-1:] or [f"squeue ended with {done.returncode}"]
        why = f"Slurm does not answer: {told[0]}"
        raise ConfigError("submit", why=why, remedy="try again when its controller runs; --dry-run needs none")
    rows = [line.split("|", 2) for line in done.stdout.splitlines()]
    for name, path in makes.items():
        found = sorted({f"{number} ({state.lower()})" for number, state, comment in rows if comment == str(path)})
        if found:
            numbers = " ".join(each.split()[0] for each in found)
            why = f"{name}: jobs that write {path} are queued or running: {', '.join(found)}"
            raise DataError(
                f"{why}\n  try: wait for them, or scancel {numbers} and submit again: finished work is kept"
            )


def check_with_slurm(script: Path, *, stage: str) -> None:
    """Makes Slurm check a script (`sbatch --test-only`): account, QOS, limits, and whether any nodes can ever run it.

    Raises:
        ConfigError: Slurm would refuse the script.
    """
    done = run_slurm("sbatch", "--test-only", str(script))
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = f"Slurm refuses the job: {said[-1].removeprefix('allocation failure: ') if said else done.returncode}"
        raise ConfigError(
            stage, why=why, remedy="change slurm/site.toml or --nodes; sinfo and sacctmgr show what there is"
        )
