"""Fill-in-the-middle: it can be undone, is the same in every layout, and boundaries follow."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.packing.pack import pack
from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data.loader import StepLoader
from pipeline.data.micro_batch import IGNORE, StepBatch
from pipeline.data.mixture import DataMixture, open_mixture
from pipeline.data.trained_sample import trained_documents
from tests.conftest import make_tokens

T, SAMPLES = 64, 6
TOKENS = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
BEGIN = "<|begin|>"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of 200 documents, a few to a sample, packed."""
    work = tmp_path_factory.mktemp("fim")
    (work / "text").mkdir()
    for i in range(200):
        (work / "text" / f"{i}.txt").write_text(f"mill {i} " + "water turns the wheel. " * (i % 9))
    tokenizer = {"train": "bpe", "vocab_size": 300, "special_tokens": [*TOKENS, BEGIN]}
    made = make_tokens(work, [work / "text"], tokenizer=tokenizer)
    pack(made, length=T)
    return made


def opened(tokens: Path, *, packing: str = "contiguous", **fim: float | str) -> DataMixture:
    data = {"sources": [{"path": str(tokens)}], "sequence_length": T, "packing": packing, "fim": fim}
    return open_mixture(parse(DataSection, data), seed=5)


def gathered(
    mixture: DataMixture, batch: BatchSizes, *, rank: int = 0, step: int = 2, masked: bool = True
) -> StepBatch:
    return StepLoader(mixture, batch, dp_rank=rank, steps=(1, 99), mask_documents=masked).gather(step)


def taken_back(part: list[int], mixture: DataMixture) -> tuple[str, list[int]]:
    """How a part was changed, and what it was."""
    fim = mixture.fim
    if part[0] != fim.prefix:
        return "plain", part
    end = [part[-1]] if part[-1] == fim.eos else []
    suffix, middle = part.index(fim.suffix), part.index(fim.middle)
    body = part[: len(part) - len(end)]
    kind = "spm or psm without a prefix" if suffix == 1 else "psm"
    return kind, body[1:suffix] + body[middle + 1 :] + body[suffix + 1 : middle] + end


@pytest.mark.parametrize("packing", ["contiguous", "best_fit"])
def test_undoing_fim_gives_every_document_its_tokens_back(tokens: Path, packing: str) -> None:
    mixture, kinds = opened(tokens, packing=packing, rate=0.6), []
    for step in range(1, 25):
        (micro,) = gathered(mixture, BatchSizes(SAMPLES, SAMPLES, 1, 1, T), step=step).micro_batches
        samples = np.arange((step - 1) * SAMPLES, step * SAMPLES)
        rows, boundaries = mixture.read(samples), mixture.boundaries(samples)
        for i in range(SAMPLES):
            used = T + 1 if boundaries.used is None else int(boundaries.used[i])
            before = np.split(rows[i, :used], np.sort(boundaries.at[boundaries.sample == i]))
            documents = micro.documents[i].numpy()
            after = np.split(micro.input_ids[i].numpy(), np.flatnonzero(np.diff(documents)) + 1)
            for was, now in zip(before, after[:-1], strict=False):  # the last may be cut off
                kind, ids = taken_back(now.tolist(), mixture)
                kinds.append(kind)
                if kind in ("plain", "psm"):
                    assert ids == was.tolist()
                else:  # suffix, then prefix and middle
                    assert sorted(ids) == sorted(was.tolist())
    shares = {kind: kinds.count(kind) / len(kinds) for kind in kinds}
    assert 0.25 < shares["plain"] < 0.55, "0.4 are left as they are, and those that are too short"
    assert min(shares["psm"], shares["spm or psm without a prefix"]) > 0.15


def test_psm_and_spm_have_the_order_of_the_paper(tokens: Path) -> None:
    for spm_rate in (0.0, 1.0):
        fim = opened(tokens, spm_rate=spm_rate).fim
        piece = np.arange(10, 20)
        moved = fim._rearranged(piece, (1 << 60, 3 << 60), spm=bool(spm_rate)).tolist()
        low, high = 11 // 4, 33 // 4
        prefix, middle, suffix = (piece[a:b].tolist() for a, b in ((0, low), (low, high), (high, 10)))
        psm = [fim.prefix, *prefix, fim.suffix, *suffix, fim.middle, *middle]
        spm = [fim.prefix, fim.suffix, *suffix, fim.middle, *prefix, *middle]
        assert moved == (spm if spm_rate else psm)


