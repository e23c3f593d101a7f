"""`heldout_fraction: 0`: all documents are trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.directory import read_manifest
from headrace.base.errors import ConfigError
from pipeline.config.sections.data import DataSection
from pipeline.data.mixture import open_heldout, open_mixture
from tests.data_prep.conftest import write_config
from tests.data_prep.in_process import run_job


def test_a_job_without_a_heldout_split(work: Path, texts: Path) -> None:
    """It has one split, and training on it needs held-out data of its own."""
    run_job(write_config(heldout_fraction=0, dedup={"exact": True}))
    manifest = read_manifest(work / "tokens", kind="tokens")
    assert list(manifest.details["splits"]) == ["train"]
    assert manifest.details["splits"]["train"]["documents"] == len(list(texts.rglob("*.md")))
    assert not (work / "tokens" / "heldout").exists()

    section = DataSection(sources=[{"path": "tokens"}], sequence_length=16)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="heldout_fraction 0"):
        open_heldout(section, open_mixture(section, seed=1))
    run_job(
        write_config(name="second.json", output="second", heldout_fraction=0.5, tokenizer={"path": "tokens/tokenizer"})
    )
    sources = [{"path": "tokens", "heldout": "second"}]
    section = DataSection(sources=sources, sequence_length=16)  # type: ignore[arg-type]
    assert open_heldout(section, open_mixture(section, seed=1))[0].windows
