"""The public training content summary that the EU AI Act requires for general-purpose AI models. No torch.

Legal basis: Article 53(1)(d) of Regulation (EU) 2024/1689. Sections, questions and ranges are those of the Commission's
template, published on 24 July 2025, C(2025) 8311 final. Sizes, sources and steps come from the lineage; the rest is
stated by a person (`facts`), or shown as a gap. Headrace trains on text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.models.card.facts import CardFacts, Gaps, SourceFacts
from pipeline.models.card.lineage import Ancestor

NAME = "training-content-summary.md"
TEMPLATE = (
    "https://digital-strategy.ec.europa.eu/en/library/"
    "explanatory-notice-and-template-public-summary-training-content-general-purpose-ai-models"
)
RANGES = ("Less than 1 billion tokens", "1 billion to 10 trillion tokens", "More than 10 trillion tokens")
"""The template's ranges for the size of text."""
_LARGE = 0.03
"""Share of its section's data above which the template calls a dataset large."""


def training_summary(lineage: Mapping[str, Any], facts: CardFacts, gaps: Gaps) -> str:
    """Makes the summary as Markdown.

    Args:
        lineage: lineage of the model.
        facts: facts that a person has stated.
        gaps: collector of missing facts.
    """
    parts = [
        *_general(lineage, facts, gaps),
        *_Sources(lineage, facts, gaps).lines(),
        *_processing(lineage, facts, gaps),
    ]
    return "\n".join(parts).rstrip() + "\n"


def size_range(tokens: int) -> str:
    """Returns the template's range for a number of tokens."""
    return RANGES[0] if tokens < 1e9 else RANGES[1] if tokens <= 1e13 else RANGES[2]


def distinct_sources(lineage: Mapping[str, Any]) -> list[Ancestor]:
    """Returns the sources of all corpora; a source of several training steps counts once."""
    found = {
        (corpus["fingerprint"], source["name"]): source
        for corpus in lineage["corpora"]
        for source in corpus.get("sources") or ()
    }
    return list(found.values())


def _general(lineage: Mapping[str, Any], facts: CardFacts, gaps: Gaps) -> Iterator[str]:
    provider = facts.provider
    yield "# Public Summary of Training Content for General-Purpose AI models\n"
    yield f"Article 53(1)(d) of Regulation (EU) 2024/1689 (AI Act), by the [Commission's template]({TEMPLATE}).\n"
    yield f"- Version of the Summary: {gaps.fill('summary_version', facts.summary_version)}"
    yield f"- Last update: {gaps.fill('last_update', facts.last_update)}\n"
    yield "## 1. General information\n\n### 1.1. Provider identification\n"
    name, contact = gaps.fill("provider.name", provider.name), gaps.fill("provider.contact", provider.contact)
    yield f"- Provider name and contact details: {name}, {contact}"
    representative = gaps.fill("provider.representative", provider.representative)
    yield f"- Authorised representative name and contact details: {representative}\n"
    yield "### 1.2. Model identification\n"
    yield f"- Versioned model name(s): {gaps.fill('name', facts.name)}"
    yield f"- Model dependencies: {_dependencies(lineage, facts, gaps)}"
    placed = gaps.fill("placed_on_market", facts.placed_on_market)
    yield f"- Date of placement of the model on the Union market: {placed}\n"
    yield "### 1.3. Modalities, overall training data size and other characteristics\n"
    yield "| modality | training data size | types of content |\n|---|---|---|"
    yield f"| [x] Text | {_size(lineage, gaps)} | {gaps.fill('content_types', facts.content_types)} |"
    for modality in ("Image", "Audio", "Video", "Other"):
        yield f"| [ ] {modality} | | |"
    latest = gaps.fill("latest_acquisition", facts.latest_acquisition)
    yield f"\n- Latest date of data acquisition/collection for model training: {latest}"
    linguistic = _linguistic(lineage, facts, gaps)
    yield f"- Description of the linguistic characteristics of the overall training data: {linguistic}"
    yield f"- Other relevant characteristics of the overall training data: {_characteristics(lineage)}\n"


def _dependencies(lineage: Mapping[str, Any], facts: CardFacts, gaps: Gaps) -> str:
    """Returns the base models: by the template, a model's modifier names them and reports only its own data."""
    given = [step for step in lineage["steps"] if step["step"] == "given"]
    if lineage["corpora"] and not given and not facts.base_model:
        return "none: the lineage begins with a training from initial values"
    note = " This summary covers the data of the modification." if given else ""
    return f"{', '.join(facts.base_model) or gaps.mark('base_model')}.{note}"


def _size(lineage: Mapping[str, Any], gaps: Gaps) -> str:
    sources, unknown = distinct_sources(lineage), _unrecorded(lineage)
    tokens = sum(source["tokens"] for source in sources)
    if not sources:
        return gaps.mark("lineage.tokens", "tokens of the training data: no manifest of a corpus was found")
    boxes = "<br>".join(f"[{'x' if each == size_range(tokens) else ' '}] {each}" for each in RANGES)
    counted = f"{tokens:,} tokens, {sum(source['bytes'] for source in sources):,} bytes of UTF-8"
    if unknown:
        missing = ", ".join(f"{key[:12]}" for key in unknown)
        mark = gaps.mark("lineage.tokens", f"tokens of the corpora {missing}: their directories were gone or changed")
        return f"{boxes}<br>{counted}, and the corpora {missing} {mark}"
    return f"{boxes}<br>{counted}"


