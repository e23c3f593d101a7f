"""The command line: help and summary, fast and without torch; the commands `plan`, `status` and `stats`."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep import __main__ as main
from data_prep.config.corpus import CorpusConfig, load
from data_prep.formats.tokenfile import open_split
from data_prep.job import estimate, prepare
from data_prep.job.progress import Display
from data_prep.job.stats import SourceStats, html_page
from data_prep.job.status import _notes
from data_prep.sources.units import Plan
from data_prep.task import Counts
from data_prep.tokenizer import train
from foundation.directory import read_manifest
from foundation.errors import ConfigError
from pipeline.config.sections.data import DataSection
from pipeline.data.mixture import open_heldout, open_mixture
from tests.data_prep.conftest import cli, write_config
from tests.data_prep.in_process import run_job
from tests.html_pages import HOSTILE, assert_inert
from tests.support import wait_until

COMMAND = [sys.executable, "-m", "data_prep"]


def test_plan_prints_the_tasks_and_writes_nothing(mixed_config: str, work: Path) -> None:
    before = sorted(path.name for path in work.rglob("*"))
    assert "map tasks" in cli("plan", "--config", mixed_config).stdout
    assert sorted(path.name for path in work.rglob("*")) == before


def test_status_follows_a_job_from_another_process(mixed_config: str) -> None:
    assert "there is no job" in cli("status", "--config", mixed_config, code=2).stderr
    cli("prepare", "--config", mixed_config)
    before = cli("status", "--config", mixed_config).stdout
    assert "map: 0 of" in before
    assert "reduce: waiting" in before
    cli("phase", "map", "--config", mixed_config, "--task", "0", "--of", "2")
    share = cli("status", "--config", mixed_config).stdout
    assert "ended map" in share
    assert "reduce: waiting" in share
    cli("--config", mixed_config)
    assert "tokens is finished" in cli("status", "--config", mixed_config).stdout


def test_status_names_a_running_process(mixed_config: str, work: Path) -> None:
    texts = "".join(json.dumps({"text": f"{i} la rivière " * 400}) + "\n" for i in range(1000))
    (work / "plain.jsonl").write_text(texts)
    cli("prepare", "--config", mixed_config, "--set", "task_bytes=2000000")
    job = [*COMMAND, "--config", mixed_config, "--set", "task_bytes=2000000", "--workers", "1"]
    with subprocess.Popen(job, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        running = {"pid": process.pid, "phase": "map", "ended": False}
        notes = work / ".tokens.job"
        wait_until(lambda: any(note.items() >= running.items() for note, _ in _notes(notes)), process=process, poll_s=0)
        process.send_signal(signal.SIGSTOP)
        printed = cli("status", "--config", mixed_config, "--set", "task_bytes=2000000").stdout
        process.kill()
    assert f":{process.pid} map" in printed
    assert "MB/s" in printed


def test_stats_add_up_to_the_manifest(finished: Path) -> None:
    shown = cli("stats", "tokens").stdout
    for split in ("train", "heldout"):
        _, entry = open_split(finished / "tokens", split=split)
        assert set(entry["sources"]) <= {"texts", "lines", "rows"}
        for key in ("documents", "tokens", "bytes"):
            assert sum(sums[key] for sums in entry["sources"].values()) == entry[key]
            assert sum(shard[key] for shard in entry["shards"]) == entry[key]
        for sums in entry["sources"].values():
            assert sum(sums["lengths"]) == sums["documents"]
            assert f"{sums['tokens']:,}" in shown
    cli("stats", "tokens", "--html", "stats.html")
    assert "<svg" in (finished / "stats.html").read_text()


def test_names_on_the_page_of_statistics_are_text(tmp_path: Path) -> None:
    rows = [SourceStats(HOSTILE, HOSTILE, 3, 30, 90, (0, 1, 2))]
    assert_inert(html_page(tmp_path / HOSTILE.replace("/", "-"), rows, {HOSTILE: 2}, [HOSTILE]))


def test_plan_estimates_tokens_and_time(work: Path) -> None:
    texts = (f"{i} la rivière turns the wheel of the mill. " * 40 for i in range(2000))
    (work / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = write_config(sources=[{"path": "rows.jsonl"}], tokenizer={"train": "bpe", "vocab_size": 400})
    printed = cli("plan", "--config", config, "--workers", "2").stdout
    cli("--config", config)
    splits = read_manifest(work / "tokens", kind="tokens").details["splits"]
    tokens = sum(split["tokens"] for split in splits.values())
    estimated = re.search(r"about ([\d,]+) tokens", printed)
    # the estimate uses a tokenizer with another vocabulary, so only the order of magnitude is right
    assert tokens / 4 < int(estimated[1].replace(",", "")) < 4 * tokens
    assert re.search(r"about \d+ s to train the tokenizer, then\n", printed), printed
    assert re.search(r"about \d+ s on 2 workers at [\d.]+ MB/s each,\ntogether about \d+ s:\n", printed), printed
    given = cli(
        "plan", "--config", config, "--set", 'tokenizer={"path": "tokens/tokenizer"}', "--set", "output=b"
    ).stdout
    assert "to train" not in given
    assert re.search(r"about \d+ s on \d+ workers", given), given


def plan_of_new(config: CorpusConfig) -> Plan:
    """The units of the last source."""
    plan = prepare.inspect(config).plan_map_tasks()
    return [[unit for unit in task if unit.source == config.sources[-1].label] for task in plan]


def test_the_estimate_has_the_tokens_of_what_is_written_and_not_of_what_is_seen(work: Path) -> None:
    rows = [json.dumps({"text": f"{i} la rivière turns the wheel of the mill. " * 40}) + "\n" for i in range(2000)]
    for name, count in (("old", 3), ("new", 1)):
        (work / f"{name}.jsonl").write_text("".join(rows * count))
    sources = [{"path": "old.jsonl", "seen": True}, {"path": "new.jsonl"}]
    config = load(write_config(sources=sources, tokenizer={"train": "bpe", "vocab_size": 300}, dedup={"exact": True}))
    found = estimate.estimate(config, prepare.inspect(config).plan_map_tasks())
    assert found is not None
    whole = estimate.estimate(config.model_copy(update={"sources": config.sources[1:]}), plan_of_new(config))
    assert found.tokens == pytest.approx(whole.tokens, rel=0.1)
    assert found.stored_bytes == 4 * (work / "new.jsonl").stat().st_size


def test_the_estimate_has_the_time_of_training_on_the_whole_sample(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extrapolated from trainings on a third and on a twelfth of it; each takes 0.1 s and 0.5 s per MB in this test."""
    rows = (json.dumps({"text": f"{i} la rivière turns the wheel of the mill. " * 40}) + "\n" for i in range(1800))
    (work / "rows.jsonl").write_text("".join(rows))
    sources, tokenizer = [{"path": "rows.jsonl"}], {"train": "bpe", "vocab_size": 300}
    trained = train.train

    clock, spent = time.perf_counter, [0.0]

    def slow(texts: Any, folder: Path, section: Any) -> None:
        spent[0] += 0.1 + 0.5e-6 * texts.text_bytes
        trained(list(texts)[:50], folder, section)

    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"data_prep.job.estimate.time.{name}", lambda: spent[0] + 1e-3 * clock())
    monkeypatch.setattr(train, "train", slow)
    monkeypatch.setattr(estimate, "_SAMPLE_BYTES", 1 << 20)
    found = []
    for sample_bytes in (1 << 30, 1_500_000):
        config = load(write_config(sources=sources, tokenizer=tokenizer | {"sample_bytes": sample_bytes}))
        result = estimate.estimate(config, prepare.inspect(config).plan_map_tasks())
        found.append(result.training_s)
        assert result.seconds(2) == result.training_s + result.map_seconds(2)
    whole = (work / "rows.jsonl").stat().st_size * 0.9  # the rest is held out
    for seconds, size in zip(found, (whole, 1_500_000), strict=True):
        assert 0.7 < seconds / (0.1 + 0.5e-6 * size) < 1.3


