"""Second moments of what layers read: shared where they read one tensor, and right where they do not always."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from foundation.errors import ConfigError
from pipeline.compress.quantization.moments import SecondMoments

CPU = torch.device("cpu")


def linear_layers(*names: str) -> dict[str, nn.Linear]:
    return {name: nn.Linear(6, 3) for name in names}


def mean(rows: Tensor) -> Tensor:
    return rows.T @ rows / len(rows)


def test_layers_that_read_one_tensor_share_the_mean_over_all_tokens_of_all_batches() -> None:
    layers = linear_layers("query", "key", "output")
    first, second, other = torch.randn(2, 4, 6), torch.randn(1, 4, 6), torch.randn(1, 5, 6)
    moments = SecondMoments(CPU)
    with moments.observe(layers):
        for states in (first, second):
            layers["query"](states)
            layers["key"](states)
        layers["output"](other)
    layers["query"](first)  # no longer observed
    found = dict(moments.pop())
    assert list(found) == [("query", "key"), ("output",)]
    torch.testing.assert_close(found["query", "key"], mean(torch.cat([first, second], 0).reshape(-1, 6)))
    torch.testing.assert_close(found["output",], mean(other[0]))


def test_layers_that_read_one_tensor_in_some_batches_only_are_apart() -> None:
    layers = linear_layers("one", "two")
    both, one, two = torch.randn(4, 6), torch.randn(3, 6), torch.randn(5, 6)
    moments = SecondMoments(CPU)
    with moments.observe(layers):
        layers["one"](both), layers["two"](both)
        layers["one"](one), layers["two"](two)
    found = dict(moments.pop())
    torch.testing.assert_close(found["one",], mean(torch.cat([both, one])))
    torch.testing.assert_close(found["two",], mean(torch.cat([both, two])))


def test_a_layer_without_a_token_has_moments_of_zero() -> None:
    layers = linear_layers("expert")
    moments = SecondMoments(CPU)
    with moments.observe(layers):
        layers["expert"](torch.empty(0, 6))
    assert not dict(moments.pop())["expert",].any()


@pytest.mark.parametrize("then", ["one", "two", None])
def test_an_input_that_is_changed_in_place_after_it_was_read_is_refused(then: str | None) -> None:
    layers, states = linear_layers("one", "two"), torch.randn(4, 6)

    def run() -> None:
        with SecondMoments(CPU).observe(layers), torch.no_grad():
            layers["one"](states)
            states.add_(1)
            if then is not None:
                layers[then](states)

    with pytest.raises(ConfigError, match="changes the input of one in place"):
        run()
