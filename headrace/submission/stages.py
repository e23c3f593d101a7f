"""The jobs of a submission: a script for each stage, and the stages that each waits for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.directory import MANIFEST
from foundation.user_function import modules_here
from headrace.submission.configs import VERBS, Element, Given, before
from headrace.submission.environment import settings_of
from headrace.submission.site import SiteConfig, StageSettings
from headrace.submission.snapshot import MODULES

SCRIPTS = {"corpus": "data_prep.sbatch", "run": "train.sbatch", "doctor": "doctor.sbatch"}
"""Kind -> script; all other kinds have `pipeline.sbatch`."""
ORIGINAL = "original"
"""Folder in the output of a compress config for the export of its run (see `pipeline.compress.recipe.steps`)."""
_OPTION = re.compile(r"##?SBATCH\s+(--[\w-]+)")
_HINT = re.compile(r"# (Edit the header|A line that starts with '##SBATCH')")


@dataclass(frozen=True)
class Stage:
    """A job, a job array or, for data prep, a chain of jobs.

    Attributes:
        after: names of the stages that have to succeed first.
        text: text of its script.
        configs: file name -> content of the configs that the stage reads.
        chain: whether this is a corpus config, whose script is submitted once per job of the chain.
        makes: directory that the stage writes.
        own_modules: whether its configs name functions of modules in the working directory, which are copied.
    """

    name: str
    after: tuple[str, ...]
    text: str
    makes: Path
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    chain: bool = False
    own_modules: bool = False


@dataclass(frozen=True)
class CommonSettings:
    """Settings that all stages of a submission share.

    Attributes:
        directory: directory of the submission.
        root: HEADRACE_ROOT of the jobs: the copy of the code, or the installed package's files.
        scripts: directory of the shipped scripts.
        nodes, tasks: nodes of each training config, and processes on each node.
        doctor: whether `headrace doctor` runs before each training.
    """

    site: SiteConfig
    directory: Path
    root: Path
    scripts: Path
    nodes: Sequence[int]
    tasks: int
    sweep: Sequence[Element] = ()
    doctor: bool = False


def stages_of(configs: Sequence[Given], plan: CommonSettings) -> list[Stage]:
    """The stages of a submission, each after the stages it waits for."""
    found: list[Stage] = []
    for number, given in enumerate(configs):
        after = before(given, configs[:number])
        if given.kind == "corpus":
            found.append(_data(given, plan))
        elif given.kind == "run":
            names = tuple(each.name for each in after)
            if plan.doctor:
                found.append(_doctor(given, names, plan))
                names = (*names, found[-1].name)
            found.append(_training(given, names, plan))
        else:
            runs = [each for each in after if each.kind == "run" and _is_model(given, each)]
            # a finished step is not repeated
            if given.kind == "compress" and runs and not (given.makes / ORIGINAL / MANIFEST).is_file():
                found.append(_export(given, runs[0], plan))
                after = [*after, given]
            waited = [found[-1].name if each is given else each.name for each in after]
            found.append(_model(given, tuple(waited), plan))
    return found


def settings_for(kind: str, site: SiteConfig) -> StageSettings:
    """A site's settings for the stage of a kind of config, or for `export`."""
    return site.stage({"corpus": "data", "run": "train", "export": "export"}.get(kind, "compress"))


def _is_model(given: Given, run: Given) -> bool:
    return Path(str(given.raw.get("model"))).absolute() == run.makes.absolute()


def _data(given: Given, plan: CommonSettings) -> Stage:
    options = _options("corpus", given.name, given.makes, plan)
    return Stage(given.name, (), _fill(plan, "corpus", options), given.makes, {given.name: given.raw}, chain=True)


def _doctor(given: Given, names: tuple[str, ...], plan: CommonSettings) -> Stage:
    """The job that checks a training's nodes; of a sweep, for the first element's config."""
    name = given.name.replace("train", "doctor")
    makes, config = plan.directory / name, f"{given.name}-0" if plan.sweep else given.name
    options = _options("run", name, makes, plan) | _nodes(given, plan)
    options.pop("--time", None)  # the script's own: it needs less than the training
    words = quoted(["--config", str(_config(plan, config)), "--nproc", str(plan.tasks), "--out", str(makes)])
    return Stage(name, names, _fill(plan, "doctor", options, words), makes)


def _nodes(given: Given, plan: CommonSettings) -> dict[str, str]:
    """Options of sbatch for the nodes of a training."""
    return {"--nodes": str(plan.nodes[given.number - 1]), "--ntasks-per-node": str(plan.tasks)}


def _training(given: Given, names: tuple[str, ...], plan: CommonSettings) -> Stage:
    options = _options("run", given.name, given.makes, plan) | _nodes(given, plan)
    own = bool(modules_here(given.raw))
    listed = [f"export PYTHONPATH={quoted([str(plan.directory / MODULES)])}${{PYTHONPATH:+:$PYTHONPATH}}"] * own
    configs: dict[str, Mapping[str, Any]] = {given.name: given.raw}
    words = quoted([str(_config(plan, given.name))])
    if plan.sweep:  # one config per element, each with its own run directory
        log = shlex.quote(f"{plan.directory}/logs/{given.name}-%A-%a.out")
        options |= {"--array": f"0-{len(plan.sweep) - 1}", "--output": log}
        configs = {f"{given.name}-{i}": _with_values(given, element) for i, element in enumerate(plan.sweep)}
        words = f'{quoted([str(plan.directory / "configs")])}/{given.name}-"$SLURM_ARRAY_TASK_ID".json'
        listed += [f"# element {i}: {' '.join(each.values)}, in {each.run_dir}" for i, each in enumerate(plan.sweep)]
    text = _fill(plan, "run", options, words, listed)
    return Stage(given.name, names, text, given.makes, configs, own_modules=own)


