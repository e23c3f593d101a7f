"""`headrace check` says what a rank needs, whether it fits, and what would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from pipeline.run.memory_summary import memory_bytes, memory_entries
from tests import warm
from tests.conftest import tiny_config, write_config
from tests.fake_gpu.cells import shipped_cases
from tests.fake_gpu.document import built


def test_a_size_has_a_unit_and_is_refused_without() -> None:
    assert memory_bytes("80GB") == 80 * 10**9
    assert memory_bytes("1.5 GiB") == 3 * 2**29
    for wrong in ("80", "0GB", "GB", "-1GB", "80 GPU"):
        with pytest.raises(ConfigError, match="80GB"):
            memory_bytes(wrong)


def test_8b_fits_one_h200_and_eight() -> None:
    fits = {}
    for name in ("llama_8b_h200.json", "llama_8b_8gpu.json"):
        run, model = built(shipped_cases()[name])
        fits[name] = list(memory_entries(run, model, memory=memory_bytes("141GB")))[1].values
    assert fits["llama_8b_h200.json"] == {"memory": 141 * 10**9, "fits": True, "largest_micro_batch": 4}
    assert fits["llama_8b_8gpu.json"]["fits"]
    assert fits["llama_8b_8gpu.json"]["largest_micro_batch"] == 4


@pytest.mark.integration
def test_check_prints_memory_by_kind_and_whether_it_fits(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    options = ("check", "--config", config, "--memory", "1GB", "--json")
    done = warm.run("-m", "pipeline", *options)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["memory"]["peak"] >= summary["memory"]["weights"] > 0
    assert summary["memory_fit"]["fits"] is True
    refused = warm.run("-m", "pipeline", "check", "--config", config, "--memory", "80", merged=True)
    assert refused.returncode == 2
    assert "80GB" in refused.stdout
