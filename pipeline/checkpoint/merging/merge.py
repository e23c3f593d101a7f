"""Writes the weighted mean of checkpoints as the checkpoint of a new run, in bounded memory.

Weights are fp32 master weights. Products and sums are computed in fp64 and rounded once. The output is written in
shards of at most 64 MiB; for each, the same rows of all checkpoints are read, in whatever layout they are stored. What
is no weight:

- a persistent buffer of floating-point numbers, such as a router's correction bias: the mean with the same weights;
- a buffer of integers or flags: the value of the newest checkpoint;
- optimizer states, the EMA of the weights, the experts' load: left out; the optimizer of a continued run starts afresh;
- the loss scale of an fp16 run: the newest checkpoint's.

Tied weights are stored once, and merged once. Parameters in another scale, such as A_log of Mamba, are averaged as they
are trained: the mean of logarithms, since the updates that WSM weights are updates of logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundation.directory import parent_entry, staged, sync, write_manifest
from foundation.errors import CheckpointError
from foundation.remote_directory import require_room
from pipeline.checkpoint.checkpoint import MERGED, Checkpoint, CheckpointInfo
from pipeline.checkpoint.format.shard_table import StoredTensor
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.merging.coefficients import MergeMethod
from pipeline.checkpoint.merging.sources import MergeSource
from pipeline.checkpoint.named_state import LOSS_SCALE
from pipeline.checkpoint.pins import pinned
from pipeline.checkpoint.save import save_streamed
from pipeline.checkpoint.store import CheckpointStore
from pipeline.checkpoint.write.streamed import LazyTensor, Progress
from pipeline.config.rules.curve import recorded_schedule
from pipeline.models.card.lineage import Lineage, training_lineage
from pipeline.models.construction.rectangle import Rectangle

_MODEL = ("hf_config", "generation", "tokenizer", "extra_weights")
_KEPT = ("samples", "skips", "ledger", "topology", "engine", "curve", *_MODEL)
"""Details of the newest checkpoint that the merged one takes, where it has them."""
_BLOCK = 1 << 20
"""Elements that are averaged at a time: 8 MiB in fp64."""
_SLACK = 1 << 20
"""Bytes of the metadata and manifests of a merged run, at most."""


@dataclass(frozen=True)
class Merge:
    """A merge of checkpoints.

    Attributes:
        sources: the checkpoints.
        method: how they are weighted.
        coefficients: weight of every checkpoint; their sum is 1.
    """

    sources: Sequence[MergeSource]
    method: MergeMethod
    coefficients: Sequence[float]

    @classmethod
    def of(cls, sources: Sequence[MergeSource], method: MergeMethod) -> Merge:
        """Makes the merge of some checkpoints with a method.

        Raises:
            ConfigError: the method cannot weight these checkpoints.
        """
        return cls(sources, method, method.coefficients([each.checkpoint.step for each in sources]))

    @property
    def newest(self) -> MergeSource:
        """The checkpoint with the largest step; the first of several."""
        return max(self.sources, key=lambda each: each.checkpoint.step)

    @property
    def bytes(self) -> int:
        """Bytes of the merged tensors."""
        return sum(each.bytes for each in self.newest.tensors.values())

    def write(self, out: Path, progress: Progress = lambda _done, _total: None) -> Checkpoint:
        """Writes the merged checkpoint as a run's directory, whole or not at all.

        Args:
            out: directory that does not exist.
            progress: called with (bytes written, all bytes).

        Raises:
            DataError: the disk has no room.
            CheckpointError: a checkpoint is damaged, or the mean is not finite.
            OSError, RuntimeError: a file cannot be written.
        """
        require_room(self.bytes + _SLACK, out)
        info = self._info()
        with ExitStack() as stack, staged(out) as staging:
            for each in self.sources:  # a run that trains on must not delete them meanwhile
                stack.enter_context(pinned(each.place.home, each.checkpoint.step, by=staging))
            written = save_streamed(CheckpointStore(staging, keep=1), info, self._tensors(), progress)
            details = {"step": info.step, "steps": info.step, "finished": True, MERGED: info.details[MERGED]}
            write_manifest(staging, kind="run", config=info.config, parents=info.parents, details=details)
            sync(staging)
            staging.rename(out)
            sync(out.parent)
        return Checkpoint(out / written.path.relative_to(staging), written.step)

    def _tensors(self) -> dict[str, LazyTensor]:
        found = {key: self._lazy(each, self._mean) for key, each in self.newest.tensors.items()}
        scale = next((each for each in self.newest.metadata.tensors if each.key == LOSS_SCALE), None)
        return found if scale is None else {**found, LOSS_SCALE: self._lazy(scale, self._newest_value)}

    def _lazy(self, stored: StoredTensor, make: Callable[[StoredTensor, Rectangle], Tensor]) -> LazyTensor:
        make = make if stored.dtype.is_floating_point else self._newest_value
        whole = partial(make, stored, Rectangle.full(stored.shape))
        return LazyTensor(stored.shape, stored.dtype, whole, part=partial(make, stored))

    def _mean(self, stored: StoredTensor, rectangle: Rectangle) -> Tensor:
        """Returns a rectangle of a tensor's weighted mean, computed by blocks of rows that fit into a cache.

        A thread reads the next block meanwhile.
        """
        rows = rectangle.sizes[0] if rectangle.numel > _BLOCK else 1
        count = max(1, rows * _BLOCK // max(1, rectangle.numel))
        if count >= rows:
            return self._mean_of_block(stored, self._values(stored, rectangle))
        blocks = [rectangle.rows(first, min(count, rows - first)) for first in range(0, rows, count)]
        mean = torch.empty(rectangle.sizes, dtype=stored.dtype)
        with ThreadPoolExecutor(1) as thread:
            ahead = thread.submit(self._values, stored, blocks[0])
            for part, following in zip(mean.split(count), [*blocks[1:], None], strict=True):
                values = ahead.result()
                if following is not None:
                    ahead = thread.submit(self._values, stored, following)
                part.copy_(self._mean_of_block(stored, values))
        return mean

    def _values(self, stored: StoredTensor, block: Rectangle) -> list[tuple[float, Tensor]]:
        pairs = zip(self.sources, self.coefficients, strict=True)
        return [(coefficient, _read(source, stored, block)) for source, coefficient in pairs if coefficient]

    def _mean_of_block(self, stored: StoredTensor, values: Sequence[tuple[float, Tensor]]) -> Tensor:
        total = torch.zeros(values[0][1].shape, dtype=torch.float64)
        for coefficient, value in values:
            total.add_(value, alpha=coefficient)
        if not total.sum().isfinite():  # of numbers that are finite in fp32, the sum is finite in fp64
            remedy = "headrace checkpoint verify RUN --all"
            raise CheckpointError(f"the mean of {stored.key} is not finite\n  try: {remedy}")
        return total.to(stored.dtype)

    def _newest_value(self, stored: StoredTensor, rectangle: Rectangle) -> Tensor:
        return _read(self.newest, stored, rectangle)

    def _info(self) -> CheckpointInfo:
        newest, step = self.newest.manifest, self.newest.checkpoint.step
        kept = {key: newest.details[key] for key in _KEPT if key in newest.details}
        lineage = merged_lineage([each.manifest for each in self.sources], self.row())
        details = {"step": step, **kept, "anomalies": {}, MERGED: {**self.row(), "lineage": lineage}}
        own = [parent_entry(each.name, each.manifest.fingerprint) for each in self.sources]
        parents = {**newest.parents, **{f"merged.{number}": each for number, each in enumerate(own)}}
        return CheckpointInfo(step, newest.config, parents, details)

    def rates(self) -> tuple[float, float] | None:
        """Returns two learning rates of steps between the checkpoints, the first and the farthest from it, if unequal.

        Each checkpoint's record gives the rates since the checkpoint before it: of its stage, or of its branch.
        """
        ordered = sorted(self.sources, key=lambda each: each.checkpoint.step)
        found = [
            recorded_schedule(later.manifest.details["curve"], step).lr(step)
            for earlier, later in pairwise(ordered)
            for step in (earlier.checkpoint.step + 1, later.checkpoint.step)
        ]
        first, last = found[0], max(found, key=lambda each: abs(each - found[0]))
        return None if math.isclose(first, last, rel_tol=1e-6) else (first, last)

    def row(self) -> dict[str, Any]:
        """Describes the merge as plain JSON: method, steps and weights of the checkpoints."""
        shape = {"shape": self.method.shape} if self.method.name == "wsm" else {}
        decay = {"decay": self.method.ema} if self.method.name == "ema" else {}
        steps = [each.checkpoint.step for each in self.sources]
        return {"method": self.method.name, **shape, **decay, "of_steps": steps, "weights": list(self.coefficients)}


def _read(source: MergeSource, stored: StoredTensor, rectangle: Rectangle) -> Tensor:
    """Reads a rectangle of one of a checkpoint's tensors."""
    values = torch.empty(rectangle.numel, dtype=stored.dtype)
    shard = NamedShard(stored.shape, start=0, values=values, box=rectangle)
    try:
        source.reader.read({stored.key: shard})
    except (CheckpointError, RuntimeError, OSError) as error:
        why = (str(error) or repr(error)).splitlines()[0]
        raise CheckpointError(f"{source.name} cannot be read: {why}\n  try: headrace checkpoint verify") from None
    return values.view(rectangle.sizes)


def merged_lineage(manifests: Sequence[Any], row: Mapping[str, Any]) -> Lineage:
    """Joins the lineages of checkpoints, of each run the one with the most steps, and appends the merge.

    Args:
        manifests: the manifests of the checkpoints.
        row: `Merge.row`.
    """
    newest: dict[str, Any] = {}
    for manifest in manifests:
        run = str(manifest.config.get("run", {}).get("dir"))
        if run not in newest or manifest.details["step"] > newest[run].details["step"]:
            newest[run] = manifest
    lineages = [training_lineage(manifest) for manifest in newest.values()]
    joined: Lineage = {"corpora": [], "steps": []}
    for key in joined:
        for entry in (entry for lineage in lineages for entry in lineage[key]):
            if entry not in joined[key]:
                joined[key].append(entry)
    return {**joined, "steps": [*joined["steps"], {"step": "merge", **row}]}
