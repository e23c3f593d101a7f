"""The site: built strictly, no dead link, headings that readers search for; a browser finds the right page."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.conftest import ROOT

ZENSICAL = Path(sys.executable).with_name("zensical")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a dead link or any other warning is an error."""
    if not ZENSICAL.exists():
        pytest.skip("zensical is not installed beside this Python")
    work = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", work / "docs")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, work / name)
    done = subprocess.run(
        [ZENSICAL, "build", "--strict"],
        cwd=work,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    return work / "out" / "site"


PAGES = sorted((ROOT / "docs").rglob("*.md"))

# the terms that papers, DeepSpeed, Megatron, torchtitan and Hugging Face use, and questions that a reader types
TERMS = [
    "gradient accumulation", "micro-batch", "global batch", "activation checkpointing", "recomputation",
    "mixed precision", "master weights", "loss scaling", "tensor parallelism", "pipeline parallelism",
    "context parallelism", "expert parallelism", "data parallelism", "hybrid sharding", "HSDP",
    "sequence parallelism", "pipeline schedule", "virtual stages", "bubble", "MFU", "tokens/s", "goodput",
    "heartbeat", "liveness", "watchdog", "straggler", "non-finite", "loss spike", "rollback", "skip", "rendezvous",
    "pre-flight check", "process group", "data mixture", "mixing weights", "curriculum", "epoch", "packing",
    "loss mask", "document mask", "MinHash signatures", "LSH bands", "connected components", "exact",
    "near duplicates", "checkpoint shards", "reshard", "state dict", "resume", "held-out", "validation", "perplexity",
    "bits per byte", "executor", "worker", "task", "retry", "speculative execution", "fewer GPUs", "out of memory",
    "learning rate", "two nodes", "multi-turn chat", "GGUF", "my run died",
]  # fmt: skip


def headings() -> str:
    """All headings of all pages, without code blocks."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return "\n".join(found).lower()


def test_the_site_builds_strictly_and_has_every_page(site: Path) -> None:
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").with_suffix("")
        built = site / ("index.html" if name.name == "index" else f"{name}/index.html")
        assert built.is_file(), name


def test_every_internal_link_of_the_built_site_leads_somewhere(site: Path) -> None:
    texts = {page.resolve(): page.read_text() for page in site.rglob("*.html")}
    ids = {page: set(re.findall(r'\bid="?([^">\s]+)', text)) for page, text in texts.items()}
    dead = []
    for page, text in texts.items():
        for link in re.findall(r'<a [^>]*href="?([^">\s]+)', text):
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", target) or page.name == "404.html":  # elsewhere, or absolute
                continue
            path = (page.parent / target).resolve() if target else page
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file() or (anchor and path in ids and anchor not in ids[path]):
                dead.append(f"{page.relative_to(site.resolve())}: {link}")
    assert dead == []


def test_search_knows_every_page(site: Path) -> None:
    index = json.loads((site / "search.json").read_text())
    places = {item["location"].partition("#")[0].strip("/") for item in index["items"]}
    names = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES} - {"index"}
    assert names - places == set()


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES)


def test_every_term_of_the_field_is_in_a_heading() -> None:
    assert [term for term in TERMS if term.lower() not in headings()] == []


def test_every_guide_says_what_can_go_wrong() -> None:
    guides = [page for page in PAGES if page.parent.name == "how-to"]
    assert [page.name for page in guides if "## What can go wrong" not in page.read_text()] == []


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

ANSWERS = {
    "how-to/batch-size": ("gradient accumulation", "micro-batch", "global batch"),
    "how-to/out-of-memory": ("out of memory", "activation checkpointing"),
    "how-to/mixed-precision": ("mixed precision", "master weights", "loss scaling"),
    "reference/layouts": (
        *("tensor parallelism", "pipeline parallelism", "context parallelism"),
        *("data parallelism", "hybrid sharding", "sequence parallelism"),
        *("pipeline schedule", "virtual stages", "bubble"),
    ),
    "how-to/metrics": ("MFU", "tokens/s"),
    "how-to/goodput": ("goodput",),
    "how-to/stragglers-and-hangs": ("heartbeat", "liveness", "watchdog", "straggler"),
    "how-to/loss-spikes": ("non-finite step", "loss spike", "rollback", "skip"),
    "reference/launching": ("rendezvous", "pre-flight check", "process group"),
    "how-to/data-mixture": ("data mixture", "mixing weights", "curriculum", "epoch"),
    "how-to/packing": ("packing", "document mask"),
    "how-to/chat-and-loss-mask": ("loss mask", "multi-turn chat"),
    "how-to/deduplication": ("MinHash signatures", "LSH bands", "connected components", "near duplicates"),
    "reference/checkpoints": ("checkpoint shards", "reshard", "state dict"),
    "how-to/resume-on-other-gpus": ("resume", "resume on fewer GPUs"),
    "how-to/evaluation-tasks": ("task", "bits per byte"),
    "reference/evaluation": ("held-out loss", "validation loss", "perplexity"),
    "reference/data-prep": ("executor", "worker", "retry", "speculative execution"),
    "how-to/learning-rate": ("learning rate",),
    "tutorials/two-nodes": ("two nodes",),
    "how-to/mixture-of-experts": ("mixture of experts", "expert parallelism", "expert load", "correction bias"),
    "how-to/export-and-serve": ("convert to GGUF",),
    "tutorials/a-run-that-failed": ("my run died",),
}
"""Page -> what is typed to find it: the terms of the field, and questions."""
QUESTIONS = {words: page for page, asked in ANSWERS.items() for words in asked}
SETTLE_MS = 100
FIRST = ("", "how-to/install/", "how-to/faq/", "how-to/which-tool/")
"""Pages of which no box of code is cut at its right on a laptop."""
WIDTHS = {"wide": 1200, "narrow": 390}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it so
        """Requests are not printed."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the built site is served."""
    handler = functools.partial(_Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["one a page", "all"])
def test_the_search_shows_the_right_page_first(address: str, browser: Any, every: bool) -> None:
    page = browser.new_page(viewport={"width": WIDTHS["wide"], "height": 800})
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.keyboard.press("/")
    asked = {words: name for words, name in QUESTIONS.items() if every or words == ANSWERS[name][0]}
    found = {words: _first_result(page, words).removeprefix(address).partition("?")[0].strip("/") for words in asked}
    page.close()
    assert found == asked


def _first_result(page: Any, words: str) -> str:
    """Types into the search and waits until its first result no longer changes; results come from a worker."""
    results = page.locator("a[href*='?h=']")
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.wait_for_timeout(SETTLE_MS)
    page.keyboard.type(words)
    seen: list[str] = []
    while len(seen) < 3 or len(set(seen[-3:])) > 1 or not seen[-1]:
        assert len(seen) < 100, f"no result for {words!r}"
        page.wait_for_timeout(SETTLE_MS)
        seen.append(results.first.evaluate("link => link.href.split('?')[0]") if results.count() else "")
    return seen[-1]


@pytest.mark.browser
@needs_chromium
@pytest.mark.integration
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("page", [*FIRST, "tutorials/first-hour/", "config-reference/", "reference/layouts/"])
def test_a_page_fits_the_screen_and_fetches_nothing_from_elsewhere(
    address: str, browser: Any, page: str, width: int, tmp_path: Path
) -> None:
    view = browser.new_page(viewport={"width": width, "height": 800})
    requested: list[str] = []
    view.on("request", lambda request: requested.append(request.url))
    view.goto(address + page)
    view.wait_for_load_state("networkidle")
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('article pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    assert width == WIDTHS["narrow"] or page not in FIRST or view.evaluate(f"{cut}.map(e => e.innerText)") == []
    assert [url for url in requested if not url.startswith((address, "data:", "blob:"))] == []
    assert view.locator("h1").count() == 1
    view.screenshot(path=tmp_path / "page.png")
    view.close()
