"""`python -m pipeline samples` prints the text of the corpus that a step was trained on."""

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
from pipeline.data.mixture import DataMixture
from pipeline.data.trained_sample import document_slices
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.support import output_of, refusal_of

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


def samples(work: Path, *arguments: object) -> str:
    return output_of(warm.run("-m", "pipeline", "samples", work / "run", *arguments))


def refused(work: Path, *arguments: object) -> str:
    said = refusal_of(warm.run("-m", "pipeline", "samples", work / "run", *arguments))
    assert "Traceback" not in said
    return said


def test_every_document_of_a_step_is_text_of_the_corpus(work: Path) -> None:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [p for folder in ("json", "email") for kind in ("py", "rst") for p in (stdlib / folder).rglob(f"*.{kind}")]
    corpus = [path.read_text() for path in files]
    output = samples(work, "--step", 3)
    assert [int(number) for number, _ in HEADER.findall(output)] == list(range(16, 24))
    assert {step for _, step in HEADER.findall(output)} == {"3"}
    texts = [part for part in re.split(r"^(?:==|--) .*\n", output, flags=re.MULTILINE) if part]
    assert len(texts) >= 8
    for printed in texts:
        # a newline follows each text; token boundaries may split a character
        text = printed.removesuffix("\n").removesuffix(END).strip("\ufffd")
        assert any(text in document for document in corpus), text


def test_the_tokens_of_the_passages_are_those_of_the_training_samples(tokens: Path) -> None:
    dataset = TokenDataset.open(tokens, split="train", sequence_length=300)
    mixture = DataMixture([dataset], weights=[1.0], seed=7)
    for number in range(40):
        window = int(mixture.order.locate([number]).window[0])
        shard = int(dataset.locate([window])[0][0])
        file = TokenFile.open(shard_prefix(tokens, "train", shard))
        parts = list(document_slices(dataset, window))
        assert np.array_equal(np.concatenate([part.tokens for part in parts]), mixture.read([number])[0])
        for part in parts:
            sequence = int(file.document_index[part.document - int(dataset.first_document[shard])])
            begin = int(file.byte_offsets[sequence]) // file.dtype.itemsize + part.first
            assert np.array_equal(file.tokens[begin : begin + len(part.tokens)], part.tokens)
            assert part.length == int(file.sequence_lengths[sequence])
        assert all(a.document < b.document for a, b in pairwise(parts))
        assert all(part.first == 0 for part in parts[1:])


def test_step_ranges_limits_and_sample_numbers_select_samples(work: Path) -> None:
    output = samples(work, "--step", "2:3", "--limit", 9)
    assert [int(step) for _, step in HEADER.findall(output)] == [2] * 8 + [3]
    assert [int(number) for number, _ in HEADER.findall(samples(work, "--sample", "17:18"))] == [17, 18]
    one = samples(work, "--sample", 16).splitlines()[1:]
    assert one == samples(work, "--step", 3, "--limit", 1).splitlines()[1:]


def test_rank_order_sorts_the_samples_by_rank_and_micro_batch(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work / "run", tmp_path / "run")
    row = {"kind": "event", "step": 0, "event": "resumed", "world_size": 2}
    with (tmp_path / "run/metrics.jsonl").open("a") as journal:
        journal.write(json.dumps(row) + "\n")
    output = samples(tmp_path, "--step", 1, "--rank-order")  # 2 per micro-batch, 2 of them, on 2 ranks
    assert [int(number) for number, _ in HEADER.findall(output)] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert output.count("(data rank 1, micro-batch 1)") == 2


def test_the_samples_after_a_rollback_account_for_skipped_data(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work / "run", tmp_path / "run")
    row = {"kind": "event", "step": 10, "event": "rollback", "skips": [[11, 3]]}
    with (tmp_path / "run/metrics.jsonl").open("a") as journal:
        journal.write(json.dumps(row) + "\n")
    assert HEADER.findall(samples(tmp_path, "--step", 10, "--limit", 1)) == [("72", "10")]
    assert HEADER.findall(samples(tmp_path, "--step", 11, "--limit", 1)) == [("104", "11")]


def test_colors_mark_the_tokens_in_the_loss(work: Path) -> None:
    plain, colored = samples(work, "--step", 3), samples(work, "--step", 3, "--color", "always")
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d*m", "", colored) == plain
    for line in re.findall(r"^-- .*\n(.*)", colored, flags=re.MULTILINE)[::3]:
        assert line.startswith(("\x1b[2m", "\x1b[32m"))


def test_invalid_requests_are_refused_with_the_reason(work: Path, tokens: Path, tmp_path: Path) -> None:
    assert "the run has steps 1 to 20, not 21 to 21" in refused(work, "--step", 21)
    assert "no such directory" in refused(tmp_path, "--step", 1)
    assert "neither a number nor FIRST:LAST" in refused(work, "--step", "x")
    shutil.copytree(work / "run", tmp_path / "run")
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    manifest["parents"]["data.sources.0"]["fingerprint"] = "0" * 64
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    assert f"{tokens} is not the data the run was trained on" in refused(tmp_path, "--step", 1)
