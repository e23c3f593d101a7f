"""Stored tokenizers: taken for equal training texts and settings, with the bytes of a training."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from data_prep.config.corpus import TokenizerSection
from data_prep.tokenizer import store, train
from data_prep.tokenizer.store import TokenizerStore, train_or_reuse, training_key
from tests.data_prep.conftest import config_file, text_folder, tree
from tests.data_prep.in_process import run_job

KINDS = ("bpe", "sentencepiece-unigram", "sentencepiece-bpe")
TEXTS = [f"def mill_{i}(wheel):\r\n    return wheel * {i}  # la roue\0 n° {i}\n" * 2 for i in range(150)]
STORE = ".headrace-tokenizers"


def section(**fields: Any) -> TokenizerSection:
    return TokenizerSection.model_validate({"train": "bpe", "vocab_size": 400} | fields)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an entry for each training."""
    found: list[str] = []
    original = train.train

    def counted(texts: Any, folder: Path, of: TokenizerSection) -> None:
        found.append(str(of.train))
        original(texts, folder, of)

    monkeypatch.setattr(train, "train", counted)
    return found


def made(root: Path, kept: TokenizerStore, of: TokenizerSection, texts: list[str] = TEXTS) -> tuple[Path, list[str]]:
    root.mkdir(exist_ok=True)
    folder = root / f"folder-{len(list(root.iterdir()))}"
    folder.mkdir()
    with store.spool(texts, root) as spooled:
        return folder, train_or_reuse(spooled, folder, of, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_tokenizer_has_the_bytes_of_a_new_one(kind: str, tmp_path: Path, trainings: list[str]) -> None:
    kept = TokenizerStore(tmp_path / STORE)
    first, lines = made(tmp_path / "a", kept, section(train=kind))
    second, taken = made(tmp_path / "a", kept, section(train=kind))
    assert lines == []
    assert trainings == [kind]
    assert len(taken) == 1
    assert "taken from" in taken[0]
    again = tmp_path / "again"
    again.mkdir()
    train.train(iter(TEXTS), again, section(train=kind))
    assert tree(first) == tree(second) == tree(again)


def test_the_key_follows_all_that_the_training_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: which engine encodes, and how large the sample may be, do not enter."""
    with store.spool(TEXTS, tmp_path) as texts, store.spool(TEXTS[1:], tmp_path) as others:
        pass
    key = training_key(section(), texts)
    same = section(engine="tokenizers", sample_bytes=1 << 20, chat_template="a.jinja")
    assert training_key(same, texts) == key
    changes = [{"train": "sentencepiece-bpe"}, {"vocab_size": 401}, {"eos_token": "</s>"}, {"bos_token": "<s>"}]
    changed = [section(**change) for change in (*changes, {"special_tokens": ["<|x|>"]})]
    keys = {key, training_key(section(), others), *(training_key(other, texts) for other in changed)}
    assert len(keys) == 7
    for target in ("__version__", "version"):
        with monkeypatch.context() as patch:
            patch.setattr(store, target, "9" if target == "__version__" else lambda _name: "9")
            keys.add(training_key(section(), texts))
    other_code = tmp_path / "train.py"
    other_code.write_text("# another way to train")
    monkeypatch.setattr(train, "__file__", str(other_code))
    assert len(keys | {training_key(section(), texts)}) == 10


@pytest.mark.parametrize("memory", [1, 1 << 20])
def test_spooled_texts_are_read_as_they_were(memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, and in a file that is gone afterwards."""
    monkeypatch.setattr(store, "_MEMORY_BYTES", memory)
    with store.spool(["ab", "", "c"], tmp_path) as one, store.spool(["a", "", "bc"], tmp_path) as two:
        assert [list(one), list(two), list(one)] == [["ab", "", "c"], ["a", "", "bc"], ["ab", "", "c"]]
        assert one.sha256 != two.sha256
        assert one.text_bytes == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "missing file", "missing marker", "marker", "empty marker"])
