"""Verification finds damage in a checkpoint, and names the file or the tensor."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from foundation.directory import commit
from pipeline.checkpoint import named_state
from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.checkpoint.export.verify import verify_checkpoint
from pipeline.checkpoint.format.metadata import METADATA, encode_metadata, read_metadata
from pipeline.checkpoint.format.shard_table import CheckpointMetadata
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.sections.optimizers import ADAMW
from pipeline.models.construction.meta import build_meta, parameter_shapes
from tests import warm
from tests.parity.matrix import model_of
from tests.support import flip_a_byte

HF = model_of({"tied": True})
NORM = "weight/model.norm.weight"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of a tiny llama, written by one process."""
    final = tmp_path_factory.mktemp("run") / "checkpoints/step-00000003"
    staging = final.with_name("staging")
    staging.mkdir(parents=True)
    config = AutoConfig.for_model(**HF)
    state: dict[str, NamedShard | torch.Tensor] = {named_state.OPTIMIZER_STEP: torch.tensor(3.0)}
    shapes = parameter_shapes(build_meta(config, dtype=torch.float32, attn_implementation="sdpa"))
    for name, shape in shapes.items():
        for kind in ("weight", *ADAMW.states):
            state[f"{kind}/{name}"] = NamedShard(tuple(shape), start=0, values=torch.randn(shape.numel()))
    named_state.write(state, staging)
    details = {"step": 3, "samples": 24, "engine": "torch", "topology": "1 process", "hf_config": HF}
    commit(staging, final, kind="checkpoint", config={"model": {"attn_implementation": "sdpa"}}, details=details)
    return Checkpoint(final, 3)


