"""Makes the mistakes that a step must not make, and prints as JSON what the recorder saw of them."""

from __future__ import annotations

import json

import pipeline.plan.fake_gpu.device as fake  # isort: skip  before torch
import torch
import torch.distributed as dist

from pipeline.config.topology import Topology
from pipeline.plan.fake_gpu.memory import Memory
from pipeline.plan.fake_gpu.recorder import StepRecorder
from pipeline.plan.fake_gpu.step import axes_of, world


def main() -> None:
    memory, topology = Memory({}, head=(1, 1)), Topology(dp=4)
    with world(topology, 0):
        recorder = StepRecorder(memory, axes_of=lambda ranks: axes_of(topology, ranks))
        with fake.fake_tensors(), recorder.reading_lists(), recorder:
            recorder.begin()
            large = [torch.zeros(2**18, device="cuda") for _ in range(3)]
            try:
                mix_up = str(large[0] + torch.zeros(2**18))
            except RuntimeError as error:
                mix_up = f"{type(error).__name__}: {error}"
            peak = memory.peak().bytes
            assert bool(large[0].sum() > 0)
            large[0].sum().item()
            large.pop().cpu()
            torch.zeros(8).to("cuda")  # with non_blocking it would break a contract
            dist.all_reduce(torch.zeros(1024, device="cuda"))
    [counts] = recorder.collectives.values()
    reads, copies = sum(recorder.host_reads.values()), sum(recorder.unpinned.values())
    seen = {"mix_up": mix_up, "host_reads": reads, "unpinned": copies, "all_reduce": counts, "peak": peak}
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
