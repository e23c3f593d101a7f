"""Rules of the data mixture that hold for any data: mixing weights, budgets, and stages of the curriculum."""

from __future__ import annotations

from foundation.errors import ConfigError
from foundation.section import suggest
from pipeline.config.sections.data import CurriculumStageSection, DataSection

_SHARES = ("weight", "epochs", "tokens")


def check_data(data: DataSection) -> None:
    """Refuses sources with two kinds of shares, and incomplete or misordered stages of the curriculum.

    Raises:
        ConfigError: a source or stage is invalid; the error names it.
    """
    for number, source in enumerate(data.sources):
        given = [key for key in _SHARES if getattr(source, key) is not None]
        field = f"data.sources.{number}"
        if len(given) > 1:
            why = f"{' and '.join(given)} each set how much is drawn from this source"
            raise ConfigError(f"{field}.{given[1]}", getattr(source, given[1]), why=why, remedy=f"keep {given[0]}")
        if given and data.curriculum:
            why = "data.curriculum sets how much is drawn from this source"
            raise ConfigError(f"{field}.{given[0]}", getattr(source, given[0]), why=why, remedy="leave it out")
    if data.curriculum:
        _check_names(data)
        for number, stage in enumerate(data.curriculum):
            before = data.curriculum[number - 1] if number else None
            _check_stage(stage, before, field=f"data.curriculum.{number}", names=data.names)


def _check_names(data: DataSection) -> None:
    for number, name in enumerate(data.names):
        if name in data.names[:number]:
            why = f"source {data.names.index(name)} has the same name, so data.curriculum is ambiguous"
            raise ConfigError(f"data.sources.{number}.name", name, why=why, remedy="give each source a name of its own")


def _check_stage(
    stage: CurriculumStageSection, before: CurriculumStageSection | None, *, field: str, names: list[str]
) -> None:
    at = stage.after_step
    if before is None and at:
        raise ConfigError(f"{field}.after_step", at, why="the first stage begins the run", remedy="use 0")
    if before is not None and at <= before.after_step:
        why = f"the stage before it begins after step {before.after_step}"
        raise ConfigError(f"{field}.after_step", at, why=why, remedy=f"use {before.after_step + 1} or more")
    for name in stage.weights:
        if name not in names:
            near = suggest(name, names)
            remedy = f"did you mean '{near}'?" if near else f"the sources are: {', '.join(names)}"
            raise ConfigError(f"{field}.weights.{name}", why="there is no such source", remedy=remedy)
    for name in names:
        if name not in stage.weights:
            why = "the stage has no weight for this source"
            raise ConfigError(f"{field}.weights.{name}", why=why, remedy="add one; 0 draws nothing from the source")
    if not any(stage.weights.values()):
        raise ConfigError(f"{field}.weights", stage.weights, why="all weights are 0", remedy="use a weight above 0")
