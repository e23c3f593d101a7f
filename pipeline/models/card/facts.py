"""Facts that only a person knows about a model or dataset (license, provider, ...), and gaps for missing facts.

A file of facts is JSON or YAML and is read like a config file: `headrace card --facts FILE`, `headrace export --facts
FILE`. An export records the facts in the manifest, `details["facts"]`; pruning and quantization copy them. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from foundation import configfile
from foundation.directory import MANIFEST, read_manifest
from foundation.errors import ConfigError
from foundation.json_schema import node_at, schema_of
from foundation.paths import LocalPath
from foundation.section import Index, Section, parse

KEY = "facts"
SourceKind = Literal[
    "public", "licensed", "private", "crawled", "user_interactions", "user_services", "synthetic", "other"
]
_SME_DOMAINS = 1000
_OF_ONE_MODEL = ("name", "description", "url", "published", "placed_on_market", "summary_version", "last_update")


class ProviderFacts(Section):
    """Who places the model on the market."""

    name: str | None = Field(None, min_length=1, description='name of the provider, e.g. "Example e.V."')
    contact: str | None = Field(
        None, min_length=1, description='contact details of the provider, e.g. "models@example.org"'
    )
    representative: str | None = Field(
        None,
        min_length=1,
        description='authorised representative in the Union, with contact details, or "none", e.g. "none"',
    )


class SourceFacts(Section):
    """Facts about one source of the corpus that the manifest does not record."""

    name: str = Field(min_length=1, description='name of the source in the corpus config, e.g. "web"')
    kind: SourceKind = Field(
        description='how the data was obtained, by the summary\'s sections 2.1 to 2.6: "public" (publicly available '
        'dataset), "licensed" (by rightsholders), "private" (from another third party), "crawled" (by the provider), '
        '"user_interactions" (with the model), "user_services" (with other services), "synthetic" or "other"',
    )
    title: str | None = Field(None, min_length=1, description='name that others know the source by, e.g. "FineWeb-Edu"')
    url: str | None = Field(
        None, min_length=1, description='where it is published, e.g. "https://huggingface.co/datasets/org/name"'
    )
    license: str | None = Field(None, min_length=1, description='its license, e.g. "odc-by"')
    description: str | None = Field(
        None, min_length=1, description='what it consists of, e.g. "encyclopedia articles in German"'
    )


class ListedDomains(Section):
    """The domains that section 2.3 of the summary lists; made of the file `crawl.domains`."""

    names: list[str] = Field(description='the domains, the largest first, e.g. ["example.org"]')
    all_domains: Index = Field(description="number of all domains, e.g. 5000")
    share: float = Field(ge=0, le=1, description="share of the bytes of text that the listed ones have, e.g. 0.7")


class CrawlFacts(Section):
    """Data that was crawled by the provider, or on behalf of it."""

    names: list[str] = Field([], description='names or identifiers of the crawlers, e.g. ["ExampleBot/1.0"]')
    purposes: str | None = Field(None, min_length=1, description='purposes of the crawlers, e.g. "training data"')
    behaviour: str | None = Field(
        None, min_length=1, description='what the crawlers respect, e.g. "robots.txt; no paywalls, no captchas"'
    )
    period: str | None = Field(None, min_length=1, description='period of collection, e.g. "11/2024 to 05/2025"')
    content: str | None = Field(
        None, min_length=1, description='type of content and of online sources, e.g. "municipal web pages"'
    )
    domains: LocalPath | None = Field(
        None, description='path of a file with a domain and its bytes of text on each line, e.g. "domains.tsv"'
    )
    listed: ListedDomains | None = Field(
        None, description="The domains that section 2.3 of the summary lists; made of the file `crawl.domains`."
    )


class SyntheticFacts(Section):
    """Data that models made."""

    models: list[str] = Field([], description='general-purpose models on the market that made it, e.g. ["org/name"]')
    other_models: str | None = Field(
        None, min_length=1, description='other models that made it, e.g. "our own teacher of 1B parameters"'
    )


class CardFacts(Section):
    """Facts about a model or a dataset that no manifest has."""

    name: str | None = Field(
        None, min_length=1, description='name with its version, as published, e.g. "example/river-135m-v1"'
    )
    version: str | None = Field(None, min_length=1, description='version of the dataset, e.g. "1.0.0"')
    description: str | None = Field(
        None,
        min_length=1,
        description='what it is, in a sentence, e.g. "Articles in German."',
    )
    license: str | None = Field(
        None, min_length=1, description='license, by the identifier that the Hugging Face Hub knows, e.g. "apache-2.0"'
    )
    language: list[str] = Field([], description='languages, as ISO 639 codes, e.g. ["en", "de"]')
    base_model: list[str] = Field([], description='names of the models it was made from, e.g. ["org/name"]')
    datasets: list[str] = Field([], description='names of the datasets it was trained on, e.g. ["org/name"]')
    tags: list[str] = Field([], description='further tags of the front matter, e.g. ["legal"]')
    url: str | None = Field(None, min_length=1, description='where it is published, e.g. "https://example.org/river"')
    citation: str | None = Field(None, min_length=1, description="how to cite it, e.g. BibTeX")
    published: str | None = Field(
        None, pattern=r"^\d{4}-\d{2}-\d{2}$", description='date of publication, e.g. "2026-11-27"'
    )
    provider: ProviderFacts = Field(ProviderFacts(), description="Who places the model on the market.")
    placed_on_market: str | None = Field(
        None, min_length=1, description='date of placement on the Union market, e.g. "2026-12-01"'
    )
    summary_version: str | None = Field(None, min_length=1, description='version of the summary, e.g. "1.0"')
    last_update: str | None = Field(None, min_length=1, description='date of the summary, e.g. "2026-11-27"')
    content_types: str | None = Field(
        None, min_length=1, description='types of content of the corpus, e.g. "non-fiction text, source code"'
    )
    latest_acquisition: str | None = Field(
        None, min_length=1, description='latest date of data acquisition, e.g. "05/2026, not trained continuously"'
    )
    linguistic_characteristics: str | None = Field(
        None, min_length=1, description='languages of the corpus and their shares, e.g. "English 90 %, German 10 %"'
    )
    sources: list[SourceFacts] = Field([], description="What is known of each source of the corpus.")
    crawl: CrawlFacts = Field(CrawlFacts(), description="Data that was crawled by the provider, or on behalf of it.")
    user_data: str | None = Field(
        None, min_length=1, description='services that user data was collected with, e.g. "our forum"'
    )
    synthetic: SyntheticFacts = Field(SyntheticFacts(), description="Data that models made.")
    code_of_practice: bool | None = Field(
        None, description="whether the provider signed the Code of Practice for general-purpose AI models"
    )
    rights_reservation: str | None = Field(
        None,
        min_length=1,
        description='measures that respect reservations of rights (text and data mining), e.g. "robots.txt"',
    )
    illegal_content: str | None = Field(
        None, min_length=1, description='measures that remove illegal content, e.g. "the IWF blocklist of URLs"'
    )
    sme: bool = Field(False, description="true for a small or medium-sized enterprise: fewer domains are listed")

    @model_validator(mode="after")
    def _check_sources(self) -> CardFacts:
        names = [source.name for source in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two entries of sources have the name '{twice[0]}': keep one of them")
        return self


class Gaps:
    """Facts that are missing in a paper, in the order of the paper.

    Attributes:
        missing: key of a missing fact -> its meaning.
    """

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}

    def mark(self, key: str, meaning: str | None = None) -> str:
        """Records a gap, and returns the text to show in its place.

        Args:
            key: dotted key of `CardFacts`, e.g. `provider.name`.
            meaning: meaning of the key, in words; None for the schema's.
        """
        self.missing.setdefault(key, meaning or _description(key))
        return f"**[GAP: {key}]**"

    def fill(self, key: str, value: str | None) -> str:
        """Returns the value, or the mark of a gap."""
        return value or self.mark(key)


def load_facts(path: str | Path) -> CardFacts:
    """Reads a file of facts.

    Raises:
        ConfigError: the file is missing, a key is unknown, a value is wrong, or a list of domains cannot be read.
    """
    facts = parse(CardFacts, configfile.load(path))
    if facts.crawl.domains is None:
        return facts
    sizes = read_domains(facts.crawl.domains)
    crawl = facts.crawl.model_copy(update={"domains": None, "listed": top_domains(sizes, sme=facts.sme)})
    return facts.model_copy(update={"crawl": crawl})


def facts_of(details: Mapping[str, Any]) -> CardFacts:
    """Returns the facts in a manifest's details; all unset if there are none."""
    return parse(CardFacts, details.get(KEY) or {}, at=KEY)