def copy_of(checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    final = tmp_path / "run/checkpoints/step-00000003"
    shutil.copytree(checkpoint.path, final)
    return Checkpoint(final, 3)


def with_metadata(
    checkpoint: Checkpoint, change: Callable[[CheckpointMetadata], CheckpointMetadata], tmp_path: Path
) -> Checkpoint:
    """A copy with changed metadata, and checksums that match."""
    copy = copy_of(checkpoint, tmp_path)
    (copy.path / METADATA).write_bytes(encode_metadata(change(read_metadata(copy.path))))
    commit_again(copy, config=copy.manifest.config, details=copy.manifest.details)
    return copy


def commit_again(checkpoint: Checkpoint, *, config: dict[str, Any], details: dict[str, Any]) -> None:
    staging = checkpoint.path.rename(checkpoint.path.with_name("staging"))
    commit(staging, checkpoint.path, kind="checkpoint", config=config, details=details)


def test_an_intact_checkpoint_is_read_to_the_last_byte_and_has_no_problem(intact: Checkpoint) -> None:
    read: list[int] = []
    assert verify_checkpoint(intact, progress=read.append) == []
    assert sum(read) == sum(entry["bytes"] for entry in intact.manifest.files.values())


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a flipped bit": ("__0_0.distcp", flip_a_byte, "checksum"),
    "a flipped bit of the metadata": (METADATA, flip_a_byte, "checksum"),
    "a file cut short": ("__0_0.distcp", lambda p: p.write_bytes(p.read_bytes()[:-1]), "and was written with"),
    "a lost file": ("__0_0.distcp", Path.unlink, "No such file"),
    "a lost manifest": ("manifest.json", Path.unlink, "has no manifest.json"),
    "half a manifest": ("manifest.json", lambda p: p.write_text(p.read_text()[:99]), "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(intact: Checkpoint, tmp_path: Path, damage: str) -> None:
    name, change, message = DAMAGES[damage]
    copy = copy_of(intact, tmp_path)
    change(copy.path / name)
    (problem,) = verify_checkpoint(copy)
    assert problem.place == name
    assert message in problem.what


def test_tensors_that_do_not_match_the_model_are_named_despite_checksums(intact: Checkpoint, tmp_path: Path) -> None:
    def damage(metadata: CheckpointMetadata) -> CheckpointMetadata:
        table, index = metadata.table, metadata.table.index
        norm, gone = index[NORM], index["exp_avg/model.norm.weight"]
        tensors = list(table.tensors)
        tensors[gone] = tensors[norm]._replace(key="weight/stray")
        grown = index["exp_avg_sq/model.norm.weight"]
        tensors[grown] = tensors[grown]._replace(shape=(33,))
        file, position = metadata.file.copy(), metadata.position.copy()
        file[table.rows(gone).start] = -1
        position[1] = position[0]
        changed = dataclasses.replace(table, tensors=tuple(tensors))
        return dataclasses.replace(metadata, table=changed, file=file, position=position)

    found = verify_checkpoint(with_metadata(intact, damage, tmp_path))
    problems = {(problem.place, problem.what) for problem in found}
    assert ("exp_avg_sq/model.norm.weight", "1 of 33 elements are in no shard") in problems
    assert ("exp_avg_sq/model.norm.weight", "has shape (33,); the model has it as (32,)") in problems
    assert ("exp_avg/model.norm.weight", "is missing; the model has it as (32,)") in problems
    assert ("weight/stray", "belongs to no parameter or persistent buffer of the model") in problems
    assert ("weight/stray", "the metadata does not say where its shard at (0,) lies") in problems
    assert any("shares bytes of __0_0.distcp with" in problem.what for problem in found)


def test_a_shard_past_the_end_of_its_file_is_named(intact: Checkpoint, tmp_path: Path) -> None:
    def damage(metadata: CheckpointMetadata) -> CheckpointMetadata:
        length = metadata.length.copy()
        length[metadata.position.argmax()] += 1
        return dataclasses.replace(metadata, length=length)

    (problem,) = verify_checkpoint(with_metadata(intact, damage, tmp_path))
    assert problem.what == "it lies past the end of __0_0.distcp"


def test_a_checkpoint_of_a_custom_training_loop_is_verified_without_a_model(intact: Checkpoint, tmp_path: Path) -> None:
    copy = copy_of(intact, tmp_path)
    commit_again(copy, config={}, details={})
    assert verify_checkpoint(copy) == []


def checkpoint(*arguments: object) -> tuple[int, str, str]:
    done = warm.run("-m", "pipeline", "checkpoint", *arguments)
    return done.returncode, done.stdout, done.stderr


def test_the_commands_show_damaged_checkpoints_and_which_one_a_resume_takes(intact: Checkpoint, tmp_path: Path) -> None:
    older = copy_of(intact, tmp_path)
    run = older.path.parent.parent
    newer = shutil.copytree(older.path, older.path.with_name("step-00000007"))
    flip_a_byte(newer / "__0_0.distcp")
    code, output, _ = checkpoint("verify", run)
    assert (code, "__0_0.distcp: does not have the checksum" in output, "--all" in output) == (1, True, True)
    code, output, _ = checkpoint("verify", run, "--all")
    assert (code, "step-00000003: intact" in output, "takes the newest that is intact" in output) == (1, True, True)
    assert checkpoint("verify", older.path)[0] == 0
    (newer / "__0_0.distcp").write_bytes(b"")
    rows = json.loads(checkpoint("ls", run, "--json")[1])
    assert [(row["step"], row["resumed"], row["damage"] is None) for row in rows] == [
        (7, False, False),
        (3, True, True),
    ]
    table = checkpoint("ls", run)[1]
    assert "a resume takes this one" in table
    assert "damaged: __0_0.distcp" in table


def test_ls_lists_the_tensors_of_a_checkpoint(intact: Checkpoint) -> None:
    rows = {row["name"]: row for row in json.loads(checkpoint("ls", intact.path, "--json")[1])}
    shown = {"name": NORM, "shape": [32], "dtype": "float32", "bytes": 128, "pieces": 1}
    assert rows[NORM] == shown
    assert "lm_head.weight" not in " ".join(rows)  # tied: it appears once
    assert NORM in checkpoint("ls", intact.path)[1]


def test_a_path_without_a_checkpoint_is_refused_with_exit_code_2(tmp_path: Path) -> None:
    for verb in ("ls", "verify"):
        for path in (tmp_path, tmp_path / "nowhere", tmp_path / "step-00000001", tmp_path / "checkpoints/latest"):
            code, _, stderr = checkpoint(verb, path)
            assert (code, "try: a run.dir that has trained" in stderr) == (2, True)
