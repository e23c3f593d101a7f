"""What a job and its plan tell: documents that cleaning dropped, a vocabulary that is not reached, round figures."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from data_prep.__main__ import _print_summary, _rounded
from data_prep.job import progress
from data_prep.job.slurm_report import report
from data_prep.task import Counts
from foundation.directory import read_manifest
from tests.data_prep.conftest import cli, sentence, tree, write_config
from tests.data_prep.in_process import run_job


def test_every_dropped_kind_is_told_with_its_bytes(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of cleaning and of deduplication; and the vocabulary that these texts cannot fill is a warning."""
    kept, bad, twice = [sentence(i) for i in range(60)], ["weir Łódź"] * 3, sentence(7)
    texts = [*kept, *bad, twice]
    (work / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (work / "words.txt").write_text("weir\n")
    run_job(
        write_config(
            sources=[{"path": "a.jsonl"}],
            clean=[{"step": "word_blocklist", "words": ["words.txt"]}],
            dedup={"exact": True},
            tokenizer={"train": "bpe", "vocab_size": 30000},
        )
    )
    assert "tokenizer.vocab_size asks for 30,000" in capsys.readouterr().err
    manifest = read_manifest(work / "tokens", kind="tokens")
    (cleaned,) = (reason for reason in manifest.details["dropped"] if reason.startswith("word_blocklist"))
    assert manifest.details["dropped"] == {cleaned: 3, "dedup: exact copy": 1}
    sizes = {cleaned: 3 * len("weir Łódź".encode()), "dedup: exact copy": len(twice.encode())}
    assert manifest.details["dropped_bytes"] == sizes
    _print_summary(work / "tokens", manifest)
    out = capsys.readouterr().out
    assert f"dropped: 3 {cleaned}, 0.00 MB" in out
    assert "dropped: 1 dedup: exact copy, 0.00 MB" in out


@pytest.mark.parametrize(("count", "shown"), [(123456789, "120,000,000"), (99, "99"), (0, "0"), (1996, "2,000")])
def test_an_estimate_has_two_digits(count: int, shown: str) -> None:
    assert _rounded(count) == shown


def test_without_a_fraction_time_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And no 0 %, which looks as if nothing was done."""
    monkeypatch.setattr(progress, "_PLAIN_LINE_INTERVAL_S", 0.0)
    with progress.Display("tokenizer") as display:
        display.began -= 75
        display.add(Counts())
    assert "tokenizer: 75 s" in capsys.readouterr().err


def test_on_a_terminal_there_is_a_spinner_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=80))
    with progress.Display("tokenizer"):
        pass
    assert "0:00:00" in screen.getvalue()
    assert "%" not in screen.getvalue()


@pytest.fixture
def forgetful_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A squeue that knows no job, as after MinJobAge."""
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:/usr/bin:/bin")


@pytest.mark.usefixtures("forgetful_slurm")
def test_an_element_whose_log_does_not_end_well_has_failed_though_slurm_has_forgotten_it(tmp_path: Path) -> None:
    logs, root = tmp_path / "tokens.logs" / "1", tmp_path / ".tokens.job"
    logs.mkdir(parents=True)
    root.mkdir()
    (logs / "map-0.out").write_text("share 0 of 3: 4 map tasks finished\n")
    (logs / "map-1.out").write_text("error: no such file\nslurmstepd: error: *** JOB 8 DUE TO TIME LIMIT ***\n")
    lines = report(logs, root, 3, ["prepare=7", "map=8", "reduce=9", "finish=10"])
    assert lines[0] == "error: the job was not finished: 1 of its Slurm jobs failed. The first of them:"
    assert lines[1] == "map 1 (job 8): failed; Slurm no longer has the reason"
    assert "    slurmstepd: error: *** JOB 8 DUE TO TIME LIMIT ***" in lines
    assert (root / "failure.txt").read_text().splitlines() == lines  # for `headrace prep status`


@pytest.mark.usefixtures("forgetful_slurm")
def test_a_chain_of_which_nothing_is_known_refers_to_its_log(tmp_path: Path) -> None:
    lines = report(tmp_path / "absent", tmp_path, 3, ["prepare=7", "map=8"])
    assert f"see {tmp_path}/absent/chain.out" in lines[0]


@pytest.mark.usefixtures("forgetful_slurm")
def test_the_cause_of_a_failed_prepare_is_kept_with_the_report(tmp_path: Path) -> None:
    """`headrace prep status` shows the report without the log in which it was printed."""
    (tmp_path / "bin/squeue").write_text('#!/bin/sh\n[ "$3" != --jobs=7 ] || echo "7|N/A|FAILED|NonZeroExitCode"\n')
    logs, root = tmp_path / "tokens.logs" / "1", tmp_path / ".tokens.job"
    logs.mkdir(parents=True)
    root.mkdir()
    (logs / "chain.out").write_text("error: no such file\n")
    report(logs, root, 3, ["prepare=7", "map=8"])
    kept = (root / "failure.txt").read_text()
    assert f"prepare (job 7): FAILED (NonZeroExitCode)\nthe end of {logs}/chain.out:\n    error: no such file\n" in kept


STEPS = [
    {"step": "word_blocklist", "words": ["forbidden.txt"]},
    {"step": "pii"},
    {"step": "url_blocklist", "domains": ["domains.txt"]},
]


def corpus(work: Path, write_config: Callable[..., str]) -> str:
    rows = [
        {
            "text": f"Text {i} of the mill. Write to miller{i}@example.org. " + "weir " * (i % 2),
            "url": f"http://{i}.org",
        }
        for i in range(80)
    ]
    (work / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "forbidden.txt").write_text("weir\n")
    (work / "domains.txt").write_text("4.org\n6.org\n")
    sources = [{"path": "a.jsonl", "name": "a"}]
    return write_config(sources=sources, clean=STEPS, task_bytes=2000, list_dropped="texts", heldout_fraction=0.2)


def test_dropped_documents_are_counted_and_listed_for_any_number_of_workers(work: Path) -> None:
    config = corpus(work, write_config)
    cli("--config", config, "--workers", "1")
    details = read_manifest(work / "tokens", kind="tokens").details
    rows = [json.loads(line) for line in (work / "tokens" / "dropped.jsonl").read_text().splitlines()]
    assert sum(details["dropped"].values()) == len(rows) == 42
    assert {row["step"] for row in rows} == {"word_blocklist", "url_blocklist"}
    lines = (work / "a.jsonl").read_bytes()
    for row in rows:
        record = json.loads(lines[row["at"] :].split(b"\n", 1)[0])
        assert record["text"].startswith(row["text"][:7])
        assert "weir" in record["text"] or record["url"] in ("http://4.org", "http://6.org")
    assert details["edited"] == {"pii": 40}
    assert sum(split["documents"] for split in details["splits"].values()) == 38
    assert "word_blocklist" in cli("stats", "tokens").stdout
    cli("--config", config, "--workers", "2", "--set", "output=again")
    assert tree(work / "again") == tree(work / "tokens")


def test_a_word_list_that_changes_makes_a_different_job(work: Path) -> None:
    config = corpus(work, write_config)
    cli("prepare", "--config", config)
    (work / "forbidden.txt").write_text("weir\nmill\n")
    assert "cleaning" in cli("--config", config, code=2).stderr
    (work / "forbidden.txt").write_text("weir\n")
    cli("--config", config)
    assert "exists already" in cli("--config", config).stdout
    (work / "forbidden.txt").write_text("weir\nmill\n")
    said = cli("--config", config, code=2).stderr
    assert "made differently: cleaning" in said
    assert re.search(r"try: rm -r \S+ to make it anew, or --set output=", said)
    (work / "forbidden.txt").unlink()
    assert "forbidden.txt" in cli("--config", config, code=2).stderr


def test_the_error_for_a_split_that_cleaning_empties_names_the_steps(work: Path) -> None:
    config = corpus(work, write_config)
    (work / "forbidden.txt").write_text("mill\n")
    error = cli("--config", config, code=2).stderr
    assert "80 word_blocklist" in error


def test_a_url_is_that_of_its_own_text_where_other_sources_of_the_task_have_none(work: Path) -> None:
    """Texts of several sources share a batch; those without further fields stand before and after those with them."""
    for name in ("before", "after"):
        (work / name).mkdir()
        for i in range(4):
            (work / name / f"{i}.txt").write_text(f"A text file {name} the others, number {i}.\n")
    urls = ["http://1.org", "http://4.org", "http://2.org"]
    rows = [{"text": f"A record from {url} about mills.", "url": url, "name": url} for url in urls]
    (work / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "domains.txt").write_text("4.org\n")
    sources = [
        {"path": "before", "type": "text"},
        {"path": "a.jsonl", "id_field": "name"},
        {"path": "after", "type": "text"},
    ]
    clean = [{"step": "url_blocklist", "domains": ["domains.txt"]}]
    cli("--config", write_config(sources=sources, clean=clean, list_dropped="texts", heldout_fraction=0.3))
    (dropped,) = [json.loads(line) for line in (work / "tokens" / "dropped.jsonl").read_text().splitlines()]
    assert dropped["text"] == "A record from http://4.org about mills."