def recorded_facts(model: Path) -> dict[str, Any]:
    """Returns a model's facts for the details of a step that reads the model: {"facts": ...}, or {}.

    Facts of one model alone, e.g. its date, are dropped; a model with a published name becomes the base model.
    """
    if not (model / MANIFEST).is_file():
        return {}
    found = read_manifest(model, kind="model").details.get(KEY)
    if found is None:
        return {}
    base = {"base_model": [found["name"]]} if found.get("name") else {}
    return {KEY: {key: value for key, value in found.items() if key not in _OF_ONE_MODEL} | base}


def read_domains(path: str | Path) -> dict[str, int]:
    """Reads domain -> bytes of text from a file with both on each line, separated by white space.

    Raises:
        ConfigError: the file cannot be read, or a line has another form.
    """
    field, sizes = "crawl.domains", dict[str, int]()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            field, str(path), why=str(error), remedy="a text file: a domain and its bytes a line"
        ) from None
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if words and (len(words) != 2 or not words[1].isdecimal()):
            why = f"line {number} is {line[:60]!r}"
            raise ConfigError(
                field, str(path), why=why, remedy='a domain and its bytes a line, e.g. "example.org 4096"'
            )
        if words:
            sizes[words[0]] = sizes.get(words[0], 0) + int(words[1])
    return sizes


def top_domains(sizes: Mapping[str, int], *, sme: bool) -> ListedDomains:
    """Selects the domains that section 2.3 of the summary lists.

    The template asks for the top 10 % of all domains by the size of their content. Small and medium-sized enterprises
    list the top 5 % or 1,000 domains, whichever is fewer.

    Args:
        sizes: domain -> bytes.
        sme: whether the provider is a small or medium-sized enterprise.
    """
    ordered = sorted(sizes, key=lambda domain: (-sizes[domain], domain))
    count = min(math.ceil(len(ordered) * 0.05), _SME_DOMAINS) if sme else math.ceil(len(ordered) * 0.1)
    listed = ordered[:count]
    share = sum(sizes[domain] for domain in listed) / (sum(sizes.values()) or 1)
    return ListedDomains(names=listed, all_domains=len(ordered), share=share)


def known_sources(facts: CardFacts, names: Iterable[str]) -> None:
    """Checks that every source in the facts is in the lineage.

    Raises:
        ConfigError: a source is not.
    """
    known = list(names)
    for number, source in enumerate(facts.sources):
        if source.name not in known:
            raise ConfigError(
                f"sources.{number}.name",
                source.name,
                why="the lineage has no source of this name",
                remedy=f"one of {', '.join(known)}" if known else "remove it: the lineage names no sources",
            )


def _description(key: str) -> str:
    node = node_at(schema_of(CardFacts), key.split("."))
    assert node is not None, key
    return str(node["description"])