def test_a_damaged_stored_tokenizer_is_trained_anew(damage: str, tmp_path: Path, trainings: list[str]) -> None:
    kept = TokenizerStore(tmp_path / STORE)
    first, _ = made(tmp_path / "a", kept, section())
    (entry,) = (tmp_path / STORE).iterdir()
    file, marker = entry / "files/tokenizer.json", entry / "done.json"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    {
        "flip": lambda: file.write_bytes(bytes(content)),
        "cut": lambda: file.write_bytes(file.read_bytes()[:-1]),
        "missing file": file.unlink,
        "missing marker": marker.unlink,
        "marker": lambda: marker.write_text(marker.read_text().replace("a", "b")),
        "empty marker": lambda: marker.write_text("{}"),
    }[damage]()
    second, lines = made(tmp_path / "a", kept, section())
    assert trainings == ["bpe", "bpe"]
    assert len(lines) == 1
    assert lines[0].startswith("trained anew: the stored")
    assert tree(second) == tree(first)
    third, lines = made(tmp_path / "a", kept, section())
    assert "taken from" in lines[0], "the damaged one was replaced"
    assert tree(third) == tree(first)


def test_jobs_that_use_a_store_at_the_same_time_have_the_same_files(tmp_path: Path) -> None:
    """One entry is damaged at the beginning, so that all of them find it, train, and replace it."""
    kept = TokenizerStore(tmp_path / STORE)
    first, _ = made(tmp_path / "a", kept, section())
    (entry,) = (tmp_path / STORE).iterdir()
    (entry / "files/tokenizer.json").write_text("{}")
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(made, tmp_path / f"job-{i}", kept, section()) for i in range(6)]
        folders = [job.result()[0] for job in jobs]
    assert all(tree(folder) == tree(first) for folder in folders)
    assert "taken from" in made(tmp_path / "a", kept, section())[1][0]
    assert [path.name for path in (tmp_path / STORE).iterdir()] == [entry.name], "nothing else is left"


def test_a_store_keeps_the_tokenizers_that_were_used_last(tmp_path: Path) -> None:
    kept = TokenizerStore(tmp_path / STORE)
    abandoned, running = (tmp_path / STORE / f".{name}.0123.partial" for name in ("old", "new"))
    for i in range(7):
        of = section(vocab_size=300 + i)
        _, lines = made(tmp_path / "a", kept, of, TEXTS[:20])
        assert lines == []
        for path in (tmp_path / STORE).iterdir():  # as if hours lay between them
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 3600 * 10**9))
        assert "taken from" in made(tmp_path / "a", kept, section(vocab_size=300), TEXTS[:20])[1][0]
    assert len(list((tmp_path / STORE).iterdir())) == 4
    for path in (abandoned, running):
        path.mkdir()
    os.utime(abandoned, (0, 0))
    made(tmp_path / "a", kept, section(vocab_size=320), TEXTS[:20])
    assert (abandoned.exists(), running.exists()) == (False, True)


def test_a_store_that_cannot_be_written_to_does_not_fail_the_job(tmp_path: Path) -> None:
    (tmp_path / STORE).write_text("a file")
    folder, lines = made(tmp_path / "a", TokenizerStore(tmp_path / STORE), section())
    assert (folder / "tokenizer.json").is_file()
    assert len(lines) == 1
    assert "not stored" in lines[0]


CHANGES: list[dict[str, Any]] = [
    {"output": "other"},
    {"output": "other", "task_bytes": 700, "shard_tokens": 500, "append_eos": False},
    {"output": "other", "dedup": {"exact": True, "near": {}}, "list_dropped": "texts"},
    {"output": "other", "clean": [{"step": "pii"}]},  # there is none in these texts
]


@pytest.fixture(scope="module")
def first_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a finished job, and so with a stored tokenizer."""
    work = tmp_path_factory.mktemp("first")
    text_folder(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        run_job(config_file(work))
    return work


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_of_the_same_training_texts_takes_the_tokenizer_and_has_the_bytes_of_one_that_trained(
    change: dict[str, Any], first_job: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(first_job, work, dirs_exist_ok=True)
    run_job(config_file(work, **change))
    assert capsys.readouterr().err.count("tokenizer: taken from .headrace-tokenizers/") == 1
    reused = tree(work / "other")
    shutil.rmtree(work / "other")
    shutil.rmtree(work / STORE)
    run_job("corpus.json")
    assert "taken from" not in capsys.readouterr().err
    assert tree(work / "other") == reused


def test_a_job_with_other_cleaning_trains(first_job: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(first_job, work, dirs_exist_ok=True)
    (work / "words.txt").write_text("1369\n")
    run_job(config_file(work, output="other", clean=[{"step": "word_blocklist", "words": ["words.txt"]}]))
    assert "taken from" not in capsys.readouterr().err
    assert len(list((work / STORE).iterdir())) == 2
