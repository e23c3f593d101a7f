"""The loader: every layout sees the same samples in the same step, resumed or not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundation.errors import ConfigError, DataError
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection, SourceSection
from pipeline.config.shares import Shares
from pipeline.data.dataset import TokenDataset, choose_windows
from pipeline.data.divided import CurrentBatch, DividedSteps
from pipeline.data.loader import StepLoader, heldout_batches
from pipeline.data.micro_batch import IGNORE, StepBatch
from pipeline.data.mixture import DataMixture, open_mixture
from tests.conftest import make_tokens

T = 32
EVEN, UNEVEN = Shares(((2,), (2,))), Shares(((3,), (1,)))


def mixture_of(*paths: Path) -> DataMixture:
    section = DataSection(sources=tuple(SourceSection(path=str(p)) for p in paths), sequence_length=T)
    return open_mixture(section, seed=5)


def some(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def step_of(mixture: DataMixture, *, dp: int, micro: int, step: int) -> torch.Tensor:
    """All samples of a step in global order, put together from what each rank sees: int64 [samples, T + 1]."""
    batch = BatchSizes(24, micro, 24 // (dp * micro), dp, T)
    ranks = [StepLoader(mixture, batch, dp_rank=r, steps=(step, step)).gather(step).micro_batches for r in range(dp)]
    rows = [torch.cat([m.input_ids, m.labels[:, -1:]], 1) for per_micro in zip(*ranks, strict=True) for m in per_micro]
    return torch.cat(rows)


def test_a_step_has_the_same_samples_in_every_layout(tokens: Path) -> None:
    mixture = mixture_of(tokens)
    expected = torch.from_numpy(mixture.read(np.arange(48, 72)))
    for dp, micro in ((1, 24), (1, 1), (2, 3), (3, 8), (4, 2), (24, 1)):
        assert torch.equal(step_of(mixture, dp=dp, micro=micro, step=3), expected), (dp, micro)


def test_a_loader_that_starts_at_a_later_step_continues_the_same_order(tokens: Path) -> None:
    mixture, batch = mixture_of(tokens), BatchSizes(4, 2, 2, 1, T)
    whole = list(StepLoader(mixture, batch, dp_rank=0, steps=(1, 9)))
    late = list(StepLoader(mixture, batch, dp_rank=0, steps=(6, 9)))
    assert [s.step for s in late] == [6, 7, 8, 9]
    for a, b in zip(whole[5:], late, strict=True):
        assert all(torch.equal(x.input_ids, y.input_ids) for x, y in zip(a.micro_batches, b.micro_batches, strict=True))


def test_labels_are_the_next_tokens(tokens: Path) -> None:
    micro = (
        StepLoader(mixture_of(tokens), BatchSizes(2, 2, 1, 1, T), dp_rank=0, steps=(1, 1)).gather(1).micro_batches[0]
    )
    assert torch.equal(micro.input_ids[:, 1:], micro.labels[:, :-1])
    assert micro.input_ids.shape == micro.labels.shape == (2, T)


def test_an_error_in_the_prefetch_thread_is_raised_in_the_loop(tokens: Path) -> None:
    mixture = mixture_of(tokens)
    mixture.sources[0].rows = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        next(iter(StepLoader(mixture, BatchSizes(2, 2, 1, 1, T), dp_rank=0, steps=(1, 3))))


def test_windows_cover_a_split_in_order_and_share_one_token(tokens: Path) -> None:
    dataset = TokenDataset.open(tokens, split="train", sequence_length=T)
    rows, at = dataset.read(np.arange(dataset.windows)), 0
    for path in sorted((tokens / "train").glob("*.bin")):
        raw = np.fromfile(path, dtype=np.uint16)
        own = rows[at : at + (len(raw) - 1) // T]
        assert np.array_equal(own[:, :-1].ravel(), raw[: len(own) * T])
        assert np.array_equal(own[:-1, -1], own[1:, 0])
        at += len(own)
    assert at == dataset.windows


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_held_out_batches_have_every_target_once_in_every_layout(tokens: Path, dp: int) -> None:
    dataset = TokenDataset.open(tokens, split="heldout", sequence_length=T)
    ranks = [list(heldout_batches(dataset, batch_size=4, dp=dp, dp_rank=r, samples=21)) for r in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = [b.labels[b.labels != IGNORE] for batches in ranks for b in batches]
    assert sum(map(len, counted)) == 21 * T
    assert sum(int(c.sum()) for c in counted) == int(dataset.read(choose_windows(dataset.windows, 21))[:, 1:].sum())


def test_a_truncated_token_file_is_refused_and_named(tokens: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tokens, tmp_path / "copy")
    path = copy / "train/shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"shard-00000\.bin has \d+ bytes, the manifest says \d+"):
        TokenDataset.open(copy, split="train", sequence_length=T)


def test_a_missing_split_or_directory_is_refused(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no split 'valid'; it has"):
        TokenDataset.open(tokens, split="valid", sequence_length=T)
    with pytest.raises(DataError, match="headrace prep"):
        TokenDataset.open(tmp_path / "nowhere", split="train", sequence_length=T)
    with pytest.raises(DataError, match="no shard holds a sample"):
        TokenDataset.open(tokens, split="train", sequence_length=10**7)


def test_a_mixture_of_datasets_with_different_tokenizers_is_refused(tokens: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text(f"water wheel number {i} turns and turns " * 40)
    other = make_tokens(tmp_path, [text], tokenizer={"train": "bpe", "vocab_size": 300})
    with pytest.raises(ConfigError, match=r"data\.sources\.1\.path"):
        mixture_of(tokens, other)


def test_the_parts_of_context_parallel_ranks_make_up_the_sequence(tokens: Path) -> None:
    mixture, batch = mixture_of(tokens), BatchSizes(8, 2, 2, 2, T)
    for masked in (False, True):
        make = partial(StepLoader, mixture, batch, dp_rank=1, steps=(1, 9), mask_documents=masked)
        whole = make().gather(4)
        pieces = [make(cp=4, cp_rank=rank).gather(4) for rank in range(4)]
        assert {piece.targets for piece in pieces} == {whole.targets}
        for number, micro in enumerate(whole.micro_batches):
            parts = [piece.micro_batches[number] for piece in pieces]
            assert torch.equal(micro.input_ids, torch.cat([p.input_ids for p in parts], 1))
            assert torch.equal(micro.labels, torch.cat([p.labels for p in parts], 1))
            if masked:
                assert torch.equal(some(micro.positions), torch.cat([some(p.positions) for p in parts], 1))
                assert all(torch.equal(some(micro.documents), some(p.documents)) for p in parts)


@pytest.mark.parametrize("masked", [False, True])
def test_the_zigzag_parts_of_ranks_are_columns_of_the_sequence(tokens: Path, masked: bool) -> None:
    mixture, batch = mixture_of(tokens), BatchSizes(8, 2, 2, 2, T)
    make = partial(StepLoader, mixture, batch, dp_rank=1, steps=(1, 9), mask_documents=masked)
    for step in (4, 7):
        whole = make().gather(step)
        for rank in range(2):
            piece, quarter = make(cp=2, cp_rank=rank, zigzag=True).gather(step), T // 4
            columns = [*range(rank * quarter, (rank + 1) * quarter), *range((3 - rank) * quarter, (4 - rank) * quarter)]
            assert piece.targets == whole.targets
            for micro, part in zip(whole.micro_batches, piece.micro_batches, strict=True):
                for field in ("input_ids", "labels", *(("positions",) if masked else ())):
                    assert torch.equal(getattr(micro, field)[:, columns], getattr(part, field)), field
                assert not masked or torch.equal(some(micro.documents), some(part.documents))


def test_held_out_parts_of_context_parallel_ranks_make_up_the_split(tokens: Path) -> None:
    dataset = TokenDataset.open(tokens, split="heldout", sequence_length=T)
    make = partial(heldout_batches, dataset, batch_size=1, dp=2, dp_rank=1, samples=21, mask_documents=True)
    for whole, *parts in zip(make(), *(make(cp=2, cp_rank=rank) for rank in range(2)), strict=True):
        assert torch.equal(whole.input_ids, torch.cat([p.input_ids for p in parts], 1))
        assert torch.equal(whole.labels, torch.cat([p.labels for p in parts], 1))
        assert whole.input_ids.min() >= 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dp", "micro", "accumulation"), [(3, 2, 2), (5, 1, 2), (11, 1, 1), (3, 3, 1)])
def test_uneven_ranks_see_each_sample_once(tokens: Path, dp: int, micro: int, accumulation: int, masked: bool) -> None:
    mixture, whole, cut = mixture_of(tokens), BatchSizes(8, 8, 1, 1, T), BatchSizes(8, micro, accumulation, dp, T)

    def gathered(batch: BatchSizes, rank: int) -> StepBatch:
        return StepLoader(mixture, batch, dp_rank=rank, steps=(3, 3), mask_documents=masked).gather(3)

    expected, ranks = gathered(whole, 0), [gathered(cut, rank) for rank in range(dp)]
    assert {rank.targets for rank in ranks} == {expected.targets}
    assert {len(rank.micro_batches) for rank in ranks} == {accumulation}
    for field in ("input_ids", "labels", "positions", "documents"):
        of_all = zip(*([getattr(micro, field) for micro in rank.micro_batches] for rank in ranks), strict=True)
        parts = [part for each in of_all for part in each]
        if parts[0] is None:
            continue
        assert {part.shape for part in parts} == {(micro, T)}
        rows = torch.cat(parts)
        assert torch.equal(rows[:8], some(getattr(expected.micro_batches[0], field))), field
        assert rows.min() >= (IGNORE if field == "labels" else 0)
        assert field != "labels" or bool((rows[8:] == IGNORE).all())


@pytest.mark.parametrize("masked", [False, True])
def test_padding_rows_are_the_last_sample_again_with_its_documents_and_without_targets(
    tokens: Path, masked: bool
) -> None:
    """So that attention has no logit that only this layout has."""
    batch = BatchSizes(5, 2, 1, 4, T)  # the third rank has a sample and padding, the fourth padding alone
    ranks = [
        StepLoader(mixture_of(tokens), batch, dp_rank=rank, steps=(1, 1), mask_documents=masked).gather(1)
        for rank in range(4)
    ]
    rows = [micro for step in ranks for micro in step.micro_batches]
    last = rows[2]
    for padding, row in ((rows[2], 1), (rows[3], 0), (rows[3], 1)):
        assert torch.equal(padding.input_ids[row], last.input_ids[0])
        assert (padding.labels[row] == IGNORE).all()
        if masked:
            assert torch.equal(some(padding.documents)[row].diff(), some(last.documents)[0].diff())
            assert torch.equal(some(padding.positions)[row], some(last.positions)[0])
    assert (last.labels[0] != IGNORE).any()


def test_new_shares_hold_from_the_next_step_on_and_in_the_next_round() -> None:
    def load(sizes: BatchSizes, steps: tuple[int, int]) -> Any:
        for step in range(steps[0], steps[1] + 1):
            yield step, sizes.shares.counts

    current = CurrentBatch(BatchSizes(4, 3, 1, 2, 8, (), EVEN))
    rounds: Iterator[Any] = (each for part in ((1, 3), (7, 8)) for each in DividedSteps(load, current, steps=part))
    found = []
    for step, counts in rounds:
        found.append((step, counts))
        if step == 2:
            current.sizes = current.sizes.with_shares(UNEVEN)
    assert found == [(1, (2, 2)), (2, (2, 2)), (3, (3, 1)), (7, (3, 1)), (8, (3, 1))]
