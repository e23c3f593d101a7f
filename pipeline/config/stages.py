"""From a config with `stages` to the config of each stage: the keys that a stage names, on top of the stage before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from foundation.errors import ConfigError, problems_in, refuse_all
from foundation.section import parse
from pipeline.config.sections.run import Config
from pipeline.config.sections.stages import BatchRampSection, StageSection

_REPLACED = frozenset({"scheduler", "train_batch_size"})
"""Keys that a stage replaces as a whole: parameters of one schedule or ramp do not fit another."""


@dataclass(frozen=True)
class StageConfig:
    """One stage of a run.

    Attributes:
        number: position of the stage, from 0.
        config: config during the stage, without `stages`; `train_batch_size` is the largest of a ramp.
        ramp: the stage's batch ramp; None for a fixed batch.
        section: the stage as it was written; None for the only stage of a config without `stages`.
        model: keys by which the model's config differs from that of `model.path`; empty with `model.config`.
    """

    number: int
    config: Config
    ramp: BatchRampSection | None = None
    section: StageSection | None = None
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the stage; empty for the only stage of a config without `stages`."""
        return "" if self.section is None else self.section.name

    @property
    def changes(self) -> Mapping[str, Any]:
        """Keys that the stage names, with their values."""
        return {} if self.section is None else self.section.changes

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Makes errors of the block name the stage's key, or else the stage.

        Raises:
            ConfigError: an error of the block.
        """
        problems: tuple[ConfigError, ...] = ()
        try:
            yield
        except ConfigError as error:
            problems = problems_in(error)
        refuse_all([self._named(each) for each in problems])

    def _named(self, error: ConfigError) -> ConfigError:
        if self.section is None or error.field.startswith("stages."):
            return error
        if error.field.split(".")[0] in self.changes:
            field = f"stages.{self.number}.{error.field}"
            return ConfigError(field, error.value, why=error.why, remedy=error.remedy)
        return ConfigError(error.field, error.value, why=f"in stage '{self.name}': {error.why}", remedy=error.remedy)


def is_staged(config: Config) -> bool:
    """Tells whether a config has stages, or a batch ramp, which makes it a run of one stage."""
    return config.stages is not None or isinstance(config.train_batch_size, BatchRampSection)


def stage_configs(config: Config) -> list[StageConfig]:
    """Returns the stages of a config in order: one for a config without `stages`.

    Raises:
        ConfigError: a stage has an unknown key or a value that its key cannot take.
    """
    raw = config.model_dump(mode="json", exclude_unset=True)
    sections = raw.pop("stages", None) and config.stages
    if sections is None:
        return [_stage(0, raw, None)]
    stages: list[StageConfig] = []
    model: dict[str, Any] = {}
    for number, section in enumerate(sections):
        changes = section.changes
        if config.model.path is not None and "config" in (changes.get("model") or {}):
            rest = {key: value for key, value in changes["model"].items() if key != "config"}
            model, changes = _merged(model, changes["model"]["config"]), {**changes, "model": rest}
        if stages and (ended := stages[-1].ramp) is not None:
            raw["train_batch_size"] = ended.to
        raw = _merged(raw, changes)
        stages.append(replace(_stage(number, raw, section), model=model))
    return stages


def _stage(number: int, raw: Mapping[str, Any], section: StageSection | None) -> StageConfig:
    size, ramp = raw.get("train_batch_size"), None
    if isinstance(size, Mapping):
        ramp = parse(BatchRampSection, size, at="train_batch_size")
        raw = {**raw, "train_batch_size": ramp.to}
    problems: tuple[ConfigError, ...] = ()
    try:
        return StageConfig(number, parse(Config, raw), ramp, section)
    except ConfigError as error:
        problems = problems_in(error)
    changed = {} if section is None else section.changes
    at = f"stages.{number}."
    refuse_all([_at(each, at if each.field.split(".")[0] in changed else "") for each in problems])
    raise AssertionError("a config was refused without a problem")


def _at(error: ConfigError, at: str) -> ConfigError:
    return ConfigError(f"{at}{error.field}", error.value, why=error.why, remedy=error.remedy)


def _merged(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `raw` with the changed keys; sections are merged key by key, lists and schedules are replaced."""
    merged = dict(raw)
    for key, value in changes.items():
        before = merged.get(key)
        nested = isinstance(value, Mapping) and isinstance(before, Mapping) and key not in _REPLACED
        merged[key] = _merged(before, value) if nested else value  # type: ignore[arg-type]
    return merged