def test_an_estimate_of_training_is_a_line_through_two_measurements() -> None:
    times = estimate.TrainingTimes(1e-6, (1_000_000, 2.0), (4_000_000, 5.0))
    assert times.seconds(read_bytes=3_000_000, text_bytes=10_000_000) == pytest.approx(3 + 5 + 6)
    assert times.seconds(read_bytes=0, text_bytes=4_000_000) == pytest.approx(5)
    disturbed = estimate.TrainingTimes(0, (1_000_000, 9.0), (4_000_000, 4.0))
    assert disturbed.seconds(read_bytes=0, text_bytes=8_000_000) == pytest.approx(4), "more text is never less time"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *[(0.2, "1 s"), (7.4, "7 s"), (63, "65 s"), (118, "120 s"), (130, "2 min"), (1530, "25 min")],
        *[(7000, "115 min"), (8000, "2.2 h"), (110_000, "31 h"), (400_000, "5 days")],
    ],
)
def test_an_estimated_duration_has_the_digits_that_an_estimate_knows(seconds: float, shown: str) -> None:
    assert main._duration(seconds) == shown


def test_the_progress_line_has_the_most_frequent_reasons_for_drops_first(tmp_path: Path) -> None:
    note = tmp_path / "progress" / "map-00000.json"
    with Display("map", total_bytes=1000, done_bytes=100, note=note) as display:
        assert json.loads(note.read_text())["share"] == 0.1  # at once, before the first task reports
        display.add(Counts(input_bytes=400, text_bytes=380, documents=3, tokens=95, dropped=Counter({"c4: short": 2})))
        display.add(Counts(dropped=Counter({"pii: none": 5, "c4: short": 1})))
        line = display.line()
        assert display.share() == 0.5
    most_first = r"MB/s, [\d,]+ documents/s, 95 tokens, dropped 5 pii: none, 3 c4: short, \d+:\d\d left"
    assert re.search(most_first, line), line
    assert json.loads(note.read_text())["ended"]