def _unrecorded(lineage: Mapping[str, Any]) -> list[str]:
    return [corpus["fingerprint"] for corpus in lineage["corpora"] if not corpus.get("sources")]


def _linguistic(lineage: Mapping[str, Any], facts: CardFacts, gaps: Gaps) -> str:
    kept = sorted({code for corpus in lineage["corpora"] for code in corpus.get("languages") or ()})
    filtered = f" Cleaning kept documents in: {', '.join(kept)}." if kept else ""
    return f"{gaps.fill('linguistic_characteristics', facts.linguistic_characteristics)}{filtered}"


def _characteristics(lineage: Mapping[str, Any]) -> str:
    documents = sum(source["documents"] for source in distinct_sources(lineage))
    seen = sum(step.get("tokens") or 0 for step in lineage["steps"])
    return f"{documents:,} documents after cleaning and deduplication; {seen:,} tokens were seen in training"


class _Sources:
    """Section 2: every source of the corpora under the heading of its kind."""

    def __init__(self, lineage: Mapping[str, Any], facts: CardFacts, gaps: Gaps) -> None:
        self._facts, self._gaps, self._lineage = facts, gaps, lineage
        self._sources = distinct_sources(lineage)
        self._told = {source.name: source for source in facts.sources}
        self._untold = [source["name"] for source in self._sources if source["name"] not in self._told]
        self._distilled = [step for step in lineage["steps"] if step["step"] == "distillation"]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the section."""
        yield "## 2. List of data sources\n"
        yield from self._table()
        yield from self._public()
        yield "### 2.2. Private non-publicly available datasets obtained from third parties\n"
        yield from self._listed("2.2.1. Datasets commercially licensed by rightsholders", "licensed", level="####")
        yield from self._listed("2.2.2. Private datasets obtained from other third parties", "private", level="####")
        yield from self._crawled()
        yield from self._user_data()
        yield from self._synthetic()
        yield from self._listed("2.6. Other sources of data", "other")

    def _table(self) -> Iterator[str]:
        if not self._sources:
            yield "No manifest of a corpus was found: the sources are not known.\n"
            return
        total = sum(source["tokens"] for source in self._sources) or 1
        yield "| source | kind | documents | bytes | tokens | share of tokens |\n|---|---|---:|---:|---:|---:|"
        for source in self._sources:
            counts = " | ".join(f"{source[key]:,}" for key in ("documents", "bytes", "tokens"))
            yield f"| {source['name']} | {self._kind(source)} | {counts} | {source['tokens'] / total:.1%} |"
        yield ""

    def _kind(self, source: Mapping[str, Any]) -> str:
        told = self._told.get(source["name"])
        if told is not None:
            return told.kind.replace("_", " ")
        hub = f"; data prep took it from {source['hub']}" if source.get("hub") else ""
        return self._gaps.mark("sources[].kind", f"how the data was obtained, for: {', '.join(self._untold)}") + hub

    def _of(self, *kinds: str) -> list[tuple[Ancestor, SourceFacts]]:
        pairs = [(source, self._told[source["name"]]) for source in self._sources if source["name"] in self._told]
        return [(source, told) for source, told in pairs if told.kind in kinds]

    def _answer(self, *kinds: str, known: bool = False) -> str:
        """Yes or no; a gap if sources of unstated kind might make the answer yes."""
        if known or self._of(*kinds):
            return "[x] Yes [ ] No"
        open_question = self._untold or _unrecorded(self._lineage) or not self._sources
        if open_question:
            return f"[ ] Yes [ ] No {self._gaps.mark('sources[].kind', 'how the data of every source was obtained')}"
        return "[ ] Yes [x] No"

    def _public(self) -> Iterator[str]:
        found = self._of("public")
        yield "### 2.1. Publicly available datasets\n"
        yield f"Have you used publicly available datasets to train the model? {self._answer('public')}\n"
        if not found:
            return
        total = sum(source["tokens"] for source, _ in found) or 1
        large = [pair for pair in found if pair[0]["tokens"] / total > _LARGE]
        yield "Modality: [x] Text [ ] Image [ ] Video [ ] Audio [ ] Other\n"
        yield "List of large publicly available datasets:\n"
        yield from (self._item(*pair) for pair in large)
        yield "\nGeneral description of other publicly available datasets not listed above:\n"
        yield from [self._item(*pair) for pair in found if pair not in large] or ["- none"]
        yield ""

    def _item(self, source: Mapping[str, Any], told: SourceFacts) -> str:
        number = next(i for i, each in enumerate(self._facts.sources) if each is told)
        where = (
            told.url or source.get("hub") or self._gaps.mark(f"sources.{number}.url", f"where {told.name} is published")
        )
        words = [told.title or told.name, where, f"{source['tokens']:,} tokens"]
        words += [f"license {told.license}"] if told.license else []
        words += [told.description] if told.description else []
        return f"- {', '.join(words)}"

    def _listed(self, heading: str, kind: str, *, level: str = "###") -> Iterator[str]:
        yield f"{level} {heading}\n"
        yield f"Used to train the model? {self._answer(kind)}\n"
        found = self._of(kind)
        for source, told in found:
            text = told.description or self._gaps.mark("sources[].description", f"what {told.name} consists of")
            yield f"- {told.title or told.name}: {text}, {source['tokens']:,} tokens of text"
        yield from [""] if found else []

    def _crawled(self) -> Iterator[str]:
        crawl, fill = self._facts.crawl, self._gaps.fill
        yield "### 2.3. Data crawled and scraped from online sources\n"
        yield f"Were crawlers used by the provider or on its behalf? {self._answer('crawled')}\n"
        if not self._of("crawled"):
            return
        yield f"- Crawler name(s)/identifier(s): {fill('crawl.names', ', '.join(crawl.names))}"
        yield f"- Purposes of the crawler(s): {fill('crawl.purposes', crawl.purposes)}"
        yield f"- General description of crawler behaviour: {fill('crawl.behaviour', crawl.behaviour)}"
        yield f"- Period of data collection: {fill('crawl.period', crawl.period)}"
        yield f"- Type of content and online sources crawled: {fill('crawl.content', crawl.content)}"
        yield "- Type of modality covered: [x] Text [ ] Image [ ] Video [ ] Audio [ ] Other"
        yield f"- Summary of the most relevant domain names crawled: {self._domains()}\n"

    def _domains(self) -> str:
        listed = self._facts.crawl.listed
        if listed is None:
            return self._gaps.mark("crawl.domains")
        rule = "the top 5 %, at most 1,000," if self._facts.sme else "the top 10 %"
        which = f"{rule} of {listed.all_domains:,} domains by bytes of text, with {listed.share:.1%} of the bytes"
        return f"{which}: {', '.join(listed.names)}"

    def _user_data(self) -> Iterator[str]:
        yield "### 2.4. User data\n"
        interactions, services = self._answer("user_interactions"), self._answer("user_services")
        yield f"Was data from user interactions with the AI model used to train the model? {interactions}\n"
        others = (
            "Was data collected from user interactions with the provider's other services or products used to train"
        )
        yield f"{others} the model? {services}\n"
        if self._of("user_interactions", "user_services"):
            yield f"- Services or products: {self._gaps.fill('user_data', self._facts.user_data)}"
            yield "- Type of modality covered: [x] Text [ ] Image [ ] Video [ ] Audio [ ] Other\n"

    def _synthetic(self) -> Iterator[str]:
        facts, fill = self._facts.synthetic, self._gaps.fill
        yield "### 2.5. Synthetic data\n"
        answer = self._answer("synthetic", known=bool(self._distilled))
        yield f"Was synthetic AI-generated data created by the provider or on its behalf to train the model? {answer}\n"
        for step in self._distilled:
            yield f"- The model was distilled from a teacher, fingerprint `{str(step.get('teacher_fingerprint'))[:12]}`"
        if self._of("synthetic") or self._distilled:
            yield "- Modality of the synthetic data: [x] Text [ ] Image [ ] Video [ ] Audio [ ] Other"
            names = ", ".join(facts.models) or ("none" if facts.other_models else "")
            yield f"- General-purpose AI model(s) used to generate it: {fill('synthetic.models', names)}"
            if facts.other_models:
                yield f"- Other AI models used to generate it: {facts.other_models}"
            yield ""


def _processing(lineage: Mapping[str, Any], facts: CardFacts, gaps: Gaps) -> Iterator[str]:
    yield "## 3. Data processing aspects\n"
    yield "### 3.1. Respect of reservation of rights from text and data mining exception or limitation\n"
    signed = facts.code_of_practice
    box = f"[{'x' if signed else ' '}] Yes [{'x' if signed is False else ' '}] No"
    mark = gaps.mark("code_of_practice") if signed is None else ""
    yield f"Are you a signatory to the Code of Practice for general-purpose AI models? {box} {mark}".rstrip() + "\n"
    yield f"Measures before and during data collection: {gaps.fill('rights_reservation', facts.rights_reservation)}\n"
    yield "### 3.2. Removal of illegal content\n"
    yield f"General description of measures taken: {gaps.fill('illegal_content', facts.illegal_content)}\n"
    yield "### 3.3. Other information\n"
    yield from _steps_of(lineage["corpora"])


def _steps_of(corpora: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the steps of data prep, as the manifests record them."""
    for corpus in corpora:
        if "cleaning" not in corpus:
            yield f"- Corpus `{corpus['fingerprint'][:12]}`: its processing is not recorded."
            continue
        cleaned = ", ".join(corpus["cleaning"]) or "none"
        removed = ", ".join(corpus["deduplication"]) or "none"
        yield f"- Corpus `{corpus['fingerprint'][:12]}`: cleaning steps {cleaned}; deduplication {removed}."
    yield ""
