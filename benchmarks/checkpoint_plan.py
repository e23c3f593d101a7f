"""Cost of a checkpoint's plan and metadata at size: all ranks of a large run simulated in one process, without weights.

    python -m benchmarks.checkpoint_plan [--only 70Bx512]

The state is that of a llama under ZeRO-3: fp32 weights and two moments. Times are CPU seconds of this process, since
other work may share the machine; garbage collection is off during timing. b1b88214 also measures
torch.distributed.checkpoint's planner.

    all ranks     describing the shards, summed over ranks; in a run all ranks do it at the same time
    rank 0        reading the ranks' descriptions, dividing the work, encoding the answers
    MB sent       to rank 0, for the first plan and for each save after the first with the same layout
    a save        on rank 0, after the first save: plan, the ranks' records of what they wrote, metadata
    read          reading the metadata, on every rank that resumes
"""

from __future__ import annotations

import dataclasses
import gc
import math
import pickle
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Seconds, make_parser, print_head, print_row, work_folder
from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.metadata import METADATA, read_metadata
from pipeline.checkpoint.format.shard_table import encode_table, table_of
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.write.locations import Locations, MetadataWriter
from pipeline.checkpoint.write.plan import Coordinator
from pipeline.checkpoint.write.write_shards import WrittenShards, write_metadata
from pipeline.config.sections.optimizers import ADAMW

State = dict[str, NamedShard | Tensor]
Shapes = dict[str, tuple[int, ...]]
_OVERHEAD = 1200
"""Approximate number of bytes that `torch.save` adds to a shard."""


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes of a llama: width, width of the feed-forward layers and of keys and values, layers, vocabulary."""

    width: int
    hidden: int
    kv_width: int
    layers: int
    vocabulary: int = 128_256

    def shapes(self) -> Shapes:
        """Hugging Face name -> full shape of every parameter."""
        d, f, kv = self.width, self.hidden, self.kv_width
        layer: Shapes = {
            "self_attn.q_proj.weight": (d, d),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.o_proj.weight": (d, d),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
        }
        layers = {f"model.layers.{n}.{name}": shape for n in range(self.layers) for name, shape in layer.items()}
        table = (self.vocabulary, d)
        return {"model.embed_tokens.weight": table, **layers, "model.norm.weight": (d,), "lm_head.weight": table}


LLAMA_8B = Llama(width=4096, hidden=14_336, kv_width=1024, layers=32)
LLAMA_70B = Llama(width=8192, hidden=28_672, kv_width=1024, layers=80)
CASES = {"8Bx8": (LLAMA_8B, 8), "70Bx64": (LLAMA_70B, 64), "70Bx512": (LLAMA_70B, 512)}


def zero3_states(llama: Llama, ranks: int) -> Iterator[State]:
    """The state of every rank under ZeRO-3, on meta: a flat range of every parameter and of both moments, fp32."""
    for rank in range(ranks):
        state: State = {named_state.OPTIMIZER_STEP: torch.empty((), device="meta")}
        for name, shape in llama.shapes().items():
            numel = math.prod(shape)
            per_rank = -(-numel // ranks)
            start = min(rank * per_rank, numel)
            values = torch.empty(min(per_rank, numel - start), device="meta")
            state[named_state.weight_key(name)] = NamedShard(shape, start=start, values=values)
            for moment in ADAMW.states:
                state[named_state.moment_key(moment, name)] = NamedShard(shape, start=start, values=values)
        yield state


class Clock:
    """Adds up CPU seconds in named sums."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a sum."""
        gc.disable()
        began = Seconds.now()
        yield
        self.seconds[name] += Seconds.since(began).cpu
        gc.enable()


def measure(llama: Llama, ranks: int, work: Path) -> dict[str, Any]:
    """Measures the costs of a checkpoint."""
    clock = Clock()
    tables = []
    for state in zero3_states(llama, ranks):
        with clock.time("all ranks"):
            tables.append((table := encode_table(table_of(state)), table.digests))
    digests = [each for _, each in tables]
    coordinator = Coordinator()
    with clock.time("rank 0"):
        asked = coordinator.missing(digests)
    sent = [
        tuple(part if ask else None for part, ask in zip(table, asks or (), strict=True))
        for (table, _), asks in zip(tables, asked, strict=True)
    ]
    with clock.time("rank 0"):
        coordinator.divide(sent)  # type: ignore[arg-type]
    division = coordinator.division
    assert division is not None
    writer = MetadataWriter(division)

    def save(messages: list[bytes]) -> None:
        digests[-1] = encode_table(table_of(state)).digests
        coordinator.missing(digests)
        written = [pickle.loads(message) for message in messages]
        writer.update({rank: each.locations for rank, each in enumerate(written) if each.locations})
        write_metadata(writer.encoded(), work)

    def message(rank: int, *, first: bool) -> bytes:
        length = division.table.row_bytes[division.written_by(rank)] + _OVERHEAD
        name, places = f"__{rank}_0.distcp", np.stack([np.cumsum(length) - length, length], axis=1)
        return pickle.dumps(WrittenShards(Locations(name, places) if first else None, {name: "0" * 64}))

    later = [message(rank, first=False) for rank in range(ranks)]
    with clock.time("first save"):
        save([message(rank, first=True) for rank in range(ranks)])
    with clock.time("a save"):
        save(later)
    with clock.time("read"):
        read_metadata(work)
    return {
        **clock.seconds,
        "shards": len(division.table),
        "MB sent": sum(len(part) for parts in sent for part in parts if part) / 1e6,
        "MB sent per save": (sum(map(len, later)) + 64 * ranks) / 1e6,
        "MB on disk": (work / METADATA).stat().st_size / 1e6,
    }


COLUMNS = ("shards", "all ranks", "rank 0", "MB sent", "first save", "a save", "MB sent per save", "MB on disk", "read")


def main() -> None:
    """Prints the table in Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=CASES, help="one of the cases")
    arguments = parser.parse_args()
    print_head("", *COLUMNS)
    for case in [arguments.only] if arguments.only else CASES:
        with work_folder() as work:
            found = measure(*CASES[case], work)
        print_row(case, *(f"{found[name]:,}" if name == "shards" else f"{found[name]:,.3f}" for name in COLUMNS))


if __name__ == "__main__":
    main()
