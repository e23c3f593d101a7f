"""`headrace submit`: checks configs, writes their scripts beside a copy of the code, and submits a chain of jobs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep.config.corpus import CorpusConfig
from data_prep.job.slurm import JobChain, plan_chain, submit_chain
from foundation.directory import write_text
from foundation.errors import ConfigError
from foundation.section import parse
from foundation.shipped import SHARE
from foundation.slurm import cancel_jobs, submit_job
from headrace.submission import snapshot, validate
from headrace.submission.configs import Element, Given, absent_inputs, before, read_configs
from headrace.submission.request import Request, nodes_of, sweep_of, tasks_of
from headrace.submission.site import SiteConfig, load_site
from headrace.submission.stages import CommonSettings, Stage, settings_for, stages_of

Say = Callable[[str], None]
_UNVERIFIED = "containers were never run with these scripts: they are printed by --dry-run, unverified"


def submit(request: Request, *, say: Say) -> None:
    """Submits the configs of a request, or prints their scripts.

    Raises:
        ConfigError, DataError: a config or a job would be refused; nothing is then submitted or left behind.
    """
    if not request.dry_run and shutil.which("sbatch") is None:
        raise ConfigError("submit", why="there is no sbatch on PATH", remedy="submit where Slurm is, or --dry-run")
    site, site_file = load_site(request.site)
    if site.container is not None and not request.dry_run:
        raise ConfigError(f"{site_file}.container", why=_UNVERIFIED, remedy="--dry-run, or modules or venv")
    configs = read_configs(request.files, request.overrides)
    sweep = sweep_of(configs, request.sweeps)
    nodes = nodes_of(configs, request.nodes)
    tasks = tasks_of(request.tasks, site)
    done = _validate(configs, request, site, nodes=nodes, tasks=tasks, sweep=sweep, say=say)
    kept = [each for each in configs if each not in done]
    if not kept:
        say("nothing to do")
        return
    directory = snapshot.directory_of(configs)
    clone = snapshot.is_clone()
    scripts = snapshot.CLONE / "slurm" if clone else SHARE / "slurm"
    root = directory / "code" if clone else SHARE
    plan = CommonSettings(site, directory, root, scripts, nodes, tasks, sweep, request.doctor)
    stages = stages_of(kept, plan)
    if request.dry_run:
        _print(stages, plan, request, say)
        return
    validate.check_not_queued({each.name: each.makes.absolute() for each in stages if not each.chain})
    _submit(stages, plan, request, site_file=site_file, say=say)


def _validate(
    configs: Sequence[Given],
    request: Request,
    site: SiteConfig,
    *,
    nodes: Sequence[int],
    tasks: int,
    sweep: Sequence[Element],
    say: Say,
) -> list[Given]:
    """Checks every config, prints the resolved training configs, and returns the corpora that are already finished."""
    validate.check_partitions({each.name: settings_for(each.kind, site) for each in configs})
    done: list[Given] = []
    for number, given in enumerate(configs):
        waits = [each for each in before(given, configs[:number]) if each not in done]
        own = list(request.overrides) if given.kind == "run" or len(configs) == 1 else []
        left = "another stage makes what it reads" if waits else _draft(given, request, say=say)
        if given.kind == "corpus":
            if validate.check_corpus(given, own, alone=not left):
                say(f"{given.name}: {given.makes} is there already, made with this config")
                done.append(given)
        elif given.kind == "run":
            processes = nodes[given.number - 1] * tasks
            memory = settings_for("run", site).device_memory
            lines = validate.check_training(given, own, processes=processes, memory=memory, sweep=sweep, left=left)
            say("\n".join([f"{given.name}: {given.file}, {processes} processes", *lines]))
        else:
            validate.check_model_stage(given, alone=not left)
    return done


def _draft(given: Given, request: Request, *, say: Say) -> str:
    """Returns why a config is only drafted: its inputs are on another machine; "" if it is checked with them."""
    absent = absent_inputs(given) if request.dry_run else []
    if not absent:
        return ""
    why = f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not on this machine"
    if given.kind != "run":
        say(f"{given.name}: {given.file} is checked alone, and with what it reads at the start of the job: {why}")
    return why


def _submit(stages: Sequence[Stage], plan: CommonSettings, request: Request, *, site_file: Path, say: Say) -> None:
    jobs: dict[str, list[str]] = {}  # later stages wait for a chain's last job
    made = snapshot.make(plan.directory)
    try:
        _write(stages, plan)
        for stage in stages:
            validate.check_with_slurm(_script(plan, stage), stage=stage.name)
        for stage in stages:
            jobs[stage.name] = _submit_stage(stage, plan, request, jobs, say=say)
        command = ["headrace", *sys.argv[1:]]
        snapshot.record(plan.directory, command=command, jobs=jobs, site=str(site_file), chdir=str(Path.cwd()))
    except BaseException:
        cancel_jobs([number for several in jobs.values() for number in several])
        snapshot.remove(made)
        raise
    say(f"{plan.directory}: the code, configs and scripts of these jobs, and logs/")


def _write(stages: Sequence[Stage], plan: CommonSettings) -> None:
    """Writes the directory of a submission."""
    (plan.directory / "logs").mkdir()
    snapshot.copy_code(plan.directory)
    for stage in stages:
        for name, raw in stage.configs.items():
            snapshot.save_config(plan.directory, name, raw)
            if stage.own_modules:
                snapshot.copy_modules(plan.directory, raw)
        write_text(_script(plan, stage), stage.text)


def _submit_stage(
    stage: Stage, plan: CommonSettings, request: Request, jobs: dict[str, list[str]], *, say: Say
) -> list[str]:
    """Submits a stage; returns its job numbers, the last of which later stages wait for."""
    if stage.chain:
        chain = _chain(stage, plan, request)
        numbers = dict(submit_chain(chain))
        say(f"{stage.name}: jobs {', '.join(numbers.values())}, makes {stage.makes}, logs in {chain.logs}")
        return [*(number for name, number in numbers.items() if name != "finish"), numbers["finish"]]
    command = ["sbatch", "--parsable", *_dependency(stage, jobs), str(_script(plan, stage))]

    def refused(said: str) -> ConfigError:
        remedy = "change slurm/site.toml, or the options of submit"
        return ConfigError(stage.name, why=f"sbatch failed: {said}", remedy=remedy)

    number = submit_job(command, refused=refused)
    waits = f", after {', '.join(stage.after)}" if stage.after else ""
    say(f"{stage.name}: job {number}, makes {stage.makes}{waits}")
    return [number]


def _dependency(stage: Stage, jobs: dict[str, list[str]]) -> list[str]:
    waited = [jobs[name][-1] for name in stage.after if name in jobs]
    # cancels a job whose dependency has failed, which would wait for ever
    return [f"--dependency=afterok:{':'.join(waited)}", "--kill-on-invalid-dep=yes"] if waited else []


def _chain(stage: Stage, plan: CommonSettings, request: Request) -> JobChain:
    config = plan.directory / "configs" / f"{stage.name}.json"
    known = parse(CorpusConfig, stage.configs[stage.name])
    return plan_chain(known, words=["--config", str(config)], shares=request.workers, script=_script(plan, stage))


def _script(plan: CommonSettings, stage: Stage) -> Path:
    return plan.directory / f"{stage.name}.sbatch"


def _print(stages: Sequence[Stage], plan: CommonSettings, request: Request, say: Say) -> None:
    """Prints the scripts, and the commands that would submit them."""
    if plan.site.container is not None:
        say(f"container: {_UNVERIFIED}")
    jobs = {stage.name: [f"${stage.name}"] for stage in stages}
    for stage in stages:
        say(f"\n==> {_script(plan, stage)} <==\n{stage.text}")
        if stage.chain:
            chain, before_it = _chain(stage, plan, request), None
            for job in chain.jobs():
                say("$ " + " ".join(chain.command(job, dependency=before_it)))
                before_it = f"${job.name}"
        else:
            say("$ " + " ".join(["sbatch", "--parsable", *_dependency(stage, jobs), str(_script(plan, stage))]))
    say("\nnothing was submitted or written (--dry-run)")
