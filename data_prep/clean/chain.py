"""The cleaning chain: the config's cleaning steps, built once per process and applied to each text in order.

A step drops the text with a reason, edits it, or passes it on. The first drop ends the chain. The result depends only
on the text, its record's fields and the config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol
from unicodedata import unidata_version

from data_prep.clean.blocklists import UrlBlocklist, WordBlocklist
from data_prep.clean.c4 import C4
from data_prep.clean.decontamination import Decontaminate
from data_prep.clean.document import Document
from data_prep.clean.external import Datatrove, OwnFilter
from data_prep.clean.fineweb import FineWebQuality
from data_prep.clean.gopher import GopherQuality, GopherRepetition
from data_prep.clean.language import Language
from data_prep.clean.pii import PII
from data_prep.clean.repair import Repair
from data_prep.clean.spacy_words import SpacySplitter
from data_prep.clean.words import PUNCTUATION, WHITESPACE, Splitter
from data_prep.config import cleaning as config
from data_prep.config.cleaning import WordKind


@dataclass(frozen=True, slots=True)
class CleanedText:
    """A text that passed all steps, with their edits."""

    text: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A text that a step dropped.

    Attributes:
        step: label of the step.
        reason: short phrase from a fixed set; the manifest counts drops by it.
    """

    step: str
    reason: str


class Rule(Protocol):
    """A cleaning step."""

    def __call__(self, document: Document, fields: Mapping[str, Any], /) -> Document | str:
        """Returns the same document, an edited one, or the reason for dropping it."""


class Chain:
    """Cleaning steps in order. Made by `build_chain`.

    Attributes:
        fields: names of the other record fields that the steps read.
        edits: number of texts edited so far, by step, including texts that a later step dropped.
    """

    def __init__(self, rules: Sequence[tuple[str, Rule]], fields: tuple[str, ...]) -> None:
        self._rules = list(rules)
        self.fields = fields
        self.edits: Counter[str] = Counter()

    def clean(self, text: str, fields: Mapping[str, Any]) -> CleanedText | Dropped:
        """Applies the steps to a text.

        Args:
            text: the text.
            fields: values of the record's fields among `self.fields`.
        """
        document = Document(text)
        for name, rule in self._rules:
            outcome = rule(document, fields)
            if isinstance(outcome, str):
                return Dropped(name, outcome)
            if outcome is not document:
                self.edits[name] += 1
                if not outcome.text:
                    return Dropped(name, "nothing left")
                document = outcome
        return CleanedText(document.text)


def build_chain(steps: Sequence[config.StepSection], *, at: str = "clean") -> Chain:
    """Builds the chain of cleaning steps: loads libraries, models and lists.

    Args:
        steps: sections, in the order of application.
        at: dotted config path of the list of steps, for error messages.

    Raises:
        ConfigError: a package is not installed, or a file is missing or has no entries.
    """
    factory = _RuleFactory()
    rules = [(step_label(section), factory.make(section, field=f"{at}.{i}")) for i, section in enumerate(steps)]
    return Chain(rules, record_fields(steps))


def record_fields(steps: Sequence[config.StepSection]) -> tuple[str, ...]:
    """Names of the other record fields that the steps read, each once, in order."""
    names: list[str] = []
    for section in steps:
        if isinstance(section, config.UrlBlocklistSection):
            names.append(section.field)
        elif isinstance(section, config.DatatroveSection):
            names += section.metadata
        elif isinstance(section, config.FunctionSection):
            names += section.fields
    return tuple(dict.fromkeys(names))


def step_label(section: config.StepSection) -> str:
    """Label of a step in counts of drops and edits: its name; the class or function of a filter from elsewhere."""
    if isinstance(section, config.FunctionSection):
        return section.function
    return f"datatrove.{section.filter}" if isinstance(section, config.DatatroveSection) else section.step


def dependency_versions(steps: Sequence[config.StepSection]) -> dict[str, str]:
    """Versions on which the steps' results may depend: packages ("missing" if not installed), and Unicode."""
    packages = {package for section in steps for package in section.packages()}
    return {"unicode": unidata_version} | {package: _version(package) for package in sorted(packages)} if steps else {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _external(section: config.DatatroveSection | config.FunctionSection, field: str) -> Rule:
    if isinstance(section, config.FunctionSection):
        return OwnFilter(section, field=field)
    return Datatrove(section, field=field)


class _RuleFactory:
    """Makes the rules of one chain; rules with the same word definition share a splitter."""

    def __init__(self) -> None:
        self._splitters: dict[WordKind, Splitter] = {"whitespace": WHITESPACE, "punctuation": PUNCTUATION}

    def make(self, section: config.StepSection, *, field: str) -> Rule:
        """Makes the rule of a section."""
        match section:
            case config.UnicodeSection():
                return Repair(section, field=field)
            case config.LanguageSection():
                return Language(section, field=field)
            case config.C4Section():
                return C4(section)
            case config.PIISection():
                return PII(section)
            case config.DatatroveSection() | config.FunctionSection():
                return _external(section, field)
        return self._quality_rule(section, field) or self._list_rule(section, field)

    def _quality_rule(self, section: config.StepSection, field: str) -> Rule | None:
        match section:
            case config.GopherRepetitionSection():
                return GopherRepetition(section, self._splitter(section.words, field))
            case config.GopherQualitySection():
                return GopherQuality(section, self._splitter(section.words, field))
            case config.FineWebQualitySection():
                return FineWebQuality(section, self._splitter(section.words, field))
        return None

    def _list_rule(self, section: config.StepSection, field: str) -> Rule:
        match section:
            case config.UrlBlocklistSection():
                return UrlBlocklist(section, field=field)
            case config.WordBlocklistSection():
                return WordBlocklist(section, field=field)
            case config.DecontaminateSection():
                return Decontaminate(section, field=field)
        raise AssertionError(f"no rule for {section.step}")

    def _splitter(self, kind: WordKind, field: str) -> Splitter:
        if kind not in self._splitters:
            self._splitters[kind] = SpacySplitter(field=f"{field}.words")
        return self._splitters[kind]
