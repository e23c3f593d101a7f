"""The documentation site: built strictly, no dead link, and a heading for every term that a reader would search for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import ROOT
from tests.docs.build import build_site

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


@pytest.fixture(scope="module")
def site() -> Path:
    """The built site."""
    return build_site()


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


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_every_term_of_the_field_is_in_a_heading() -> None:
    assert [term for term in TERMS if term.lower() not in headings()] == []


def test_every_guide_says_what_can_go_wrong() -> None:
    guides = [page for page in PAGES if page.parent.name == "how-to"]
    assert [page.name for page in guides if "## What can go wrong" not in page.read_text()] == []
