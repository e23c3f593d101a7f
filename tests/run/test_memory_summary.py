"""`headrace check` says what a rank needs, whether it fits, and what would."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import peak_memory
from pipeline.run.before.memory_summary import memory_bytes, memory_entries
from tests import warm
from tests.conftest import tiny_config, write_config
from tests.plan.fake_gpu.cells import shipped_cases
from tests.plan.fake_gpu.document import built
from tests.support import output_of


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


def test_the_largest_micro_batch_fits_every_rank_of_the_pipeline() -> None:
    case = shipped_cases()["llama_70b_fsdp_3d.json pp 0"]
    schedule = ("parallel.schedule=1f1b", "parallel.virtual_stages=null", "loss.chunk=65536")
    overrides = (*schedule, "model.config.num_hidden_layers=8", "memory.activation_checkpointing=full")
    run, model = built(replace(case, overrides=overrides))
    peak, fit = memory_entries(run, model, memory=memory_bytes("12GB"))
    # of 1 sample the first rank needs most, with the micro-batches it keeps; of 8 the last one, with their logits
    assert peak.values["pp_rank"] == 0
    assert fit.values["largest_micro_batch"] == 4
    footprint = footprint_of(run, model)
    peaks = [peak_memory(run, footprint, pp_rank=rank, micro=8).total for rank in (0, 3)]
    assert peaks[0] < 12e9 < peaks[1]


@pytest.mark.integration
def test_check_prints_memory_by_kind_and_whether_it_fits(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    options = ("check", "--config", config, "--memory", "1GB", "--json")
    summary = json.loads(output_of(warm.run("-m", "pipeline", *options)))
    assert summary["memory"]["peak"] >= summary["memory"]["weights"] > 0
    assert summary["memory_fit"]["fits"] is True
    refused = warm.run("-m", "pipeline", "check", "--config", config, "--memory", "80", merged=True)
    assert refused.returncode == 2
    assert "80GB" in refused.stdout