def test_the_age_of_a_status_note_is_measured_by_the_clock_of_the_file_system(mixed_config: str, work: Path) -> None:
    cli("prepare", "--config", mixed_config)
    note = work / ".tokens.job/progress/map-00000.json"
    with Display("map", total_bytes=10, note=note) as display:
        running = json.dumps(display.status_note())
    note.write_text(running)
    assert "silent" not in cli("status", "--config", mixed_config).stdout
    long_ago = time.time() - 3600
    os.utime(note, (long_ago, long_ago))
    assert re.search(r"map 0% .*silent for 3,6\d\d s", cli("status", "--config", mixed_config).stdout)


def test_a_job_without_a_heldout_split(work: Path, texts: Path) -> None:
    """It has one split, and training on it needs held-out data of its own."""
    run_job(write_config(heldout_fraction=0, dedup={"exact": True}))
    manifest = read_manifest(work / "tokens", kind="tokens")
    assert list(manifest.details["splits"]) == ["train"]
    assert manifest.details["splits"]["train"]["documents"] == len(list(texts.rglob("*.md")))
    assert not (work / "tokens" / "heldout").exists()

    section = DataSection(sources=[{"path": "tokens"}], sequence_length=16)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="heldout_fraction 0"):
        open_heldout(section, open_mixture(section, seed=1))
    run_job(
        write_config(name="second.json", output="second", heldout_fraction=0.5, tokenizer={"path": "tokens/tokenizer"})
    )
    sources = [{"path": "tokens", "heldout": "second"}]
    section = DataSection(sources=sources, sequence_length=16)  # type: ignore[arg-type]
    assert open_heldout(section, open_mixture(section, seed=1))[0].windows


