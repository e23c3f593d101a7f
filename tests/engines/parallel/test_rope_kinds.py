"""Every kind of rotary positions gives transformers' own loss, at, below and above its original length, in layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from foundation.directory import Manifest
from pipeline.checkpoint.export.trained_model import trained_config
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.assemble import assemble
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.buffers import fill_buffers
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.hf_config import read_hf_config, resolve_hf_config
from pipeline.run.prepare import described
from tests.engines.parallel.layouts import resolved, sequence_shard
from tests.engines.parallel.ranks import Ranks
from tests.models.architectures import V, batch_of, config_of, meta_of, split_documents, with_weights

ORIGINAL = 16
LENGTHS = (8, ORIGINAL, 32)
_SCALED = {"rope_theta": 10000.0, "factor": 2.0}
_LONGER = {**_SCALED, "original_max_position_embeddings": ORIGINAL}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0},
    "linear": _SCALED,
    "dynamic": _SCALED,  # its original length is max_position_embeddings
    "yarn": _LONGER,
    "longrope": {**_LONGER, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]},
    "llama3": {**_LONGER, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
CASES = [(kind, length) for kind in KINDS for length in LENGTHS]
LOSS = CrossEntropy(z_loss=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, all with the same weights."""
    work = tmp_path_factory.mktemp("rope")
    with_weights(meta_of("llama", attention="sdpa")).save_pretrained(work / "weights")  # type: ignore[operator]
    for kind, rope in KINDS.items():
        shutil.copytree(work / "weights", work / kind)
        positions = ORIGINAL if kind == "dynamic" else 2 * ORIGINAL
        fields = {"rope_parameters": {"rope_type": kind, **rope}, "max_position_embeddings": positions}
        config_of("llama", **fields).save_pretrained(work / kind)
    return {kind: work / kind for kind in KINDS}


@torch.no_grad()
def transformers_loss(folder: Path, length: int) -> float:
    model, micro = AutoModelForCausalLM.from_pretrained(folder), batch_of(length=length)
    logits = model(input_ids=micro.input_ids).logits
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="sum"))


def opened(folder: Path, length: int, *, world: int, **parallel: Any) -> tuple[Any, nn.Module]:
    data = {"sources": [{"path": "nowhere"}], "sequence_length": length}
    run = resolved(world_size=world, model={"path": str(folder)}, data=data, parallel=parallel)
    config = resolve_hf_config(run.config.model, tokenizer={"vocab_size": V}, sequence_length=length)
    return run, build_meta(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)


def decoder_of(folder: Path, run: Any, model: nn.Module, mesh: Mesh | None = None, **stage: Any) -> Decoder:
    decoder, values = assemble(run, model, mesh, **stage).decoder, FromSafetensors(folder, model=model)
    fill_buffers(decoder.causal, torch.device("cpu"), values)
    for name in decoder.parameters_by_name():
        decoder.set_parameter(name, nn.Parameter(values.value(name)))
    return decoder


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("kind", "length"), CASES)
@torch.no_grad()
def test_the_loss_of_a_continued_folder_is_transformers_own(
    folders: dict[str, Path], kind: str, length: int, stages: int
) -> None:
    run, model = opened(folders[kind], length, world=stages, pp=stages)
    micro, passed = batch_of(length=length), batch_of(length=length).input_ids
    for stage in pipeline_stages(run, model) if stages > 1 else (None,):
        passed = decoder_of(folders[kind], run, model, stage=stage)(passed, micro, LOSS)[0]
    assert float(passed) == pytest.approx(transformers_loss(folders[kind], length), rel=1e-6)


@torch.no_grad()
def losses_in_parallel(_rank: int, folders: dict[str, Path], method: str) -> dict[tuple[str, int], float]:
    """Loss of every case with two context-parallel ranks."""
    found: dict[tuple[str, int], float] = {}
    mesh: Mesh | None = None
    for kind, length in CASES:
        run, model = opened(folders[kind], length, world=dist.get_world_size(), cp=2, cp_method=method)
        mesh = mesh or Mesh(run.topology, device_type="cpu")
        micro = sequence_shard(batch_of(length=length), run, rank=mesh.coordinates["cp"], length=length)
        total = decoder_of(folders[kind], run, model, mesh)(micro.input_ids, micro, LOSS)[0].clone()
        dist.all_reduce(total, group=mesh.group("cp"))
        found[kind, length] = float(total)
    return found


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_two_context_parallel_ranks_have_transformers_own_loss(
    ranks: Ranks, folders: dict[str, Path], method: str
) -> None:
    expected = {(kind, length): transformers_loss(folders[kind], length) for kind, length in CASES}
    # below their original lengths, dynamic rope is the default
    assert [len({expected[kind, length] for kind in KINDS}) for length in LENGTHS] == [6, 6, 7]
    for found in ranks.run(losses_in_parallel, folders, method):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_reloads_with_the_same_loss(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    shutil.copytree(folders[kind], tmp_path / "out")
    plain = json.loads(json.dumps(described(read_hf_config(folders[kind]))))
    trained_config(Manifest("checkpoint", {}, {}, {"hf_config": plain}, {}, "", {})).save_pretrained(tmp_path / "out")
    for length in LENGTHS:
        assert transformers_loss(tmp_path / "out", length) == transformers_loss(folders[kind], length)


@torch.no_grad()
def test_dynamic_rope_gives_every_document_the_frequencies_of_its_own_length(folders: dict[str, Path]) -> None:
    packed = batch_of(length=40, borders=((20,), (0,)))  # documents of 20, 20 and 40 tokens
    decoder = decoder_of(folders["dynamic"], *opened(folders["dynamic"], 40, world=1))
    separate = [MicroBatch(each.input_ids, each.labels, torch.arange(each.labels.shape[1])[None])
                for each in split_documents(packed)]  # fmt: skip
    whole, *own = (float(decoder(each.input_ids, each, LOSS)[0]) for each in (packed, *separate))
    assert len(own) == 3
    assert whole == pytest.approx(sum(own), rel=1e-6)
