"""Distributing a user's loader: all ranks together see every sample once, in the order of one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from foundation.errors import ConfigError, DataError
from pipeline.own_loop.config import BatchShare, load_loop_config, share
from pipeline.own_loop.loader import batch_size_of, distribute

CPU = torch.device("cpu")


def seen_by(loader: Any, *, total: int, micro: int, ranks: int) -> list[list[Tensor]]:
    """The batches of every rank, computed one after the other, from a loader with a fixed order."""
    accumulation = total // micro // ranks
    shares = [BatchShare(total, micro, accumulation, ranks, rank) for rank in range(ranks)]
    return [list(distribute(loader, each, device=CPU, say=lambda _: None)) for each in shares]


def in_order(parts: list[list[Tensor]]) -> list[int]:
    """Sample numbers in the order of optimizer steps: micro-batch by micro-batch, rank by rank."""
    return torch.cat(list(chain.from_iterable(zip(*parts, strict=True)))).tolist()


@pytest.mark.parametrize(("total", "micro", "ranks"), [(8, 8, 1), (8, 4, 2), (8, 2, 2), (8, 2, 4), (8, 1, 1)])
@pytest.mark.parametrize("size", ["whole", "micro"])
def test_iterables_are_distributed_completely_and_in_order(total: int, micro: int, ranks: int, size: str) -> None:
    length = total if size == "whole" else micro
    batches = list(torch.arange(24).split(length))
    assert in_order(seen_by(batches, total=total, micro=micro, ranks=ranks)) == list(range(24))


def test_a_dataloader_is_distributed_completely_and_in_order() -> None:
    loader = DataLoader(torch.arange(24), batch_size=8)  # type: ignore[arg-type]
    one = BatchShare(8, 4, 2, 1, 0)
    shared = distribute(loader, one, device=CPU, say=lambda _: None)
    assert len(shared) == 6
    assert torch.cat(list(shared)).tolist() == list(range(24))


def test_a_shuffled_dataloader_has_the_order_of_the_plain_one() -> None:
    def loader() -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(torch.arange(24), batch_size=8, shuffle=True)  # type: ignore[arg-type]

    plain = torch.cat(list(loader())).tolist()
    shared = distribute(loader(), BatchShare(8, 2, 4, 1, 0), device=CPU, say=lambda _: None)
    assert torch.cat(list(shared)).tolist() == plain
    again = torch.cat(list(shared)).tolist()
    assert again != plain
    assert sorted(again) == sorted(plain)


class Counted:
    """A dataset of numbers that records which were read."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def test_skipping_leaves_the_order_and_reads_none_of_the_skipped_samples() -> None:
    def shared(dataset: Counted) -> Any:
        torch.manual_seed(3)
        loader = DataLoader(dataset, batch_size=8, shuffle=True)  # type: ignore[arg-type, var-annotated]
        return distribute(loader, BatchShare(8, 2, 4, 1, 0), device=CPU, say=print)

    whole = torch.cat(list(shared(Counted(40)))).tolist()
    dataset = Counted(40)
    later = shared(dataset).skip_first_batches(4).skip_first_batches(8)  # one step, and two more
    assert len(later) == 8
    assert torch.cat(list(later)).tolist() == whole[24:]
    assert sorted(dataset.read) == sorted(whole[24:])
    assert list(shared(Counted(40)).skip_first_batches(20)) == []


def test_skipping_in_an_iterable_gives_every_rank_its_later_batches() -> None:
    batches = list(torch.arange(24).split(8))
    for rank in range(2):
        loader = distribute(batches, BatchShare(8, 2, 2, 2, rank), device=CPU, say=print)
        whole = [batch.tolist() for batch in loader]
        assert [batch.tolist() for batch in loader.skip_first_batches(2).skip_first_batches(2)] == whole[4:]


def test_a_position_within_an_optimizer_step_or_beyond_the_epoch_is_refused() -> None:
    loader = distribute(DataLoader(Counted(16), batch_size=8), BatchShare(8, 2, 4, 1, 0), device=CPU, say=print)  # type: ignore[arg-type, var-annotated]
    for wrong in (-4, 1, 6):
        with pytest.raises(DataError, match="takes 4 micro-batches"):
            loader.skip_first_batches(wrong)
    with pytest.raises(DataError, match="an epoch has 8 micro-batches"):
        loader.skip_first_batches(12)


