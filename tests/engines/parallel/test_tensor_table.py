"""A table that overrides derived shards, and results of trials that are kept on disk."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import ConfigError
from pipeline.config.sections.compression import DistillSection
from pipeline.config.sections.run import Fp8Section
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.optim.qk_clip import QkClip
from pipeline.engines.parallel import architecture_trial, tensor_plan, trial_cache
from pipeline.engines.parallel.architecture_trial import RandomValues
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from pipeline.engines.parallel.fp8 import fp8_layers
from pipeline.engines.parallel.simulated_ranks import run_ranks
from pipeline.engines.parallel.tensor import apply_tensor_parallel
from pipeline.engines.parallel.tensor_plan import derived_blocks
from pipeline.models.construction.buffers import fill_buffers
from pipeline.models.construction.counter import CPU
from pipeline.run.distillation.feature_checks import check_feature_models
from tests.engines.parallel.layouts import check_family, resolved
from tests.models.architectures import batch_of, family_meta


def check(kind: str, table: dict[str, str] | None = None, **sections: Any) -> None:
    """Checks a tiny model in two tensor-parallel ranks."""
    check_family(kind, parallel={"tp": 2, "tp_plan": table or {}}, **sections)


def test_a_table_overrides_what_is_derived() -> None:
    check("gpt2", {"h.*.attn": "whole"})  # proven
    table = {"transformer.h.*.attn": "whole", "h.*.mlp.c_fc": "colwise"}
    found = derived_blocks(family_meta("gpt2"), tp=2, table=table)
    assert not found["transformer.h.0.attn"].styles
    assert found["transformer.h.0.mlp"] == derived_blocks(family_meta("gpt2"), tp=2)["transformer.h.0.mlp"]


@pytest.mark.parametrize(
    ("kind", "table", "why"),
    [
        ("gpt2", {"h.*.attn.c_attn": "colwise"}, r"transformer\.h\.\*\.attn\.c_attn.*do not add up to those of"),
        ("gpt_oss", {"layers.*.self_attn.sinks": "whole", "layers.*.self_attn.q_proj": "colwise"}, r"self_attn\.sinks"),
        ("gpt2", {"h.*.attn.c_att": "qkv"}, r"h\.\*\.attn\.c_att'.*a name like transformer\.h\.\*\.attn\.c_attn"),
    ],
)
def test_a_table_that_does_not_prove_itself_is_refused_with_the_tensor(
    kind: str, table: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)parallel\.tp_plan.*{why}"):
        check(kind, table)


def test_a_trial_runs_once_per_config_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_cache, "trials_folder", lambda: tmp_path)
    tensor_plan._kinds.cache_clear()
    check("gpt2")
    derived = derived_blocks(family_meta("gpt2"), tp=2)
    tensor_plan._kinds.cache_clear()
    assert derived_blocks(family_meta("gpt2"), tp=2) == derived
    written = sorted(each.name for each in tmp_path.iterdir())
    assert any(name.startswith("trial-") for name in written)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it runs again")

    monkeypatch.setattr(architecture_trial, "rank_gradients", fails)
    check("gpt2")
    assert sorted(each.name for each in tmp_path.iterdir()) == written
    with pytest.raises(ConfigError, match="it runs again"):  # a failure is not kept, another table is another trial
        check("gpt2", {"h.*.attn": "whole"})
    monkeypatch.setattr(trial_cache, "code_version", lambda: "another version")
    with pytest.raises(ConfigError, match="it runs again"):
        check("gpt2")


def test_ranks_that_write_at_once_and_broken_files_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_cache, "trials_folder", lambda: tmp_path / "trials")
    with ThreadPoolExecutor(8) as ranks:
        results = list(
            ranks.map(lambda n: trial_cache.remembered("test", ["key"], lambda: ["x" * 10_000, n]), range(32))
        )
    assert {len(each[0]) for each in results} == {10_000}
    (path,) = (tmp_path / "trials").iterdir()  # no partial file is left
    assert json.loads(path.read_text())["result"] in results
    path.write_text("{")
    assert trial_cache.remembered("test", ["key"], lambda: 2) == 2
    assert trial_cache.remembered("test", ["key"], lambda: 3) == 2
    monkeypatch.setattr(trial_cache, "trials_folder", lambda: path / "below a file")
    assert trial_cache.remembered("test", ["key"], lambda: 4) == 4


MUON = {"type": "Muon", "params": {"lr": 0.02, "qk_clip": 100.0}}


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3"])
def test_ranks_of_a_derived_plan_measure_the_logits_of_their_own_heads(kind: str) -> None:
    check(kind, optimizer=MUON)
    batch, meta = batch_of(length=16), family_meta(kind)
    values = RandomValues(meta)

    def largest(group: Any = None) -> list[torch.Tensor]:
        model = family_meta(kind)
        owners, names = parameter_owners(model), {id(p): name for name, p in model.named_parameters()}
        tensor = None if group is None else apply_tensor_parallel(model, group, names=names)
        decoder = Decoder(model, DecoderLayout(tensor=tensor), owners)
        fill_buffers(model, CPU)
        for name in owners:
            box = None if tensor is None else tensor.boxes.get(name)
            decoder.set_parameter(name, torch.nn.Parameter(values.value(name, box=box)))
        clip = QkClip(meta, 1.0, device=CPU, tp=(1, 0) if group is None else (2, group.rank()))
        clip.attach(model)
        clip.begin_step()
        decoder(batch.input_ids, batch, CrossEntropy())
        return [each for _, each in clip._own]

    for all_heads, *parts in zip(largest(), *run_ranks(2, largest), strict=True):
        assert torch.allclose(torch.cat(parts), all_heads, rtol=1e-4)


def test_features_that_need_a_ranks_own_heads_are_refused_with_the_module() -> None:
    for kind, table, why in (("gpt_bigcode", {}, "has one key"), ("gpt2", {"h.*.attn": "whole"}, "runs whole")):
        with pytest.raises(ConfigError, match=rf"(?s)qk_clip.*transformer\.h\.0\.attn {why}.*parallel\.tp 1"):
            check(kind, table, optimizer=MUON)
    section = DistillSection.model_validate({"teacher": "folder", "attentions": {}})
    models = {"student": family_meta("gpt2"), "teacher": family_meta("gpt2"), "last_stage": (0, 4), "compiled": False}
    tp = resolved(world_size=2, parallel={"tp": 2}).topology
    check_feature_models(section, tp, **models)
    why = r"(?s)distill\.attentions.*transformer\.h\.0\.attn of the teacher has one key/value head.*parallel\.tp 1"
    with pytest.raises(ConfigError, match=why):
        check_feature_models(section, tp, **(models | {"teacher": family_meta("gpt_bigcode")}))


def test_a_fused_projection_of_which_a_rank_has_a_part_stays_in_bf16() -> None:
    layers = fp8_layers(Fp8Section(enabled=True), family_meta("phi3"), tp=2)
    assert "model.layers.0.self_attn.qkv_proj" in layers.excluded
    assert "model.layers.0.self_attn.o_proj" in layers.converted
