"""What stages send besides hidden states: found from a forward pass, proven by the trial, packed into one message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foundation.errors import ConfigError
from pipeline.engines.parallel.stage_messages import CarriedTensor, StageMessage, several
from tests.engines.parallel.layouts import check_family


def test_a_second_tensor_with_the_shape_of_hidden_states_is_sent_too() -> None:
    states, other = CarriedTensor(1, ((1, (0, 0)),), (2, 16, 8)), CarriedTensor(1, ((1, (1, "chosen")),), (2, 16, 8))
    assert not several([states], hidden_states=(2, 16, 8))
    assert several([states, other], hidden_states=(2, 16, 8))
    assert several([states], hidden_states=(2, 16, 4))


class Layer(nn.Module):
    """A layer that hands on its states, and takes a mapping that layers share."""

    def forward(self, states: torch.Tensor, *, shared: Any) -> tuple[torch.Tensor, Any]:
        return states, shared.get("full")


def test_a_message_carries_integers_bit_by_bit_and_the_rest_with_gradients() -> None:
    carried = [CarriedTensor(1, ((1, (0, 0)),), (2, 3)), CarriedTensor(0, ((1, (1, "shared", "full", 1)),), (2, 2))]
    sending, receiving = ([Layer(), Layer()] for _ in range(2))
    sender = StageMessage(sending, carried, (0, 1), dtype=torch.bfloat16)
    receiver = StageMessage(receiving, carried, (1, 2), dtype=torch.bfloat16)
    states, chosen = torch.ones(2, 3, requires_grad=True), torch.tensor([[2**40 + 1, -7], [513, 0]], dtype=torch.int64)
    sending[1](3 * states, shared={"full": (None, chosen)})
    message = sender.sent()
    assert sender.sent_size == len(message) == 6 + 4 * 4
    receiver.shapes[torch.Size([1, 1])] = sender.sent_shapes
    receiver.receive(message, torch.Size([1, 1]))
    found, full = receiving[1](torch.zeros(2, 3), shared={})
    assert torch.equal(full[1], chosen)
    found.sum().backward()
    assert torch.equal(states.grad, torch.full((2, 3), 3.0))


def test_a_weight_of_layers_in_three_stages_and_messages_over_tp_are_refused() -> None:
    six = {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid"] * 3, "num_mem_blocks": 1}
    for kind, fields, parallel, why in (
        ("zamba2", six, {"pp": 3}, r"pp = 3.*in 3 stages share shared_transformer\.\S+.*use parallel\.pp 2"),
        ("gemma4_text", {}, {"pp": 2, "cp": 2}, r"cp = 2.*hand on more than hidden states.*cp 1, or parallel\.pp 1"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){why}"):
            check_family(kind, world_size=12, fields=fields, parallel=parallel)
