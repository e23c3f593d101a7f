"""The plan and the metadata as arrays: what torch's own planner makes of the same shards, in megabytes."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from benchmarks.checkpoint_plan import LLAMA_70B, zero3_states
from foundation.errors import CheckpointError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.format import metadata as metadata_module
from pipeline.checkpoint.format.metadata import (
    METADATA,
    decode_metadata,
    encode_metadata,
    from_torch_metadata,
    read_metadata,
)
from pipeline.checkpoint.format.shard_table import (
    CheckpointMetadata,
    State,
    decode_rows,
    decode_tensors,
    encode_table,
    table_of,
)
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.format.torch_reader import TorchReader, to_torch_metadata
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.checkpoint.write.division import Division, divide
from pipeline.checkpoint.write.locations import Locations, MetadataWriter
from pipeline.checkpoint.write.plan import Coordinator
from pipeline.models.construction.rectangle import Rectangle
from tests import warm
from tests.support import output_of, refusal_of

Box = tuple[str, tuple[int, ...], tuple[int, ...]]


def boxes(metadata: CheckpointMetadata) -> set[Box]:
    """Key, offsets and sizes of every shard."""
    return {
        (stored.key, each.offsets, each.sizes)
        for number, stored in enumerate(metadata.tensors)
        for each in metadata.table.rectangles(number)
    }


def located(division: Division) -> CheckpointMetadata:
    """Metadata with shards one after the other in the file of each rank, as they are written."""
    writer = MetadataWriter(division)
    found = {}
    for rank in range(division.ranks):
        length = division.table.row_bytes[division.written_by(rank)] + 1000
        found[rank] = Locations(f"__{rank}_0.distcp", np.stack([np.cumsum(length) - length, length], axis=1))
    writer.update(found)
    return writer.metadata()


def assert_equal(one: CheckpointMetadata, other: CheckpointMetadata) -> None:
    assert one.tensors == other.tensors
    assert one.files == other.files
    for name in ("file", "position", "length"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    for name in ("tensor_of_row", "offsets", "sizes"):
        assert np.array_equal(getattr(one.table, name), getattr(other.table, name))


@st.composite
def states(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The state of tp x dp ranks: each tensor in uneven boxes over tp, every box in uneven flat ranges over dp.

    Buffers are replicated, on some of the ranks.
    """
    tp, dp = draw(st.integers(1, 2)), draw(st.integers(2, 3))
    found: list[dict[str, Any]] = [{} for _ in range(tp * dp)]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        if draw(st.booleans()):
            for rank in draw(st.sets(st.integers(0, tp * dp - 1), min_size=1)):
                found[rank][f"buffer/{number}"] = torch.empty(shape, dtype=dtype)
            continue
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        cut = draw(st.integers(0, shape[dim])) if shape and tp == 2 else 0
        for tp_rank in range(tp):
            box = _box(shape, dim, 0 if tp_rank + 1 < tp else cut, cut if tp_rank + 1 < tp else None)
            numel = box.numel if shape or tp_rank == 0 else 0
            inner = draw(st.lists(st.integers(0, numel), min_size=dp - 1, max_size=dp - 1))
            for dp_rank, (start, end) in enumerate(pairwise([0, *sorted(inner), numel])):
                values = torch.empty(end - start, dtype=dtype)
                shard = NamedShard(shape, start=start, values=values, box=box)
                found[tp_rank * dp + dp_rank][f"weight/{number}"] = shard
    return found


def _box(shape: tuple[int, ...], dim: int, start: int, end: int | None) -> Rectangle:
    """All of a tensor but for one dim; all of it where `end` is None and `start` is 0."""
    if not shape:
        return Rectangle((), ())
    ends = shape[dim] if end is None else end
    offsets = tuple(start if each == dim else 0 for each in range(len(shape)))
    return Rectangle(offsets, tuple(ends - start if each == dim else size for each, size in enumerate(shape)))


