"""Receive buffers of pipeline stages: as many as messages in flight, and the same gradients as torch's own stages."""

from __future__ import annotations

import pytest

from tests import warm
from tests.support import output_of

CODE = """
import sys
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from pipeline.engines.torch_native.receive_buffers import StageWithFewBuffers
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.group import process_group

launch, name, micro_batches, sizes = detect(), sys.argv[1], 8, []
virtual = 2 if 'Interleaved' in name else 1

def buffers(stages):
    infos = [each for stage in stages for of in (stage.args_recv_info, stage.grad_recv_info) for each in of.values()]
    return [info.buffer for each in infos for info in each if info.buffer is not None and not info.buffer.is_meta]

def gradients(kind):
    modules = []
    for number in range(virtual):
        torch.manual_seed(number * 2 + launch.rank)
        modules.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    sample, stages = torch.empty(2, 4, device='meta', requires_grad=True), []
    for number, module in enumerate(modules):
        index = 2 * number + launch.rank
        first = sample.detach() if index == 0 else sample
        args = (module, index, 2 * virtual, torch.device('cpu'))
        stages.append(kind(*args, input_args=first, output_args=sample))
    def counted(receive):
        def count(index):
            operations = receive(index)
            sizes.append(len(buffers(stages)))
            return operations
        return count
    for stage in stages:
        stage.get_fwd_recv_ops, stage.get_bwd_recv_ops = map(counted, (stage.get_fwd_recv_ops, stage.get_bwd_recv_ops))
    given = stages[0] if virtual == 1 else stages
    schedule = getattr(schedules, name)(given, micro_batches, loss_fn=lambda out, target: (out - target).square().sum())
    for step in range(2):
        inputs = torch.arange(64.0).view(16, 4) / 64 + step
        schedule.step(*([inputs] if launch.rank == 0 else []), target=torch.zeros(16, 4))
    return [p.grad for module in modules for p in module.parameters()], len(buffers(stages))

with process_group(launch, gpu=None, timeout_s=60.0):
    expected, held = gradients(PipelineStage)
    assert held == micro_batches * (2 * virtual - 1), held  # one border less than stages have: the first or the last
    sizes.clear()
    found, left = gradients(StageWithFewBuffers)
    assert left == 0, left
    assert 0 < max(sizes) <= 4, sizes
    assert all(map(torch.equal, found, expected))
    print('most', max(sizes))
"""


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B"])
def test_buffers_are_those_of_messages_in_flight_and_gradients_are_those_of_torchs_stages(schedule: str) -> None:
    assert "most" in output_of(warm.run("-c", CODE, schedule, processes=2, merged=True))
