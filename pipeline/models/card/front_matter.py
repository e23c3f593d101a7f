"""The YAML in front of a card, as the Hugging Face Hub reads it, for models, runs and datasets. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from foundation.task_figures import names_in
from pipeline.models.card.facts import CardFacts, Gaps
from pipeline.models.card.lineage import KEY

FrontMatter = dict[str, Any]
"""The YAML at the head of a model card, or a part of it."""

_HUB_DATASET = re.compile(r"(?:hf://datasets/)?([\w.-]+/[\w.-]+)(?:@[\w.-]+)?(?:/.*)?")
_SIZES = ((1e3, "n<1K"), (1e4, "1K<n<10K"), (1e5, "10K<n<100K"), (1e6, "100K<n<1M"), (1e7, "1M<n<10M"))
_LARGE_SIZES = ((1e8, "10M<n<100M"), (1e9, "100M<n<1B"), (1e10, "1B<n<10B"), (1e11, "10B<n<100B"), (1e12, "100B<n<1T"))


def as_text(about: Mapping[str, Any]) -> str:
    """Formats front matter, with its fences."""
    return f"---\n{yaml.safe_dump(dict(about), sort_keys=False, allow_unicode=True)}---\n"


def front_matter_of(text: str) -> FrontMatter:
    """Parses the YAML in front of a card."""
    parsed: FrontMatter = yaml.safe_load(text.split("---\n", 2)[1])
    return parsed


def of_model(
    details: Mapping[str, Any], facts: CardFacts, gaps: Gaps, *, library: str | None, tags: Sequence[str], title: str
) -> FrontMatter:
    """Makes the Hub's metadata of a model: license, language, library, task, tags, data, figures as a `model-index`.

    Args:
        details: details of the model's manifest; held-out figures in `after`, or `heldout`.
        facts: facts that a person has stated.
        gaps: collector of missing facts that the Hub asks for.
        library: library that loads the model, as the Hub names it, or None.
        tags: tags besides those in the facts.
        title: title of the card, used as the model's name if the facts have none.
    """
    lineage = details[KEY]
    about = _stated(facts, gaps, languages(facts, lineage["corpora"]))
    about |= {"library_name": library} if library else {}
    about |= {"pipeline_tag": "text-generation", "tags": list(dict.fromkeys([*tags, *facts.tags]))}
    if datasets := facts.datasets or list(hub_datasets(lineage["corpora"])):
        about["datasets"] = datasets
    if facts.base_model:
        about["base_model"] = facts.base_model[0] if len(facts.base_model) == 1 else facts.base_model
    elif any(step["step"] == "given" for step in lineage["steps"]):
        gaps.mark("base_model")
    metrics = list(_metrics(details))
    if results := [*([_result(details, metrics)] if metrics else []), *_task_results(details)]:
        about["model-index"] = [{"name": facts.name or title, "results": results}]
    return about


def of_dataset(
    facts: CardFacts,
    gaps: Gaps,
    *,
    documents: int,
    known_languages: Sequence[str],
    sources: Iterable[Mapping[str, Any]],
) -> FrontMatter:
    """Makes the Hub's metadata of a tokens directory.

    Args:
        facts: facts that a person has stated.
        gaps: collector of missing facts that the Hub asks for.
        documents: number of documents in all splits.
        known_languages: ISO 639 codes of the languages that the cleaning kept.
        sources: sources of the corpus, as a lineage has them.
    """
    about = _stated(facts, gaps, facts.language or list(known_languages))
    about |= {"pretty_name": facts.name} if facts.name else {}
    about |= {"task_categories": ["text-generation"], "size_categories": [_size_category(documents)]}
    if found := facts.datasets or list(hub_datasets([{"sources": list(sources)}])):
        about["source_datasets"] = found
    # the Hub's viewer cannot show binary token files
    return about | {"tags": ["headrace", "megatron", *facts.tags], "viewer": False}


def languages(facts: CardFacts, corpora: Iterable[Mapping[str, Any]]) -> list[str]:
    """ISO 639 codes that a person has stated, or else that cleaning kept; [] if a corpus has unknown languages."""
    kept = [corpus.get("languages") or [] for corpus in corpora]
    return facts.language or (sorted({code for codes in kept for code in codes}) if all(kept) else [])


def hub_datasets(corpora: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the datasets that data prep downloaded from the Hugging Face Hub, each once."""
    seen: set[str] = set()
    for source in (source for corpus in corpora for source in corpus.get("sources") or ()):
        found = _HUB_DATASET.fullmatch(source.get("hub") or "")
        if found and found[1] not in seen:
            seen.add(found[1])
            yield found[1]


def _stated(facts: CardFacts, gaps: Gaps, known: list[str]) -> FrontMatter:
    """Returns the license and languages, which the Hub asks for on every card."""
    about: FrontMatter = {}
    if known:
        about["language"] = known
    else:
        gaps.mark("language")
    if facts.license:
        about["license"] = facts.license
    else:
        gaps.mark("license")
    return about


def _metrics(details: Mapping[str, Any]) -> Iterator[FrontMatter]:
    measured = details.get("after") or details.get("heldout") or {}
    names = {
        "loss": ("held-out loss, nats per token", "loss_nats"),
        "perplexity": ("held-out perplexity", "perplexity"),
        "bits_per_byte": ("held-out bits per byte", "bits_per_byte"),
    }
    for kind, (name, key) in names.items():
        if isinstance(measured.get(key), int | float):
            yield {"type": kind, "name": name, "value": measured[key]}


def _result(details: Mapping[str, Any], metrics: list[FrontMatter]) -> FrontMatter:
    split = (details.get("data") or {}).get("split", "heldout")
    return {
        "task": {"type": "text-generation", "name": "Text generation"},
        "dataset": {"type": "held-out", "name": f"{split} split of the corpus"},
        "metrics": metrics,
    }


def _task_results(details: Mapping[str, Any]) -> Iterator[FrontMatter]:
    """Yields the figures of each task; `args` has the interval and the number of samples."""
    for task, figures in (details.get("tasks") or {}).items():
        ends = {name: {end: figures.get(f"{name}_{end}") for end in ("low", "high")} for name in names_in(figures)}
        metrics = [
            {
                "type": name,
                "name": name.replace("_", " "),
                "value": figures[name],
                "args": {"samples": figures["samples"], **{end: each for end, each in own.items() if each is not None}},
            }
            for name, own in ends.items()
        ]
        yield {
            "task": {"type": "text-generation", "name": "Text generation"},
            "dataset": {"type": task, "name": task},
            "metrics": metrics,
        }


def _size_category(documents: int) -> str:
    return next((name for bound, name in (*_SIZES, *_LARGE_SIZES) if documents < bound), "n>1T")