def started(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m data_prep ...` in a process of its own, with the imports that it does itself."""
    command = [sys.executable, "-m", "data_prep", *arguments]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True)


@pytest.mark.usefixtures("work")
def test_help_is_printed_in_less_than_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = started("--help").stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of CPU time, which does not depend on other processes
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    for word in ("plan", "status", "prepare", "phase", "finish", "verify", "stats", "--workers", "--set"):
        assert word in text
    assert "--task" in cli("phase", "--help").stdout


@pytest.mark.usefixtures("texts")
def test_no_process_of_a_run_imports_torch() -> None:
    trace = started("--config", write_config(), PYTHONPROFILEIMPORTTIME="1").stderr
    modules = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in trace.splitlines() if line.count("|") == 2}
    assert {"tokenizers", "numpy", "data_prep"} <= modules
    assert not modules & {"torch", "transformers", "datasets", "pipeline"}


def test_the_summary_has_the_counts_of_the_output_and_the_skipped_records(texts: Path, work: Path) -> None:
    (texts / "empty.md").write_text("")
    text = cli("--config", write_config()).stdout
    splits = read_manifest(work / "tokens", kind="tokens").details["splits"]
    for split in ("train", "heldout"):
        entry = splits[split]
        ratio = entry["bytes"] / entry["tokens"]
        assert f"{split}: {entry['documents']} documents, {entry['tokens']:,} tokens, {ratio:.3f} bytes/token" in text
    assert "skipped: 1 empty" in text
    assert "MB/s" in text


def test_the_inputs_are_recorded_with_their_checksums(finished: Path) -> None:
    manifest = read_manifest(finished / "tokens", kind="tokens")
    assert set(manifest.parents) == {"texts", "lines", "rows"}
    assert manifest.parents["texts"]["files"] == 60
    assert "output" not in manifest.config
    lines = [json.loads(line) for line in (finished / "tokens" / "sources.jsonl").read_text().splitlines()]
    assert len(lines) == 63
    assert {line["parts"] for line in lines if line["source"] == "texts"} == {1}


def test_the_path_of_the_corpus_is_not_part_of_the_fingerprint(work: Path, texts: Path) -> None:
    cli("--config", write_config())
    texts.rename(work / "elsewhere")
    cli("--config", write_config(sources=[{"path": "elsewhere", "name": "texts"}], output="again"))
    one, two = (read_manifest(work / name, kind="tokens") for name in ("tokens", "again"))
    assert one.fingerprint == two.fingerprint
    assert one.parents["texts"]["fingerprint"] == two.parents["texts"]["fingerprint"]


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("kind", ["sentencepiece-unigram"])
def test_a_sentencepiece_tokenizer_keeps_its_model_and_appends_its_eos(kind: str) -> None:
    cli("--config", write_config(tokenizer={"train": kind, "vocab_size": 420}))
    entry = read_manifest("tokens", kind="tokens").details["tokenizer"]
    assert (entry["kind"], entry["eos_id"]) == (kind, 1)
    assert Path("tokens/tokenizer/tokenizer.model").is_file()


@pytest.mark.usefixtures("texts")
def test_without_append_eos_no_document_ends_with_it() -> None:
    from data_prep.formats.tokenfile import TokenFile, shard_prefix  # noqa: PLC0415

    cli("--config", write_config(append_eos=False))
    assert 0 not in TokenFile.open(shard_prefix(Path("tokens"), "train", 0)).tokens


def test_the_data_of_a_builder_is_fetched_once_and_read_like_a_saved_dataset(work: Path) -> None:
    (work / "rows.json").write_text("\n".join(json.dumps({"text": f"row {i}"}) for i in range(60)))
    source = {
        "type": "datasets",
        "builder": "json",
        "split": "train",
        "name": "built",
        "kwargs": {"data_files": "rows.json", "cache_dir": "cache"},
    }
    config = write_config(sources=[source])
    cli("prepare", "--config", config)
    (work / "rows.json").unlink()  # the fetched data is kept
    cli("--config", config)
    splits = read_manifest(work / "tokens", kind="tokens").details["splits"]
    assert splits["train"]["documents"] + splits["heldout"]["documents"] == 60
    assert "exists already" in cli("--config", config).stdout


@pytest.mark.usefixtures("texts")
def test_file_names_that_are_not_valid_utf_8_are_accepted(texts: Path) -> None:
    Path(os.fsdecode(os.fsencode(texts) + b"/caf\xe9.md")).write_text("le moulin")
    cli("--config", write_config())
    assert "caf\\udce9.md" in Path("tokens/sources.jsonl").read_text()
    assert "exists already" in cli("--config", "corpus.json").stdout


def test_commands_run_again_after_the_end_have_nothing_to_do(finished: Path) -> None:
    """As when a scheduler runs a finished array task a second time."""
    assert finished
    for command in (["prepare"], ["phase", "map", "--task", "0", "--of", "2"], ["finish"]):
        assert "exists already" in cli(*command, "--config", "corpus.json").stdout


def test_a_closed_pipe_ends_without_a_traceback(work: Path) -> None:
    process = subprocess.Popen(
        f"{sys.executable} -m data_prep --config {write_config()} | true", shell=True, cwd=work, stderr=subprocess.PIPE
    )
    assert b"Traceback" not in process.communicate()[1]
