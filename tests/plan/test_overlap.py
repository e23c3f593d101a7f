"""Communication beside computation: cases by hand, and limits."""

from __future__ import annotations

import random

import pytest

from pipeline.plan.predict.overlap import LayerCosts, overlapped


def test_without_prefetch_every_gather_is_exposed() -> None:
    layers = [LayerCosts(2.0, 4.0, 1.0, 0.0)] * 3
    found = overlapped(layers, prefetch=0)
    # three gathers forward and two backward: the last layer's weights stay
    assert found.exposed_s == pytest.approx(5.0)
    assert found.communication_s == pytest.approx(5.0)
    assert found.compute_s == pytest.approx(18.0)


def test_with_prefetch_only_the_first_gather_and_the_last_reduction_are_exposed() -> None:
    layers = [LayerCosts(2.0, 4.0, 1.0, 1.5)] * 3
    found = overlapped(layers, prefetch=1)
    assert found.exposed_s == pytest.approx(1.0 + 1.5)
    assert overlapped(layers, prefetch=2).exposed_s == pytest.approx(2.5)


def test_a_network_that_is_slower_than_compute_sets_the_pace() -> None:
    # gathers of 3 s behind passes of 1 s; the first layer's gather comes before its computation, and so on
    layers = [LayerCosts(1.0, 1.0, 3.0, 0.0)] * 4
    found = overlapped(layers, prefetch=1, regather=False)
    # 4 x 3 s, then forward of the last layer and four backward passes
    assert found.seconds == pytest.approx(12 + 1 + 4)


def test_reductions_share_the_network_with_gathers() -> None:
    # backward: layer 1 computes 0-2 after its forward pass, its reduction of 4 s is under way while layer 0 is gathered
    layers = [LayerCosts(1.0, 2.0, 1.0, 4.0), LayerCosts(1.0, 2.0, 1.0, 4.0)]
    found = overlapped(layers, prefetch=1)
    # gathers 0-1, 1-2; forward 1-2, 2-3; backward of layer 1 3-5, gather of layer 0 3-4, backward of layer 0 5-7;
    # reductions 5-9 and 9-13
    assert found.seconds == pytest.approx(13.0)
    assert found.exposed_s == pytest.approx(13.0 - 6.0)


def test_what_holds_of_any_layers() -> None:
    draw = random.Random(7)
    for _ in range(200):
        layers = [LayerCosts(*(draw.random() for _ in range(4))) for _ in range(draw.randrange(1, 9))]
        times = [overlapped(layers, prefetch=k) for k in (0, 1, 2, 9)]
        for found in times:
            assert found.seconds >= max(found.compute_s, found.communication_s) - 1e-9
            assert found.seconds <= found.compute_s + found.communication_s + 1e-9
        assert times[0].seconds >= times[1].seconds - 1e-9
        assert overlapped(layers, prefetch=1, regather=False).communication_s <= times[1].communication_s
