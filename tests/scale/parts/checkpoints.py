"""Checkpoints of a 405B: plan, metadata, commit, listing, and what a rank reads to resume in another layout.

Shards are those of the layouts, as tables without values: 405 billion parameters and two moments, 4.9 TB.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pipeline.checkpoint.checkpoint import Checkpoint, CheckpointInfo
from pipeline.checkpoint.damage import find_damage
from pipeline.checkpoint.export.listing import checkpoint_rows
from pipeline.checkpoint.format.coverage import coverage_errors
from pipeline.checkpoint.format.metadata import decode_metadata
from pipeline.checkpoint.format.shard_table import (
    CheckpointMetadata,
    EncodedTable,
    ShardTable,
    StoredTensor,
    encode_table,
    table_of,
)
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.checkpoint.store import CheckpointStore
from pipeline.checkpoint.write.division import divide
from pipeline.checkpoint.write.locations import Locations, MetadataWriter
from pipeline.checkpoint.write.plan import Coordinator
from pipeline.models.construction.rectangle import Rectangle
from tests.scale.measuring import Figures, Part, measured

RANKS, TARGET = (256, 512, 1024, 2048), 8192
_RANKS_FSDP = (128, 256, 512, 1024)
_LAYERS, _HIDDEN, _INNER, _KEYS, _VOCABULARY = 126, 16384, 53248, 1024, 128256
_PP, _TP = 16, 8


def _parameters() -> dict[str, tuple[tuple[int, ...], int | None, int]]:
    """Name -> shape, the dim that tensor parallelism splits, and the pipeline stage."""
    layer: dict[str, tuple[tuple[int, ...], int | None]] = {
        "self_attn.q_proj": ((_HIDDEN, _HIDDEN), 0),
        "self_attn.k_proj": ((_KEYS, _HIDDEN), 0),
        "self_attn.v_proj": ((_KEYS, _HIDDEN), 0),
        "self_attn.o_proj": ((_HIDDEN, _HIDDEN), 1),
        "mlp.gate_proj": ((_INNER, _HIDDEN), 0),
        "mlp.up_proj": ((_INNER, _HIDDEN), 0),
        "mlp.down_proj": ((_HIDDEN, _INNER), 1),
        "input_layernorm": ((_HIDDEN,), None),
        "post_attention_layernorm": ((_HIDDEN,), None),
    }
    found: dict[str, tuple[tuple[int, ...], int | None, int]] = {"model.embed_tokens": ((_VOCABULARY, _HIDDEN), 0, 0)}
    for number in range(_LAYERS):
        stage = number * _PP // _LAYERS
        found |= {f"model.layers.{number}.{name}": (shape, dim, stage) for name, (shape, dim) in layer.items()}
    return found | {"model.norm": ((_HIDDEN,), None, _PP - 1), "lm_head": ((_VOCABULARY, _HIDDEN), 0, _PP - 1)}


def state_of(rank: int, ranks: int, *, split: bool) -> dict[str, NamedShard]:
    """A rank's shards, on meta: FSDP over all ranks, or over the data ranks of pp 16 x tp 8 (`split`)."""
    pp, tp = (_PP, _TP) if split else (1, 1)
    data = ranks // (pp * tp)
    stage, rest = divmod(rank, data * tp)
    data_rank, tp_rank = divmod(rest, tp)
    state = {}
    for name, (shape, dim, own) in _parameters().items():
        if split and own != stage:
            continue
        sizes, offsets = list(shape), [0] * len(shape)
        if dim is not None and tp > 1:
            sizes[dim] //= tp
            offsets[dim] = tp_rank * sizes[dim]
        rows = -(-sizes[0] // data)
        first = min(data_rank * rows, sizes[0])
        length = (min(first + rows, sizes[0]) - first) * math.prod(sizes[1:])
        values = torch.empty(length, device="meta")
        shard = {
            "start": first * math.prod(sizes[1:]),
            "values": values,
            "box": Rectangle(tuple(offsets), tuple(sizes)),
        }
        for key in ("weight", "exp_avg", "exp_avg_sq"):
            state[f"{key}/{name}"] = NamedShard(shape, **shard)
    return state


def _tables(ranks: int, *, split: bool) -> Iterator[ShardTable]:
    """The tables of all ranks: as `table_of(state_of(...))`, by arrays."""
    parameters, states = _parameters(), ("weight", "exp_avg", "exp_avg_sq")
    pp, tp = (_PP, _TP) if split else (1, 1)
    data = ranks // (pp * tp)
    for stage in range(pp):
        own = [(name, shape, dim) for name, (shape, dim, at) in parameters.items() if not split or at == stage]
        tensors = tuple(StoredTensor(f"{key}/{name}", shape, torch.float32) for name, shape, _ in own for key in states)
        shapes = np.repeat([(*shape, 1)[:2] for _, shape, _ in own], len(states), axis=0)
        dims = np.repeat([-1 if dim is None or tp == 1 else dim for _, _, dim in own], len(states))
        for data_rank, tp_rank in itertools.product(range(data), range(tp)):
            sizes, offsets = shapes.copy(), np.zeros_like(shapes)
            for dim in (0, 1):
                sizes[dims == dim, dim] //= tp
                offsets[dims == dim, dim] = tp_rank * sizes[dims == dim, dim]
            rows = -(-sizes[:, 0] // data)
            first = np.minimum(data_rank * rows, sizes[:, 0])
            sizes[:, 0] = np.minimum(first + rows, sizes[:, 0]) - first
            offsets[:, 0] += first
            (held,) = np.nonzero(sizes[:, 0])
            yield ShardTable(tensors, held, offsets[held], sizes[held])


def _checked_tables(ranks: int, *, split: bool) -> list[ShardTable]:
    tables = list(_tables(ranks, split=split))
    for rank in (0, ranks - 1):  # what a rank would have made of its tensors
        own = table_of(state_of(rank, ranks, split=split))
        assert own.tensors == tables[rank].tensors
        for name in ("tensor_of_row", "offsets", "sizes"):
            assert np.array_equal(getattr(own, name), getattr(tables[rank], name)), (rank, name)
    return tables


def plan(ranks: int, work: Path, *, split: bool) -> Figures:
    """Rank 0 divides the shards among all ranks."""
    del work
    names: dict[int, bytes] = {}  # equal on many ranks
    encoded = []
    for table in _checked_tables(ranks, split=split):
        known = names.setdefault(id(table.tensors), encode_table(replace(table, offsets=table.offsets[:0])).tensors)
        encoded.append(EncodedTable(known, encode_table(replace(table, tensors=())).rows))
    coordinator = Coordinator()
    with measured() as figures:
        asked = coordinator.missing([each.digests for each in encoded])
        sent = [
            tuple(p if ask else None for p, ask in zip(e, a or (), strict=True))
            for e, a in zip(encoded, asked, strict=True)
        ]
        rows = coordinator.divide(sent)  # type: ignore[arg-type]
    assert not isinstance(rows[0], str), rows[0]
    received = sum(len(part) for each in sent for part in each if part is not None)
    figures.bytes += received
    figures.messages = 4 * ranks
    return figures


def _metadata(ranks: int, *, split: bool) -> tuple[MetadataWriter, dict[int, Locations]]:
    """Metadata without locations, and those of every rank, as `torch.save` places them: some 1.3 KB around each."""
    division = divide(_checked_tables(ranks, split=split))
    places = {}
    for rank in range(ranks):
        lengths = division.table.row_bytes[division.written_by(rank)] + 1300
        begins = np.cumsum(lengths) - lengths
        places[rank] = Locations(f"__{rank}_0.distcp" if len(lengths) else None, np.stack([begins, lengths], axis=1))
    return MetadataWriter(division), places


def metadata(ranks: int, work: Path, *, split: bool) -> Figures:
    """Rank 0 encodes the metadata of a checkpoint, and a rank that resumes decodes and checks it."""
    del work
    writer, places = _metadata(ranks, split=split)
    with measured() as figures:
        writer.update(places)
        encoded = writer.encoded()
        found = decode_metadata(encoded)
        assert not list(coverage_errors(found.table))
    figures.read_bytes = len(encoded)
    return figures


def commit(ranks: int, work: Path) -> Figures:
    """Rank 0 commits a checkpoint with one file per rank; the checksums were computed while it was written."""
    store, info = CheckpointStore(work, keep=3), CheckpointInfo(100, {}, {}, {"step": 100})
    with measured() as figures:
        _commit(store, info, ranks)
    return figures


def _commit(store: CheckpointStore, info: CheckpointInfo, ranks: int) -> Checkpoint:
    staging = store.create_staging(info.step)
    sha256 = {}
    for rank in range(ranks):
        name, content = f"__{rank}_0.distcp", f"rank {rank}".encode()
        (staging / name).write_bytes(content)
        sha256[name] = hashlib.sha256(content).hexdigest()
    return store.commit(info, sha256)


def listing(ranks: int, work: Path) -> Figures:
    """`headrace checkpoint ls` lists three checkpoints with one file per rank, and compares file sizes."""
    store = CheckpointStore(work, keep=3)
    for step in (100, 200, 300):
        _commit(store, CheckpointInfo(step, {}, {}, {"step": step}), ranks)
    with measured() as figures:
        rows = checkpoint_rows(store.checkpoints())
    assert [row["damage"] for row in rows] == [None] * 3
    return figures


def verify(ranks: int, work: Path) -> Figures:
    """One process verifies the checksums of all files of a checkpoint; a file has a few bytes here."""
    store = CheckpointStore(work, keep=3)
    checkpoint = _commit(store, CheckpointInfo(100, {}, {}, {"step": 100}), ranks)
    with measured() as figures:
        assert find_damage(checkpoint) is None
    return figures


class _CountingReader(ShardReader):
    """Counts the bytes of the stored shards that a rank reads, and reads none."""

    def __init__(self, metadata: CheckpointMetadata) -> None:
        super().__init__(Path(), metadata)
        self.bytes, self.files = 0, set[int]()

    def _stored(self, row: int, first: int, end: int) -> torch.Tensor:
        shape = self._metadata.table.rectangle(row).sizes
        part = torch.empty((end - first, *shape[1:]), device="meta")
        self.bytes += part.nbytes if 2 * (end - first) < shape[0] else int(self._metadata.length[row])
        self.files.add(int(self._metadata.file[row]))
        return part


def resume(ranks: int, work: Path, *, split: bool) -> Figures:
    """A rank resumes from a checkpoint of the other layout, on as many ranks."""
    del work
    writer, places = _metadata(ranks, split=not split)
    writer.update(places)
    reader = _CountingReader(decode_metadata(writer.encoded()))
    state: Mapping[str, NamedShard] = state_of(ranks // 2, ranks, split=split)
    with measured() as figures:
        reader.read(state)
    figures.read_bytes, figures.file_operations = reader.bytes, 2 * len(reader.files)
    needed = sum(part.nbytes for each in state.values() for part in each.parts.values())
    print(f"{reader.bytes / needed:.1f} times the {needed / 1e9:.2f} GB needed, of {len(reader.files)} files")
    return figures


_NEEDED = {
    True: "Column-parallel shards need a part of every row, and whole rows are read: up to 8 times the bytes needed.",
    False: "It reads only the bytes needed; 56 times as many before single rows of a shard could be read.",
}
_CENTRAL = {
    True: "",
    False: "Rank 0 keeps the shards of all ranks as arrays: 3,411 for each of 8,192 ranks here. Pipeline stages (a rank"
    " has some of the layers) and hybrid sharding (equal shards of replicas count once) reduce them, tensor parallelism"
    " does not; without these rank 0's host needs that much memory, and `headrace check` says so.",
}
_LAYOUTS = {True: "pp 16 x tp 8, FSDP over the others", False: "FSDP over all ranks"}


def _in_layouts(name: str, what: str, run: Callable[..., Figures], notes: Mapping[bool, str]) -> list[Part]:
    return [
        Part(
            f"checkpoints: {name}, {layout}",
            what,
            "ranks",
            RANKS if split else _RANKS_FSDP,
            TARGET,
            partial(run, split=split),
            note=notes[split],
        )
        for split, layout in _LAYOUTS.items()
    ]


_DECODES = "rank 0 encodes it, a rank that resumes decodes it and looks for gaps; the bytes are those of the file."
_RESUMES = "a rank of this layout resumes from a checkpoint of the other one, on as many ranks."
PARTS = [
    *_in_layouts("plan", "rank 0 divides the shards among all ranks.", plan, _CENTRAL),
    *_in_layouts("metadata", _DECODES, metadata, _CENTRAL),
    Part("checkpoints: commit", commit.__doc__ or "", "files", (1000, 2000, 4000, 8000), 8000, commit),
    Part("checkpoints: listing", listing.__doc__ or "", "files", (1000, 2000, 4000, 8000), 8000, listing),
    Part("checkpoints: verify", verify.__doc__ or "", "files", (1000, 2000, 4000, 8000), 8000, verify),
    *_in_layouts("resume", _RESUMES, resume, _NEEDED),
]