def torch_plan(states: Sequence[State]) -> tuple[Any, set[Box]]:
    """Torch's metadata of the same shards, and the error that its check raises."""
    planner = DefaultSavePlanner()
    plans = []
    for rank, state in enumerate(states):
        planner.set_up_planner(dict(state), is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan(plans)
    written = [(i.index.fqn, tuple(i.index.offset), tuple(i.tensor_data.chunk.sizes)) for p in plans for i in p.items]
    assert len(written) == len(set(written))
    return metadata, set(written)


@given(states=states())
@settings(deadline=None)
def test_a_plan_of_any_shards_is_that_of_torch_after_a_round_trip(states: list[dict[str, Any]]) -> None:
    metadata, written = torch_plan(states)
    ours = located(divide([table_of(state) for state in states]))
    assert boxes(ours) == written
    back = decode_metadata(encode_metadata(ours))
    assert_equal(back, ours)
    converted = to_torch_metadata(back)
    entries = metadata.state_dict_metadata
    assert converted.state_dict_metadata.keys() == entries.keys()
    for key, entry in converted.state_dict_metadata.items():
        assert (entry.size, entry.properties.dtype) == (entries[key].size, entries[key].properties.dtype)
    assert boxes(from_torch_metadata(converted)) == written


@given(states=states(), data=st.data())
@settings(deadline=None)
def test_a_plan_without_a_shard_of_one_rank_is_refused(states: list[dict[str, Any]], data: st.DataObject) -> None:
    shards = [(n, k) for n, s in enumerate(states) for k, v in s.items() if isinstance(v, NamedShard) and v.parts]
    if not shards:
        return
    rank, key = data.draw(st.sampled_from(shards))
    shard = states[rank][key]
    states[rank][key] = NamedShard(tuple(shard.shape), start=0, values=torch.empty(0, dtype=shard.dtype))
    with pytest.raises(CheckpointError, match=rf"do not make up a complete state: {key}: .* are in no shard"):
        divide([table_of(state) for state in states])


@given(states=states())
@settings(deadline=None, max_examples=25)
def test_every_shard_is_written_by_a_rank_that_has_it(states: list[dict[str, Any]]) -> None:
    tables = [table_of(state) for state in states]
    division = divide(tables)
    for row in range(len(division.table)):
        table = tables[division.writer[row]]
        local = int(division.local_row[row])
        assert table.rectangle(local) == division.table.rectangle(row)
        own, whole = (int(each.tensor_of_row[n]) for each, n in ((table, local), (division.table, row)))
        assert table.tensors[own] == division.table.tensors[whole]


def state_with_everything() -> dict[str, Any]:
    """Boxes, uneven ranges, a scalar, a buffer of whole numbers, one without elements, and tied weights (one key)."""
    return {
        "weight/embed": NamedShard((7, 5), start=0, values=torch.randn(35)),
        "weight/box": NamedShard((4, 6), start=0, values=torch.randn(24), box=Rectangle((0, 0), (4, 6))),
        "buffer/count": torch.arange(6).reshape(2, 3),
        "buffer/none": torch.empty(0, 3),
        "optimizer_step": torch.tensor(3.0),
    }


def test_stock_torch_loads_a_checkpoint_through_metadata_that_is_made_on_demand(tmp_path: Path) -> None:
    state = state_with_everything()
    named_state.write(state, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {METADATA, "__0_0.distcp"}
    loaded = {"weight/embed": torch.zeros(7, 5), "buffer/count": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.load(loaded, storage_reader=TorchReader(tmp_path))
    assert torch.equal(loaded["weight/embed"], state["weight/embed"].parts[(0, 0)])
    assert torch.equal(loaded["buffer/count"], state["buffer/count"])


def test_a_checkpoint_becomes_the_file_that_dcp_to_torch_save_makes(tmp_path: Path) -> None:
    state, checkpoint = state_with_everything(), tmp_path / "run/checkpoints/step-00000007"
    checkpoint.mkdir(parents=True)
    named_state.write(state, checkpoint)
    said = output_of(warm.run("-m", "pipeline", "checkpoint", "torch", checkpoint, tmp_path / "state.pt"))
    assert "5 tensors" in said
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found.keys() == state.keys()
    assert torch.equal(found["weight/box"].flatten(), state["weight/box"].parts[(0, 0)].flatten())
    assert torch.equal(found["buffer/count"], state["buffer/count"])
    assert float(found["optimizer_step"]) == 3.0
    again = warm.run("-m", "pipeline", "checkpoint", "torch", checkpoint, tmp_path / "state.pt")
    assert "exists already" in refusal_of(again)


def test_a_checkpoint_of_an_earlier_version_has_the_same_shards_in_the_same_places(tmp_path: Path) -> None:
    """Torch's writer, as version 0.4 used it, and ours: the same files, and metadata that mean the same."""
    state = state_with_everything()
    del state["buffer/none"]  # torch writes a shard without elements, ours none
    (tmp_path / "old").mkdir()
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(tmp_path / "old"), planner=_LookingPlanner())
    (tmp_path / "new").mkdir()
    named_state.write(state, tmp_path / "new")
    old, new = read_metadata(tmp_path / "old"), read_metadata(tmp_path / "new")
    assert boxes(old) == boxes(new)
    assert Counter(old.length.tolist()) == Counter(new.length.tolist())
    for directory, metadata in ((tmp_path / "old", old), (tmp_path / "new", new)):
        values = torch.zeros(11)
        target = {"weight/embed": NamedShard((7, 5), start=8, values=values), "optimizer_step": torch.zeros(())}
        ShardReader(directory, metadata).read(target)
        assert torch.equal(values, state["weight/embed"].parts[(0, 0)].flatten()[8:19])
        assert target["optimizer_step"] == 3.0


class _LookingPlanner(DefaultSavePlanner):
    def lookup_object(self, index: Any) -> Any:
        value = self.state_dict[index.fqn]
        return value.parts[tuple(index.offset)] if isinstance(value, NamedShard) else value


def test_metadata_of_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "FORMAT", 2)
    named_state.write({"optimizer_step": torch.tensor(3.0)}, tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has format 2, and this version reads 1\n  try: the version"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("change", ["a shorter array", "a file that is not listed", "no such dtype", "an object array"])
def test_metadata_that_contradict_themselves_are_refused(tmp_path: Path, change: str) -> None:
    named_state.write(state_with_everything(), tmp_path)
    with np.load(tmp_path / METADATA) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if change == "a shorter array":
        arrays["length"] = arrays["length"][:-1]
    elif change == "a file that is not listed":
        arrays["file_number"] = arrays["file_number"] + 9
    elif change == "an object array":  # would be unpickled
        arrays["length"] = np.array([dict] * len(arrays["length"]), dtype=object)
    else:
        header = json.loads(arrays["header"].tobytes())
        header["tensors"][0][2] = "load"
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    (tmp_path / METADATA).write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match="has no readable metadata"):
        read_metadata(tmp_path)


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    tables = [table_of({"buffer/b": torch.zeros(rank + 2)}) for rank in range(2)]
    with pytest.raises(CheckpointError, match=r"rank 1 has .*shape=\(3,\).* a rank before it .*shape=\(2,\)"):
        divide(tables)


def test_every_table_is_sent_once_and_only_when_it_has_changed() -> None:
    same = {"weight/a": torch.zeros(4), "weight/b": torch.zeros(6)}
    halves = [{"weight/c": NamedShard((8,), start=4 * n, values=torch.zeros(4))} for n in range(2)]
    thirds = [{"weight/c": NamedShard((8,), start=s, values=torch.zeros(n))} for s, n in ((0, 3), (3, 5))]
    coordinator = Coordinator()

    def save(states: Sequence[State]) -> list[tuple[bool, bool] | None]:
        encoded = [encode_table(table_of(state)) for state in states]
        asked = coordinator.missing([each.digests for each in encoded])
        if any(ask is not None for ask in asked):
            coordinator.divide(
                [
                    tuple(p if a else None for p, a in zip(e, ask or (), strict=True))
                    for e, ask in zip(encoded, asked, strict=True)
                ]  # type: ignore[misc]
            )
        return asked

    assert save([same, same, *halves]) == [(True, True), (False, False), (True, True), (False, True)]
    assert save([same, same, *halves]) == [None] * 4
    assert save([same, same, *thirds]) == [(False, False), (False, False), (False, True), (False, True)]
    assert save([same, same, *thirds]) == [None] * 4
    assert save([same, *thirds, same]) == [(False, False)] * 4  # other ranks have them: nothing is sent


def test_the_plan_of_512_ranks_is_a_few_arrays_and_its_metadata_small() -> None:
    """A 70B model with 2 of its 80 layers: 512 ranks in one process. Sizes are those of the layers that are there."""
    llama = dataclasses.replace(LLAMA_70B, layers=2)
    encoded = [encode_table(table_of(state)) for state in zero3_states(llama, 512)]
    tensors = decode_tensors(encoded[0].tensors)
    assert len({each.digests[0] for each in encoded}) == 1  # names are sent by one rank
    tables = [decode_rows(tensors, each.rows) for each in encoded]
    gc.collect()
    before = len(gc.get_objects())
    metadata = located(divide(tables))
    data = encode_metadata(metadata)
    gc.collect()
    # embedding and head have 250.5 rows a rank, in two shards; the step is a scalar, written once
    shards = 3 * 512 * (len(llama.shapes()) + 2) + 1
    assert len(metadata.table) == shards == 35_329
    assert len(gc.get_objects()) - before < 5_000  # some for each file and rank, none for each shard
    assert max(len(each.rows) for each in encoded) < 50 * (shards / 512 + 10)
    assert len(data) < shards  # a byte each; 80 layers have 1.1 million shards, and 20 MB is the limit
    assert_equal(decode_metadata(data), metadata)
