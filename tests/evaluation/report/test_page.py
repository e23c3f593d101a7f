"""The page, made by the command from a real model, and seen by a real browser."""

from __future__ import annotations

import base64
import csv
import json
import re
import shutil
import subprocess
import time
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from foundation.directory import write_manifest, write_text
from pipeline.evaluation.heldout.complete import complete
from pipeline.evaluation.report import svg
from pipeline.evaluation.report.branches_section import branches_section
from pipeline.evaluation.report.facts import facts
from pipeline.evaluation.report.inputs import Inputs
from pipeline.evaluation.report.page import page
from pipeline.evaluation.report.runs import read_run
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.runtime.metrics.attempts_journal import append_event
from pipeline.runtime.metrics.times import iso_time
from tests import warm
from tests.evaluation.heldout.small import SEQUENCE
from tests.evaluation.report.conftest import make_run
from tests.html_pages import HOSTILE, assert_inert
from tests.support import output_of

PACKAGE = Path(svg.__file__).parent
PROMPT = "The <b>mill</b> & race"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]


@pytest.fixture(scope="module")
def made(model: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    work = tmp_path_factory.mktemp("report")
    runs = [make_run(work / "a", steps=40), make_run(work / "b", steps=30, distilled=True)]
    named = ["--run", f"first={runs[0]}", "--run", f"<second>={runs[1]}", "--model", f"[small]={model}"]
    data = ["--data", tokens, "--sequence-length", SEQUENCE, "--max-tokens", 320]
    done = warm.run("-m", "pipeline", "report", work / "r.html", *named, *data, "--prompt", PROMPT, "--tokens", 4)
    assert done.returncode == 0, done.stderr
    assert "evaluating 1/1: [small]" in done.stderr
    return work / "r.html", done.stdout


def test_the_table_is_printed(made: tuple[Path, str], model: Path) -> None:
    _, shown = made
    weights = ModelFolder.open(model)
    assert "[small]" in shown
    assert f"{weights.parameters / 1e6:.2f}" in shown
    assert f"{weights.weight_bytes / 1e6:.2f}" in shown
    assert "scored: 320 tokens of the heldout split" in shown


def test_the_page_loads_nothing_from_elsewhere(made: tuple[Path, str]) -> None:
    text = made[0].read_text()
    assert not re.search(r"<(link|img|iframe|object|embed)\b|<script[^>]*src|@import|@font-face", text)
    assert all(target.startswith(("#", "data:")) for target in re.findall(r'\b(?:href|src)="([^"]*)"', text))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_text_from_inputs_is_escaped(made: tuple[Path, str]) -> None:
    text = made[0].read_text()
    assert "<pre><b>The &lt;b&gt;mill&lt;/b&gt; &amp; race</b>" in text
    assert "<second>" not in text
    assert "&lt;second&gt;" in text


def test_names_of_runs_and_tasks_cannot_write_into_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=12)
    tasks = (HOSTILE, HOSTILE.replace(" ", "_"), "../" + HOSTILE)
    rows = [{"kind": f"task/{task}", "step": step, "accuracy": 0.5, "samples": 9} for step in (4, 8) for task in tasks]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["parents"]["data.sources.0"]["path"] = HOSTILE
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert_inert(page(Inputs(tmp_path / "r.html", (read_run(HOSTILE, run),), None), ()), scripts=1)


def test_the_page_shows_the_greedy_continuation_and_says_so(made: tuple[Path, str], model: Path) -> None:
    text = made[0].read_text()
    assert "Each model continues it by up to 4 tokens, by greedy decoding" in text
    continued = re.search(r"<pre><b>[^\n]*?</b>(.*?)</pre>", text, re.DOTALL)
    assert unescape(continued[1]) == complete(model, PROMPT, tokens=4, temperature=0).removeprefix(PROMPT)


