"""`python -m pipeline samples`: the text that comes out is the text that went in."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data_prep.formats.tokenfile import TokenFile, shard_prefix
from pipeline.data.dataset import TokenDataset
from pipeline.data.document_slices import document_slices
from pipeline.data.mixture import DataMixture
from tests import warm
from tests.conftest import launch, tiny_config, write_config

HEADER = re.compile(r"^== sample (\d+)(?:, step (\d+))?", re.MULTILINE)
DOCUMENT = re.compile(r"^-- document (\d+), tokens (\d+) to (\d+) of (\d+)$", re.MULTILINE)
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def work(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 20 steps, 8 samples each."""
    work = tmp_path_factory.mktemp("samples")
    config = write_config(work / "c.json", tiny_config(tokens, work / "run", engine="torch"))
    launch("train.py", config, "zero_optimization.stage=0", "evaluation.samples=4")
    return work


def samples(work: Path, *words: object) -> str:
    """What the command prints."""
    done = warm.run("-m", "pipeline", "samples", work / "run", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(work: Path, *words: object) -> str:
    """What it says when it refuses."""
    done = warm.run("-m", "pipeline", "samples", work / "run", *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


def test_every_document_of_a_step_is_a_piece_of_the_corpus(work: Path) -> None:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [p for folder in ("json", "email") for kind in ("py", "rst") for p in (stdlib / folder).rglob(f"*.{kind}")]
    corpus = [path.read_text() for path in files]
    said = samples(work, "--step", 3)
    assert [int(number) for number, _ in HEADER.findall(said)] == list(range(16, 24))
    assert {step for _, step in HEADER.findall(said)} == {"3"}
    pieces = [part for part in re.split(r"^(?:==|--) .*\n", said, flags=re.MULTILINE) if part]
    assert len(pieces) >= 8
    for piece in pieces:
        # a line of its own ends a text; tokens may cut a character in two
        text = piece.removesuffix("\n").removesuffix(END).strip("\ufffd")
        assert any(text in document for document in corpus), text


def test_the_tokens_of_the_passages_are_those_that_were_trained_on(tokens: Path) -> None:
    dataset = TokenDataset.open(tokens, split="train", sequence_length=300)
    blend = DataMixture([dataset], weights=[1.0], seed=7)
    for number in range(40):
        window = int(blend.order.locate([number]).window[0])
        shard = int(dataset.locate([window])[0][0])
        file = TokenFile.open(shard_prefix(tokens, "train", shard))
        parts = list(document_slices(dataset, window))
        assert np.array_equal(np.concatenate([part.tokens for part in parts]), blend.read([number])[0])
        for part in parts:
            sequence = int(file.document_index[part.document - int(dataset.first_document[shard])])
            begin = int(file.byte_offsets[sequence]) // file.dtype.itemsize + part.first
            assert np.array_equal(file.tokens[begin : begin + len(part.tokens)], part.tokens)
            assert part.length == int(file.sequence_lengths[sequence])
        assert all(a.document < b.document for a, b in pairwise(parts))
        assert all(part.first == 0 for part in parts[1:])


def test_ranges_limits_and_sample_numbers(work: Path) -> None:
    said = samples(work, "--step", "2:3", "--limit", 9)
    assert [int(step) for _, step in HEADER.findall(said)] == [2] * 8 + [3]
    assert [int(number) for number, _ in HEADER.findall(samples(work, "--sample", "17:18"))] == [17, 18]
    one = samples(work, "--sample", 16).splitlines()[1:]
    assert one == samples(work, "--step", 3, "--limit", 1).splitlines()[1:]


def test_in_rank_order_the_samples_of_a_rank_stand_together(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work / "run", tmp_path / "run")
    row = {"kind": "event", "step": 0, "event": "resumed", "world_size": 2}
    with (tmp_path / "run/metrics.jsonl").open("a") as journal:
        journal.write(json.dumps(row) + "\n")
    said = samples(tmp_path, "--step", 1, "--rank-order")  # 2 per micro-batch, 2 of them, on 2 ranks
    assert [int(number) for number, _ in HEADER.findall(said)] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert said.count("(data rank 1, micro-batch 1)") == 2


def test_data_that_was_passed_over_is_counted(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work / "run", tmp_path / "run")
    row = {"kind": "event", "step": 10, "event": "rollback", "skips": [[11, 3]]}
    with (tmp_path / "run/metrics.jsonl").open("a") as journal:
        journal.write(json.dumps(row) + "\n")
    assert HEADER.findall(samples(tmp_path, "--step", 10, "--limit", 1)) == [("72", "10")]
    assert HEADER.findall(samples(tmp_path, "--step", 11, "--limit", 1)) == [("104", "11")]


def test_what_cannot_be_shown_is_refused_with_the_reason(work: Path, tokens: Path, tmp_path: Path) -> None:
    assert "the run has steps 1 to 20, not 21 to 21" in refused(work, "--step", 21)
    assert "no such directory" in refused(tmp_path, "--step", 1)
    assert "neither a number nor FIRST:LAST" in refused(work, "--step", "x")
    shutil.copytree(work / "run", tmp_path / "run")
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    manifest["parents"]["data.sources.0"]["fingerprint"] = "0" * 64
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    assert f"{tokens} is not what the run was trained on" in refused(tmp_path, "--step", 1)
