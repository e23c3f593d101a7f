"""Best-fit packing: nothing lost, nothing twice, bounded look-ahead, and documents kept apart."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.formats.packfile import PackFile, cut_documents
from data_prep.formats.tokenfile import TokenFile
from data_prep.packing import pack as packing
from data_prep.packing.best_fit import best_fit
from data_prep.packing.long_documents import Long, count_targets, shorten
from data_prep.packing.pack import pack
from foundation.directory import read_manifest, verify
from foundation.errors import ConfigError, DataError
from foundation.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data.documents import find_boundaries
from pipeline.data.loader import StepLoader
from pipeline.data.micro_batch import IGNORE, StepBatch
from pipeline.data.mixture import DataMixture, open_mixture
from pipeline.data.packed import PackedDataset
from pipeline.data.trained_sample import document_slices
from tests.conftest import make_tokens
from tests.evaluation.heldout import small

T, LOOK_AHEAD = 32, 40
STOPPED_AT_WORK = """
import os, signal, sys
from data_prep import __main__
from data_prep.packing import pack

run = pack._run
pack._run = lambda *given, **named: (os.kill(os.getpid(), signal.SIGSTOP), run(*given, **named))[1]
sys.exit(__main__.main())
"""
"""`python -m data_prep`, which stops itself between making room for a packing and writing it."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of 300 documents from one token to several samples long, in two sources, packed."""
    work = tmp_path_factory.mktemp("packed")
    for source in ("a", "b"):
        (work / source).mkdir()
        for i in range(150):
            (work / source / f"{i}.txt").write_text(f"{source}{i} " + "water turns the wheel. " * (i * i % 23))
    sources = [{"name": name, "type": "text", "path": str(work / name)} for name in ("a", "b")]
    made = make_tokens(work, [], sources=sources, tokenizer={"train": "bpe", "vocab_size": 300}, shard_tokens=3000)
    pack(made, length=T, look_ahead=LOOK_AHEAD)
    return made


def opened(tokens: Path, **fields: object) -> DataMixture:
    raw = {"sources": [{"path": str(tokens)}], "sequence_length": T, "packing": "best_fit", **fields}
    return open_mixture(parse(DataSection, raw), seed=5)


