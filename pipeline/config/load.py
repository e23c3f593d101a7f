"""Loads a run's config: a JSON file and `--set` overrides, validated as a `Config`. Takes milliseconds, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.base import configfile
from headrace.base.section import parse
from pipeline.config.deepspeed_keys import refuse_by_name, without_auto
from pipeline.config.renamed_keys import refuse_renamed
from pipeline.config.schema import Config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads, merges and validates a run's config.

    Args:
        path: a JSON file, DeepSpeed's keys and Headrace's sections side by side.
        overrides: `--set` texts, applied last.

    Raises:
        ConfigError: the file cannot be read, or it holds a key or value that cannot run, or a key under its old name.
    """
    raw = configfile.load(path, overrides)
    refuse_renamed(raw)
    raw = without_auto(raw)
    refuse_by_name(raw)
    return parse(Config, raw)
