"""Checks the report's command line before any work is done. No torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.evaluation.comparison import candidates
from pipeline.evaluation.comparison.candidates import ModelCandidate, ModelComparison
from pipeline.evaluation.comparison.command import check_writable, consumers_of, named_paths, wanted_of
from pipeline.evaluation.heldout.command import window_fields
from pipeline.evaluation.heldout.data import HeldOutData
from pipeline.evaluation.report.runs import RunRecord, read_run
from pipeline.models.folder.model_folder import ModelFolder


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a report.

    Attributes:
        out: the page to write; its directory exists.
        runs: runs that were read, finished or still training, with distinct names.
        comparison: the models, and the held-out data for their evaluation; None without models.
    """

    out: Path
    runs: tuple[RunRecord, ...]
    comparison: ModelComparison | None

    @property
    def candidates(self) -> tuple[ModelCandidate, ...]:
        """The models, once for each consumer."""
        return () if self.comparison is None else self.comparison.candidates

    @property
    def names(self) -> list[str]:
        """The names of the models or, without models, of the runs."""
        return list(dict.fromkeys(each.name for each in self.candidates)) or [run.name for run in self.runs]

    @property
    def folders(self) -> list[ModelFolder]:
        """The folders of the models; GGUF files have none."""
        return [each.folder for each in self.candidates if each.folder is not None]

    @property
    def prompts(self) -> tuple[str, ...]:
        """Texts that every model continues."""
        return () if self.comparison is None else self.comparison.wanted.prompts


def check(args: argparse.Namespace) -> Inputs:
    """Opens and checks every input.

    Raises:
        ConfigError: OUT cannot be written, a name is missing or given twice, or a number or a prompt is unusable.
        DataError: a run, a model or the tokens directory is missing, damaged or of the wrong kind.
    """
    out = check_writable(Path(args.out), name="OUT.html")
    data = _check_data(args)
    wanted = wanted_of(args, prompts=args.prompt or ())
    runs = tuple(read_run(name, path) for name, path in named_paths("--run", args.run).items())
    models = named_paths("--model", args.model)
    if data is None:
        return Inputs(out, runs, None)
    comparison = candidates.check(models, data=data, consumers=consumers_of(args), wanted=wanted)
    return Inputs(out, runs, comparison)


def _check_data(args: argparse.Namespace) -> HeldOutData | None:
    """The held-out split; None for a report with runs only."""
    if not args.run and not args.model:
        why = "there is nothing to report"
        raise ConfigError("--run", why=why, remedy="give --run NAME=RUN_DIR, or --model NAME=FOLDER with --data TOKENS")
    if args.model and args.data is None:
        why = "models are evaluated on the held-out split of a tokens directory"
        raise ConfigError("--data", why=why, remedy="give --data TOKENS, or leave --model out for the runs alone")
    needless = {"--data": args.data, "--max-tokens": args.max_tokens, "--prompt": args.prompt}
    if not args.model:
        for flag, value in needless.items():
            if value is not None:
                raise ConfigError(flag, value, why="it is for models, and there is no --model", remedy="leave it out")
        return None
    numbers = {**window_fields(args), "max_tokens": args.max_tokens}
    return parse(HeldOutData, {"path": args.data, **numbers}, at="data")