@pytest.mark.parametrize("spm", [False, True])
def test_the_bos_token_stays_in_front_of_the_fim_tokens(tokens: Path, spm: bool) -> None:
    known = opened(tokens).fim
    assert known is not None
    fim = replace(known, bos=7, eos=8)
    for piece in ([7, *range(10, 20), 8], [7, 10, 8], [7, 10, 11]):
        for drawn in ((0, 0), (0, 1 << 61), (1 << 60, 3 << 60), ((1 << 62) - 1, 0)):
            moved = fim._rearranged(np.array(piece), drawn, spm=spm).tolist()
            assert moved[:2] == [7, fim.prefix]
            assert (moved[-1] == 8) == (piece[-1] == 8)
            assert len(moved) == len(piece) + 3
            assert sorted(moved) == sorted([*piece, fim.prefix, fim.middle, fim.suffix])
    # a piece that continues a document has no such token
    assert fim._rearranged(np.arange(10, 20), (0, 1 << 60), spm=spm)[0] == fim.prefix


def test_documents_with_a_bos_token_still_begin_with_it_after_fim(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(60):
        (tmp_path / "text" / f"{i}.txt").write_text(f"mill {i} " + "water turns the wheel. " * (i % 9))
    folder = Path(shutil.copytree(tokens / "tokenizer", tmp_path / "tokenizer"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": BEGIN}))
    made = make_tokens(tmp_path, [tmp_path / "text"], tokenizer={"path": str(folder)}, prepend_bos=True)
    mixture = opened(made, rate=1.0)
    bos, samples = mixture.fim.bos, np.arange(20)
    rows, boundaries = mixture.read(samples), mixture.boundaries(samples)
    assert bos is not None
    assert (rows[boundaries.sample, boundaries.at] == bos).all()
    after, moved = mixture.fim.boundaries(boundaries, samples), mixture.fim.rows(rows, boundaries, samples)
    assert after.at.size > 20
    assert (moved[after.sample, after.at] == bos).all()


@pytest.mark.parametrize("packing", ["contiguous", "best_fit"])
@pytest.mark.parametrize("masked", [True, False])
def test_fim_gives_the_same_samples_and_targets_in_every_layout(tokens: Path, packing: str, masked: bool) -> None:
    mixture = opened(tokens, packing=packing)
    whole = gathered(mixture, BatchSizes(8, 8, 1, 1, T), masked=masked)
    assert whole.targets == sum(int((m.labels != IGNORE).sum()) for m in whole.micro_batches)
    for dp, micro, accumulation in ((2, 2, 2), (8, 1, 1), (3, 1, 3)):
        batch = BatchSizes(8, micro, accumulation, dp, T)
        ranks = [gathered(mixture, batch, rank=rank, masked=masked) for rank in range(dp)]
        assert {rank.targets for rank in ranks} == {whole.targets}
        for field in ("input_ids", "labels", "positions", "documents"):
            expected = getattr(whole.micro_batches[0], field)
            of_all = zip(*([getattr(m, field) for m in rank.micro_batches] for rank in ranks), strict=True)
            if expected is not None:
                assert torch.equal(torch.cat([part for each in of_all for part in each])[:8], expected), (dp, field)


@pytest.mark.parametrize("packing", ["contiguous", "best_fit"])
@pytest.mark.parametrize("masked", [True, False])
def test_what_is_shown_of_a_sample_is_what_the_loader_trains_on(tokens: Path, packing: str, masked: bool) -> None:
    mixture = opened(tokens, packing=packing, rate=0.6)
    batch = BatchSizes(SAMPLES, SAMPLES, 1, 1, T)
    (micro,) = gathered(mixture, batch, masked=masked).micro_batches
    rearranged = 0
    for row, number in enumerate(range(SAMPLES, 2 * SAMPLES)):
        parts = list(trained_documents(mixture, number, mask_documents=masked))
        shown, targets = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "targets"))
        assert shown[:-1].tolist() == micro.input_ids[row, : shown.size - 1].tolist()
        assert targets[1:].tolist() == (micro.labels[row, : shown.size - 1] != IGNORE).tolist()
        rearranged += sum(part.rearranged for part in parts)
    assert rearranged > 0


def test_another_seed_selects_other_documents(tokens: Path) -> None:
    data = {"sources": [{"path": str(tokens)}], "sequence_length": T, "fim": {}}
    one, two = (open_mixture(parse(DataSection, data), seed=seed).fim for seed in (1, 2))
    assert one is not None
    assert two is not None
    samples = np.arange(50)
    rows, boundaries = opened(tokens).read(samples), opened(tokens).boundaries(samples)
    assert not np.array_equal(one.rows(rows, boundaries, samples), two.rows(rows, boundaries, samples))
    assert np.array_equal(one.rows(rows, boundaries, samples), one.rows(rows, boundaries, samples))


def test_a_fim_token_that_the_tokenizer_lacks_is_refused(tokens: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.fim\.middle = '<MID>'"):
        opened(tokens, middle="<MID>")