def test_the_figures_are_in_the_page_to_download(made: tuple[Path, str], model: Path) -> None:
    links = dict(re.findall(r'<a download="([^"]+)" href="data:[^;]+;base64,([^"]*)">', made[0].read_text()))
    (row,) = csv.DictReader(base64.b64decode(links["models.csv"]).decode().splitlines())
    (same,) = json.loads(base64.b64decode(links["models.json"]))
    assert row["model"] == "[small]"
    assert int(row["bytes"]) == same["bytes"] == ModelFolder.open(model).weight_bytes
    assert float(row["loss_nats"]) == same["loss_nats"]
    assert float(row["mean_kl"]) == 0  # it is the reference
    assert [each["batch"] for each in same["generation"]] == [1, 8]
    assert all(each["peak_bytes"] > same["bytes"] for each in same["generation"])


def test_a_run_that_is_training_is_reported_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=12, planned=100)
    said = output_of(warm.run("-m", "pipeline", "report", tmp_path / "r.html", "--run", f"only={run}"))
    assert said == f"wrote {tmp_path / 'r.html'}\n"
    text = (tmp_path / "r.html").read_text()
    assert "12 of 100, not finished" in text
    assert "<h2>Models</h2>" not in text
    assert "<title>Headrace: only</title>" in text


def test_the_goodput_of_a_run_is_a_bar_for_each_attempt_and_a_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=12)
    began = time.time() - 100
    for attempt, start, ended, code in (("a", 0, 20, 75), ("b", 30, 101, 0)):
        for event, at in (("start", start), ("training", start + 5), ("end", ended)):
            append_event(run, event, attempt=attempt, code=code, reason="", time=iso_time(began + at))
    output_of(warm.run("-m", "pipeline", "report", tmp_path / "r.html", "--run", f"a & b={run}"))
    text = (tmp_path / "r.html").read_text()
    section = text[text.index("<h2>Goodput</h2>") : text.index("<h2>Runs</h2>")]
    assert "<h3>a &amp; b: 5.9 % of 1 min 41 s</h3>" in section  # 12 steps of 0.5 s
    bars = re.findall(r'<span class="spent-(\w+)" style="width:([\d.]+)%" title="([^"]+)">', section)
    assert ("startup", "6.17", "start-up: 5.0 s") in bars  # of the longer attempt's 81 s
    assert ("down", "12.35", "down: 10.0 s") in bars
    widths = [float(width) for _, width, _ in bars]
    assert sum(widths) == pytest.approx(100 + 100 * 20 / 81, abs=0.05)
    assert '<span class="key spent-productive"></span>productive steps</th><td>6.0 s</td><td>5.9 %</td>' in section


def test_branches_are_a_tree_and_are_compared_at_equal_tokens(tmp_path: Path) -> None:
    base = make_run(tmp_path / "base", steps=30)
    gone = {"branch": {"run": "/gone/<base>", "step": 7}}  # a base that is not in the report
    of_base = {"branch": {"run": str(base), "step": 1500}}
    a, b = make_run(tmp_path / "a", steps=40, details=of_base), make_run(tmp_path / "b", steps=20, details=gone)
    of_a = make_run(tmp_path / "c", steps=10, details={"branch": {"run": str(a), "step": 5}})
    runs = tuple(read_run(path.name, path) for path in (base, a, b, of_a))
    section = branches_section(runs)
    assert (
        "<ul><li>base<ul><li>a, from step 1,500<ul><li>c, from step 5</li></ul></li></ul></li>"
        "<li>/gone/&lt;base&gt;<ul><li>b, from step 7</li></ul></li></ul>"
    ) in section
    rows = re.findall(r'<tr><th scope="row">([\d,]+)</th>(.*?)</tr>', section)
    assert [count for count, _ in rows] == ["10,000", "20,000", "30,000"]  # 40,000 is one run's alone
    cells = [re.findall("<td>(.*?)</td>", cells) for _, cells in rows]
    expected = [[run.evaluated()[1][place] for run in runs if place < len(run.evaluations)] for place in range(3)]
    for found, losses in zip(cells, expected, strict=True):
        assert sorted(re.findall(r"[\d.]+", " ".join(found))) == sorted(f"{loss:.4f}" for loss in losses)
        assert re.findall("<b>(.*?)</b>", " ".join(found)) == [f"{min(losses):.4f}"]
    assert cells[2][2:] == ["", ""]
    assert branches_section(runs[:1]) == ""
    apart = replace(runs[1], evaluations=())
    assert "No two of the runs were evaluated" in branches_section([apart, replace(runs[2], evaluations=())])