def test_an_incomplete_global_batch_is_refused_or_dropped_but_never_padded() -> None:
    samples: Any = torch.arange(21)
    with pytest.raises(ConfigError, match="21 samples are 2 global batches of 8 and 5 more samples"):
        distribute(DataLoader(samples, batch_size=8), BatchShare(8, 4, 1, 2, 0), device=CPU, say=print)
    dropping = DataLoader(samples, batch_size=8, drop_last=True)
    shared = distribute(dropping, BatchShare(8, 8, 1, 1, 0), device=CPU, say=print)
    assert torch.cat(list(shared)).tolist() == list(range(16))
    with pytest.raises(ConfigError, match="use 21 or less"):
        distribute(DataLoader(samples, batch_size=32), BatchShare(32, 32, 1, 1, 0), device=CPU, say=print)


def test_samples_dropped_from_an_iterable_are_reported() -> None:
    warnings: list[str] = []
    batches = list(torch.arange(21).split(8))
    shared = distribute(batches, BatchShare(8, 8, 1, 1, 0), device=CPU, say=warnings.append)
    assert torch.cat(list(shared)).tolist() == list(range(16))
    assert "the last 5 samples" in warnings[0]
    warnings.clear()
    shared = distribute(list(torch.arange(20).split(4)), BatchShare(8, 4, 1, 2, 0), device=CPU, say=warnings.append)
    assert len(list(shared)) == 2
    assert "the last 4 samples" in warnings[0]


def test_a_batch_that_is_too_large_is_refused() -> None:
    with pytest.raises(DataError, match=r"8 samples \(a global batch\) or 4"):
        list(distribute([torch.arange(9)], BatchShare(8, 4, 1, 2, 0), device=CPU, say=print))


def test_nested_structures_of_tensors_are_split_by_sample() -> None:
    batch = {"ids": torch.arange(8), "pair": (torch.arange(16).view(8, 2), [torch.arange(8.0)]), "name": "x"}
    (part,) = distribute([batch], BatchShare(8, 4, 1, 2, 1), device=CPU, say=print)
    assert part["ids"].tolist() == [4, 5, 6, 7]
    assert part["pair"][0].shape == (4, 2)
    assert part["pair"][1][0].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert part["name"] == "x"


def test_an_iterable_dataset_is_distributed_by_batches() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(16))

    parts = seen_by(DataLoader(Stream(), batch_size=4), total=8, micro=4, ranks=2)
    assert in_order(parts) == list(range(16))


def test_without_batch_keys_the_global_batch_is_that_of_the_loader() -> None:
    config = load_loop_config({"engine": "torch"})
    assert share(config, loader_batch=16, ranks=4, rank=1) == BatchShare(16, 4, 1, 4, 1)
    with pytest.raises(ConfigError, match="not divisible by dp 3"):
        share(config, loader_batch=16, ranks=3, rank=0)


def test_loader_batches_are_global_batches_or_micro_batches_and_others_are_refused() -> None:
    config = load_loop_config({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4})
    for size in (4, 16, None):
        assert share(config, loader_batch=size, ranks=2, rank=0).accumulation == 2
    with pytest.raises(ConfigError, match="batches have 8 samples"):
        share(config, loader_batch=8, ranks=2, rank=0)
    assert batch_size_of(DataLoader([1, 2, 3], batch_size=2)) == 2  # type: ignore[arg-type]
    assert batch_size_of([1, 2]) is None


def test_an_auto_batch_size_is_that_of_the_loader_and_auto_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_loop_config({"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "amp": {}})
    assert share(config, loader_batch=6, ranks=2, rank=0).total == 6
    assert config.gradient_clipping == 1.0
    printed = capsys.readouterr().out
    assert "gradient_clipping = 1.0" in printed
    assert "ignored: amp" in printed


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"model": {"path": "x"}}, "up to your own code"),
        ({"tensor_parallel": {"autotp_size": 2}}, r"use pipeline/train\.py"),
        ({"amp": {"enabled": True}}, "use bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "enable one of the two"),
        ({"engine": "torch", "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "engine deepspeed"),
    ],
)
def test_keys_without_a_meaning_in_a_custom_loop_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_loop_config(config)