def _with_values(given: Given, element: Element) -> dict[str, Any]:
    from foundation import configfile  # noqa: PLC0415

    return configfile.overridden(given.raw, element.overrides)


def _export(given: Given, run: Given, plan: CommonSettings) -> Stage:
    name = given.name.replace("compress", "export")
    target = given.makes / ORIGINAL
    words = quoted(["export", str(run.makes), str(target)])
    return Stage(name, (run.name,), _fill(plan, "export", _options("export", name, target, plan), words), target)


def _model(given: Given, after: tuple[str, ...], plan: CommonSettings) -> Stage:
    options = _options(given.kind, given.name, given.makes, plan)
    words = quoted([*VERBS[given.kind], "--config", str(_config(plan, given.name))])
    return Stage(given.name, after, _fill(plan, given.kind, options, words), given.makes, _snapshot(given, plan))


def _snapshot(given: Given, plan: CommonSettings) -> dict[str, Mapping[str, Any]]:
    """A compress config and the training config that it names, which the job reads when it runs."""
    distill = given.raw.get("distill") if given.kind == "compress" else None
    if not distill:
        return {given.name: given.raw}
    from foundation import configfile  # noqa: PLC0415

    student = f"{given.name}-student"
    named = {**given.raw, "distill": {**distill, "config": str(_config(plan, student))}}
    return {given.name: named, student: configfile.load(distill["config"])}


def _config(plan: CommonSettings, name: str) -> Path:
    return plan.directory / "configs" / f"{name}.json"


def _options(kind: str, name: str, makes: Path, plan: CommonSettings) -> dict[str, str | None]:
    """Options of sbatch for a stage, from the site's settings."""
    site, settings = plan.site, settings_for(kind, plan.site)
    given: dict[str, str | None] = {
        "--job-name": f"headrace-{name}",
        "--comment": str(makes.absolute()),
        "--chdir": str(Path.cwd()),
        "--output": f"{plan.directory}/logs/{name}-%j.out",
        "--partition": settings.partition,
        "--account": settings.account,
        "--qos": settings.qos,
        "--time": settings.time,
        "--mem": settings.memory,
        "--gpus-per-node": None if settings.gpus is None else str(settings.gpus),
        "--cpus-per-task": None if settings.cpus is None else str(settings.cpus),
        "--mail-user": site.mail,
        "--mail-type": None if site.mail is None else ",".join(site.mail_events),
    }
    if site.container is not None and site.container.runtime == "pyxis":
        given["--container-image"] = site.container.image
        given["--container-mounts"] = ",".join(f"{each}:{each}" for each in [str(Path.cwd()), *site.mounts])
    # sbatch reads quotes in a header as a shell does: paths may have spaces. Users quote their own values of `extra`
    chosen = {key: shlex.quote(value) for key, value in given.items() if value is not None}
    return {**chosen, **dict(option_of(text) for text in settings.extra)}


def _fill(
    plan: CommonSettings,
    kind: str,
    options: Mapping[str, str | None],
    words: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The text of a stage's script, with `words` as its arguments, quoted for bash."""
    arguments = [] if words is None else [f"set -- {words}"]
    shipped = plan.scripts / SCRIPTS.get(kind, "pipeline.sbatch")
    settings = [*settings_of(plan.site, root=plan.root, directory=plan.directory), *notes, *arguments]
    return fill(shipped, about="Written by headrace submit.", options=options, settings=settings)


def fill(shipped: Path, *, about: str, options: Mapping[str, str | None], settings: Sequence[str]) -> str:
    """The text of a script in `slurm/`, with other options.

    The text stays the shipped one, with its comments. The header gets the new options, followed by the submission's
    settings (environment, arguments). The file is then complete, and can be submitted again by hand.

    Args:
        shipped: the script.
        about: one line about the origin of the new script.
        options: option of sbatch, with its dashes -> value; None for an option without a value.
        settings: lines of bash that run before the script's own.
    """
    lines = shipped.read_text(encoding="utf-8").splitlines()
    body = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    left = dict(options)
    header = [_replaced(line, left) for line in lines[1:body] if not _HINT.match(line)]
    header += [_line(name, value) for name, value in left.items()]
    kept = [line for line in header if line]
    return "\n".join([lines[0], f"# {about}", "#", *kept, "", *settings, "", *lines[body:], ""])


def option_of(text: str) -> tuple[str, str | None]:
    """Name and value of an option such as `--constraint=h100` or `--exclusive`."""
    name, equals, value = text.replace(" ", "=", 1).partition("=")
    return name, value if equals else None


def quoted(words: Sequence[str]) -> str:
    """Words as a command line, quoted for bash."""
    return shlex.join(words)


def _replaced(line: str, left: dict[str, str | None]) -> str:
    """A header line with the new value of its option, which is removed from `left`."""
    found = _OPTION.match(line)
    return _line(found[1], left.pop(found[1])) if found and found[1] in left else line


def _line(name: str, value: str | None) -> str:
    return f"#SBATCH {name}" if value is None else f"#SBATCH {name}={value}"