def test_no_temporary_files_are_left_beside_the_page(made: tuple[Path, str]) -> None:
    assert sorted(path.name for path in made[0].parent.iterdir()) == ["a", "b", "r.html"]


def test_a_failed_write_leaves_the_old_page(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    page.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(page, "new \ud800")  # a lone surrogate has no UTF-8
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_the_summary_of_a_run_is_from_its_manifest_and_journal(tmp_path: Path) -> None:
    run = read_run("run", make_run(tmp_path / "run", steps=40))
    summary = dict(facts(run, []))
    assert summary["steps"] == "40, finished"
    assert summary["tokens"] == "40,000, 1,000 per step"
    assert summary["time in steps"] == "20.0 s"
    assert summary["engine"] == "deepspeed, ZeRO-2, fp32"
    assert summary["dataset"] == "0123456789ab (out/tokens)"
    assert (summary["layout"], summary["seed"]) == ("2 processes", "11")
    assert summary["held-out"].endswith("at step 40")


def test_a_model_exported_from_a_run_provides_its_number_of_parameters(tmp_path: Path, model: Path) -> None:
    path = make_run(tmp_path / "run", steps=10)
    checkpoint = path / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    saved = write_manifest(checkpoint, kind="checkpoint", config={}, details={"topology": "dp 2"})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "event", "step": 10, "event": "checkpoint", "path": "old/place/step-00000010"}\n')
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    parents = {"checkpoint": {"path": "old/place", "fingerprint": saved.fingerprint}}
    write_manifest(folder, kind="model", config={}, parents=parents, details={"parameters": 1234})
    summary = dict(facts(read_run("run", path), [ModelFolder.open(folder)]))
    assert summary["parameters"] == "1,234"
    assert summary["layout"] == "dp 2"
    assert summary["checkpoint"] == str(checkpoint)  # where it is now, not where it was written


def test_text_and_lines_have_enough_contrast_in_light_and_dark_mode() -> None:
    light, dark = (PACKAGE / "page.css").read_text().split("@media (prefers-color-scheme: dark)", maxsplit=1)
    for css in (light, dark):
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", css))
        lettering = [name for name in colors if name in ("text", "muted") or name.startswith("series-")]
        assert len(lettering) == 2 + len(svg.SERIES)
        # WCAG 2.2, criterion 1.4.3: 4.5 to 1 for small text, which labels beside lines are
        assert min(contrast(colors[name], colors["ground"]) for name in lettering) >= 4.5


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colors by WCAG 2.2, "relative luminance"."""
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_shows_the_table_and_the_curves(made: tuple[Path, str], tmp_path: Path) -> None:
    how = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *QUIET, f"--user-data-dir={tmp_path}"]
    command = [str(CHROMIUM), *how, "--dump-dom", made[0].as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    before, heading, _ = dom.partition("<h2>Goodput</h2>")
    assert heading
    assert len(re.findall(r"<tr>", before)) == 2 * 2  # the heads and one model: its quality, and its generation
    assert '<th scope="row">[small]</th>' in dom
    # the loss in two sizes, learning rate, gradient norm, speed, KL
    assert len(re.findall(r'<svg viewBox="[^"]+" role="img"', dom)) == 6
    curves = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="[^"]*stroke: var\(--series', dom)
    assert len(curves) >= 2 * 5 + 1  # two runs in five drawings, and the KL of one
    assert all(len(curve) > 100 for curve in curves)
    assert not re.search(r'\b(?:href|src)="(?!#|data:)', dom)
    assert dom.count('class="zoomed"') == 6  # the script has found every drawing