def plain_best_fit(lengths: list[int], size: int) -> list[int]:
    """One piece after the other, the longest first: the room that is left in each bin."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [r for r in room if r >= length]
        if fitting:
            room[room.index(min(fitting))] -= length
        else:
            room.append(size - length)
    return sorted(room)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 30), data=st.data())
def test_bins_equal_those_of_placing_pieces_one_by_one(size: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, size), max_size=60))
    number = best_fit(np.array(lengths, dtype=np.int64), size=size)
    filled = np.bincount(number, weights=lengths, minlength=0)
    assert sorted((size - filled).astype(int).tolist()) == plain_best_fit(lengths, size)
    first = list(dict.fromkeys(number.tolist()))
    assert first == sorted(first), "bins are numbered by their first pieces"


@given(lengths=st.lists(st.integers(0, 40), max_size=20), length=st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_split_documents_have_every_target_exactly_once(lengths: list[int], length: int) -> None:
    bounds = np.concatenate([[7], 7 + np.cumsum(lengths, dtype=np.int64)])
    starts, sizes = cut_documents(bounds, length=length)
    targets = [at for start, size in zip(starts, sizes, strict=True) for at in range(start + 1, start + size)]
    expected = [at for a, b in pairwise(bounds.tolist()) for at in range(a + 1, b)]
    assert targets == expected
    assert sizes.max(initial=0) <= length + 1


def test_every_target_of_every_document_is_in_one_sample(tokens: Path) -> None:
    dataset = opened(tokens).sources[0]
    spans = dataset.spans(np.arange(dataset.windows))
    found: Counter[tuple[int, int]] = Counter()
    for shard, start, length in zip(spans.shard.tolist(), spans.start.tolist(), spans.length.tolist(), strict=True):
        if shard >= 0:
            found.update((shard, at) for at in range(start + 1, start + length))
    expected = set()
    for shard, name in enumerate(s["name"] for s in dataset.manifest.details["splits"]["train"]["shards"]):
        file, at = TokenFile.open(tokens / "train" / name), 0
        for size in file.sequence_lengths.tolist():
            expected |= {(shard, token) for token in range(at + 1, at + size)}
            at += size
    assert found == Counter(expected)
    assert len({shard for shard, _ in expected}) > 3, "one shard shows little"


def test_documents_packed_together_are_within_the_look_ahead(tokens: Path) -> None:
    dataset = opened(tokens).sources[0]
    widest = 0
    for window in range(dataset.windows):
        numbers = [part.document for part in document_slices(dataset, window)]
        assert max(numbers) - min(numbers) < LOOK_AHEAD
        shard = int(dataset.locate([window])[0][0])
        assert len({(n - int(dataset.first_document[shard])) // LOOK_AHEAD for n in numbers}) == 1
        widest = max(widest, max(numbers) - min(numbers))
    assert widest > LOOK_AHEAD // 2


def test_any_number_of_workers_writes_the_same_bytes(tokens: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tokens, tmp_path / "copy")
    shutil.rmtree(copy / f"packed-{T}")
    pack(copy, length=T, look_ahead=LOOK_AHEAD, workers=2)
    files = [p.relative_to(tokens) for p in (tokens / f"packed-{T}").rglob("*") if p.is_file()]
    assert len(files) > 4
    for name in files:
        assert (copy / name).read_bytes() == (tokens / name).read_bytes(), name
    assert pack(copy, length=T, look_ahead=LOOK_AHEAD).details == pack(tokens, length=T, look_ahead=LOOK_AHEAD).details


def test_the_manifest_has_the_right_counts(tokens: Path) -> None:
    entry = read_manifest(tokens / f"packed-{T}", kind="packing").details["splits"]["train"]
    mixture = opened(tokens, mask_documents=True)
    (dataset,) = mixture.sources
    assert isinstance(dataset, PackedDataset)
    boundaries = dataset.boundaries(np.arange(dataset.windows))
    assert entry["padding"] == int((T + 1 - boundaries.used).sum()) > 0
    assert entry["targets"] == dataset.windows * T - boundaries.count_non_targets(length=T, masked=True)
    assert dataset.target_fraction == entry["targets"] / (dataset.windows * T)


def test_the_targets_of_a_packing_are_those_of_the_loss_mask(tmp_path: Path) -> None:
    plain = small.make_tokens(tmp_path / "plain")
    masked = small.make_masked(tmp_path / "masked", plain, lambda ids, _: np.arange(ids.size) % 5 == 0)
    found = pack(masked, length=T, look_ahead=LOOK_AHEAD).details["splits"]["train"]["targets"]
    source = {"path": str(masked)}
    data = parse(DataSection, {"sources": [source], "sequence_length": T, "packing": "best_fit"})
    (dataset,) = open_mixture(data, seed=1).sources
    windows = np.arange(dataset.windows)
    targets = dataset.loss_mask(windows)[:, 1:]
    dataset.boundaries(windows).clear_non_targets(targets, masked=True)
    assert found == int(targets.sum()) > 0
    assert pack(plain, length=T, look_ahead=LOOK_AHEAD).details["splits"]["train"]["targets"] > 4 * found


def conversation(tokens: int, *, prompt: int = 4, answer: int = 5) -> np.ndarray:
    """The loss mask of a conversation of turns, which ends with an answer."""
    turns = np.tile([0] * prompt + [1] * answer, -(-tokens // (prompt + answer)))
    return np.asarray(turns[-tokens:], np.uint8)


@given(
    masks=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=8),
    long=st.sampled_from(["auto", "truncate", "drop", "cut"]),
)
@settings(max_examples=150, deadline=None)
def test_a_conversation_keeps_its_prompts_and_ends_with_a_whole_answer(
    masks: list[tuple[int, int, int]], long: Long
) -> None:
    parts = [conversation(n, prompt=p, answer=a) for n, p, a in masks]
    mask, bounds = np.concatenate(parts), np.cumsum([0, *map(len, parts)])
    kept = shorten(bounds, mask, length=T, long=long)
    for i, (stays, part) in enumerate(zip(kept.tolist(), parts, strict=True)):
        text = part[1:-1].all()
        if len(part) <= T + 1 or long == "cut" or (long == "auto" and text):
            assert stays == len(part)
        elif long == "drop":
            assert stays == 0
        elif text:
            assert stays == T + 1
        else:
            ends = [n for n in range(1, T + 2) if part[n - 1] and not part[n]]
            assert stays == max(ends, default=0), i
    starts, sizes = cut_documents(bounds, tokens=kept, length=T)
    expected = sum(int(mask[a + 1 : a + n].sum()) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True))
    assert count_targets(mask, starts, sizes) == expected
    assert count_targets(None, starts, sizes) == int((sizes - 1).sum())


@pytest.mark.parametrize("frame", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_conversation_of_which_all_but_bos_and_eos_counts_is_cut_as_a_text_is(frame: tuple[int, int]) -> None:
    mask = np.array([frame[0], *[1] * (2 * T), frame[1]], np.uint8)
    bounds = np.array([0, len(mask)])
    for long, stays in (("auto", len(mask)), ("cut", len(mask)), ("truncate", T + 1), ("drop", 0)):
        assert shorten(bounds, mask, length=T, long=long).tolist() == [stays]


def test_texts_are_cut_and_conversations_truncated_unless_asked_otherwise(tmp_path: Path) -> None:
    plain = small.make_tokens(tmp_path / "plain")
    sizes = {path: TokenFile.open(path.with_suffix("")).sequence_lengths for path in (plain / "train").glob("*.bin")}
    lengths = np.concatenate([*sizes.values()])
    length = int(np.median(lengths))

    def turns(ids: np.ndarray, split: str) -> np.ndarray:
        found = [n for path, n in sizes.items() if split == "train" and n.sum() == ids.size]
        return np.concatenate([conversation(int(n)) for n in found[0]]) if found else np.ones(ids.size)

    small.make_masked(tmp_path / "masked", plain, turns)
    entry = {}
    for name, how in (("plain", "auto"), ("masked", "auto"), ("masked", "drop"), ("masked", "cut")):
        copy = shutil.copytree(tmp_path / name, tmp_path / f"{name}-{how}")
        made = pack(copy, length=length, long=how)
        entry[name, how] = made.details["splits"]["train"]
        assert ("long" in made.config) == (how != "cut" and name == "masked")
    long = int((lengths > length + 1).sum())
    assert 0 < long < lengths.size
    assert {found["long"] for found in entry.values()} == {long}
    for name, how in (("plain", "auto"), ("masked", "cut")):
        assert (entry[name, how]["cut"], entry[name, how]["lost"]) == (long, 0)
    assert entry["masked", "drop"]["pieces"] == lengths.size - long
    auto = entry["masked", "auto"]
    assert auto["pieces"] == lengths.size - auto["dropped"]
    assert auto["truncated"] + auto["dropped"] == long
    assert 0 < auto["lost"] < entry["masked", "drop"]["lost"]
    assert auto["targets"] + auto["lost"] == entry["masked", "cut"]["targets"]
    with pytest.raises(DataError, match="made from other tokens or with another config"):
        pack(tmp_path / "masked-cut", length=length)


@pytest.mark.parametrize("masked", [True, False])
def test_labels_are_the_next_tokens_of_the_same_document_and_padding_has_none(tokens: Path, masked: bool) -> None:
    mixture, batch, padded = opened(tokens), BatchSizes(6, 2, 3, 1, T), 0
    for step in range(1, 30):
        whole = StepLoader(mixture, batch, dp_rank=0, steps=(1, 30), mask_documents=masked).gather(step)
        assert whole.targets == sum(int((m.labels != IGNORE).sum()) for m in whole.micro_batches)
        samples = range((step - 1) * 6, step * 6)
        rows = [row for m in whole.micro_batches for row in zip(m.input_ids, m.labels, strict=True)]
        for sample, (ids, labels) in zip(samples, rows, strict=True):
            location = mixture.order.locate([sample])
            parts = [part.tokens for part in document_slices(mixture.sources[0], int(location.window[0]))]
            expected = [x for part in parts for x in ([*part[1:], IGNORE] if masked else part)]
            expected = expected[:-1] if masked else expected[1:]
            expected += [IGNORE] * (T - len(expected))
            assert labels.tolist() == [int(x) for x in expected]
            assert ids.tolist()[: len(np.concatenate(parts))] == np.concatenate(parts).tolist()[:T]
            padded += T + 1 - len(np.concatenate(parts))
    assert padded > 0


def test_the_document_mask_separates_packed_documents(tokens: Path) -> None:
    mixture, apart = opened(tokens), 0
    for step in range(1, 12):
        gathered = StepLoader(mixture, BatchSizes(8, 8, 1, 1, T), dp_rank=0, steps=(1, 12), mask_documents=True).gather(
            step
        )
        (micro,) = gathered.micro_batches
        for row, sample in enumerate(range((step - 1) * 8, step * 8)):
            window = int(mixture.order.locate([sample]).window[0])
            at = 0
            for number, part in enumerate(document_slices(mixture.sources[0], window)):
                mine = slice(at, min(at + len(part.tokens), T))
                size = mine.stop - mine.start
                assert micro.positions[row, mine].tolist() == list(range(size))
                assert set(micro.documents[row, mine].tolist()) <= {number}
                at += len(part.tokens)
                apart += number > 0
            if at < T:  # padding belongs to no document
                assert not set(micro.documents[row, at:].tolist()) & set(micro.documents[row, :at].tolist())
                assert (micro.labels[row, at - 1 :] == IGNORE).all()
    assert apart > 0


@pytest.mark.parametrize("masked", [False, True])
def test_every_layout_has_the_same_packed_samples(tokens: Path, masked: bool) -> None:
    mixture = opened(tokens)

    def gathered(batch: BatchSizes, rank: int, **piece: int) -> StepBatch:
        return StepLoader(mixture, batch, dp_rank=rank, steps=(2, 2), mask_documents=masked, **piece).gather(2)

    whole = gathered(BatchSizes(8, 8, 1, 1, T), 0)
    for dp, micro, accumulation in ((2, 2, 2), (8, 1, 1), (3, 1, 3)):
        ranks = [gathered(BatchSizes(8, micro, accumulation, dp, T), rank) for rank in range(dp)]
        assert {rank.targets for rank in ranks} == {whole.targets}
        for field in ("input_ids", "labels", "positions", "documents"):
            expected = getattr(whole.micro_batches[0], field)
            of_all = zip(*([getattr(m, field) for m in rank.micro_batches] for rank in ranks), strict=True)
            parts = [part for each in of_all for part in each]
            if expected is not None:
                assert torch.equal(torch.cat(parts)[:8], expected), (dp, field)
    halves = [gathered(BatchSizes(8, 8, 1, 1, T), 0, cp=2, cp_rank=rank).micro_batches[0] for rank in range(2)]
    for field in ("input_ids", "labels"):
        joined = torch.cat([getattr(half, field) for half in halves], 1)
        assert torch.equal(joined, getattr(whole.micro_batches[0], field))


def test_a_named_source_is_packed_on_its_own(tokens: Path) -> None:
    whole = opened(tokens).sources[0].windows
    parts = [opened(tokens, sources=[{"path": str(tokens), "source": name}]).sources[0].windows for name in ("a", "b")]
    assert sum(parts) == whole


def test_the_tokens_keep_their_fingerprint_and_the_packing_has_its_own(tokens: Path) -> None:
    plain = opened(tokens, packing="contiguous").parents
    packed = opened(tokens).parents
    assert packed["data.sources.0"] == plain["data.sources.0"]
    assert set(packed) - set(plain) == {"data.sources.0.packing"}


def test_a_missing_packing_or_one_of_other_tokens_is_refused(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"headrace prep pack .* --length 16"):
        opened(tokens, sequence_length=16)
    other = shutil.copytree(tokens, tmp_path / "other")
    path = other / "manifest.json"
    fingerprint = read_manifest(tokens, kind="tokens").fingerprint
    text = "".join(line for line in path.read_text().splitlines(True) if '"checksum"' not in line)
    path.write_text(text.replace(fingerprint, "0" * 64))
    with pytest.raises(DataError, match="was made from other tokens"):
        opened(other)
    shutil.copyfile(tokens / "manifest.json", path)
    bins = next((other / f"packed-{T}").rglob("*.bins"))
    bins.write_bytes(bins.read_bytes()[:-4])
    with pytest.raises(DataError, match=rf"{bins.name} has \d+ bytes"):
        opened(other)
    with pytest.raises(DataError, match="damaged"):
        PackFile.open(bins)
    with pytest.raises(DataError, match="exists, and was made"):
        pack(tokens, length=T, look_ahead=LOOK_AHEAD + 1)


def packing_process(directory: Path, *start: str) -> subprocess.Popen[str]:
    command = [sys.executable, *start, "pack", str(directory), "--length", str(T), "--workers", "1"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def unpacked(tokens: Path, work: Path) -> Path:
    return shutil.copytree(tokens, work / "unpacked", ignore=shutil.ignore_patterns("packed-*"))


def assert_whole(directory: Path) -> None:
    packed = directory / f"packed-{T}"
    names = {path.stem for path in (directory / "train").glob("*.bin")}
    manifest = read_manifest(packed, kind="packing")
    assert {Path(name).stem for name in manifest.files} == names
    assert all(good for _, good in verify(packed, manifest))
    assert not list(directory.glob(".packed-*")), "neither staging nor lock are left"


def test_packing_is_refused_while_another_process_packs_the_same_tokens(tokens: Path, tmp_path: Path) -> None:
    directory = unpacked(tokens, tmp_path)
    first = packing_process(directory, "-c", STOPPED_AT_WORK)
    try:
        assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1]), first.communicate()[1]
        second = packing_process(directory, "-m", "data_prep")
        _, output = second.communicate(timeout=300)
        assert second.returncode == 2, output
        assert "another process is packing" in output
        assert "try: wait" in output
    finally:
        first.send_signal(signal.SIGCONT)
    _, output = first.communicate(timeout=300)
    assert first.returncode == 0, output
    assert_whole(directory)


def test_processes_that_pack_concurrently_leave_a_whole_packing_and_no_traceback(tokens: Path, tmp_path: Path) -> None:
    directory = unpacked(tokens, tmp_path)
    racing = [packing_process(directory, "-m", "data_prep") for _ in range(3)]
    output = [process.communicate(timeout=300)[1] for process in racing]
    codes = {process.returncode for process in racing}
    assert {0} <= codes <= {0, 2}, output
    assert "Traceback" not in "".join(output)
    assert_whole(directory)


def test_a_file_that_disappears_is_reported(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = packing._run

    def losing(tasks: list[packing.PackTask], *, workers: int) -> object:
        done = run(tasks, workers=workers)
        Path(f"{tasks[-1].target}.bins").unlink()
        return done

    monkeypatch.setattr(packing, "_run", losing)
    with pytest.raises(DataError, match=r"\.bins was written and is not there"):
        pack(unpacked(tokens, tmp_path), length=T)


def test_packing_a_megatron_dataset_is_refused(tokens: Path) -> None:
    source = {"path": str(tokens / "train/shard-00000"), "tokenizer": str(tokens / "tokenizer")}
    with pytest.raises(ConfigError, match=r"data\.packing"):
        opened(tokens, sources=[source])


def test_boundaries_of_contiguous_windows_have_no_padding(tokens: Path) -> None:
    file = TokenFile.open(tokens / "train/shard-00000")
    assert find_boundaries(file, np.array([0]), length=T).used is None
