"""The site in a real browser: its search answers an engineer's words with the right page first, wide and narrow."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.build import build_site

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

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
WIDTHS = {"wide": 1280, "narrow": 390}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it so
        """Requests are not printed."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the built site."""
    handler = functools.partial(_Quiet, directory=build_site())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["one a page", "all"])
def test_the_search_shows_the_right_page_first(site: str, browser: Any, every: bool) -> None:
    page = browser.new_page(viewport={"width": WIDTHS["wide"], "height": 800})
    page.goto(site)
    page.wait_for_load_state("networkidle")
    page.keyboard.press("/")
    asked = {words: name for words, name in QUESTIONS.items() if every or words == ANSWERS[name][0]}
    found = {words: _first_result(page, words).removeprefix(site).partition("?")[0].strip("/") for words in asked}
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


@pytest.mark.integration
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("page", ["", "tutorials/first-hour/", "config-reference/", "reference/layouts/"])
def test_a_page_fits_the_screen_and_fetches_nothing_from_elsewhere(
    site: str, browser: Any, page: str, width: int, tmp_path: Path
) -> None:
    view = browser.new_page(viewport={"width": width, "height": 800})
    requested: list[str] = []
    view.on("request", lambda request: requested.append(request.url))
    view.goto(site + page)
    view.wait_for_load_state("networkidle")
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    assert [url for url in requested if not url.startswith((site, "data:", "blob:"))] == []
    assert view.locator("h1").count() == 1
    view.screenshot(path=tmp_path / "page.png")
    view.close()
