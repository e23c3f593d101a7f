"""The cleaning chain: the config's steps, built once per process, applied to one text after the other.

A step drops the text with a reason, changes it, or lets it pass. The first drop ends the chain. What becomes of a
text depends on the text, its fields and the config alone.
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
from data_prep.clean.external import Datatrove
from data_prep.clean.fineweb import FineWebQuality
from data_prep.clean.gopher import GopherQuality, GopherRepetition
from data_prep.clean.language import Language
from data_prep.clean.pii import PII
from data_prep.clean.repair import Repair
from data_prep.clean.spacy_words import SpacySplitter
from data_prep.clean.statistics import Statistics
from data_prep.clean.words import PUNCTUATION, WHITESPACE, Splitter
from data_prep.config import cleaning as config
from data_prep.config.cleaning import WordKind


@dataclass(frozen=True, slots=True)
class Kept:
    """A text that passed, as the steps left it."""

    text: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A text that a step refused. step: its name in the config. reason: a few words that never change."""

    step: str
    reason: str


class Rule(Protocol):
    """What a step does."""

    def __call__(self, text: Statistics, fields: Mapping[str, Any], /) -> Statistics | str:
        """The same text, a new one, or the reason why it is dropped."""


class Chain:
    """Steps in order. Made by `build`.

    Attributes:
        fields: names of the record's further fields that the steps read.
        edits: texts changed so far, by step; a text that was dropped later counts too.
    """

    def __init__(self, rules: Sequence[tuple[str, Rule]], fields: tuple[str, ...]) -> None:
        self._rules = list(rules)
        self.fields = fields
        self.edits: Counter[str] = Counter()

    def clean(self, text: str, fields: Mapping[str, Any]) -> Kept | Dropped:
        """What is left of a text.

        Args:
            text: the text.
            fields: the values of those of `self.fields` that the record has.
        """
        here = Statistics(text)
        for name, rule in self._rules:
            outcome = rule(here, fields)
            if isinstance(outcome, str):
                return Dropped(name, outcome)
            if outcome is not here:
                self.edits[name] += 1
                if not outcome.text:
                    return Dropped(name, "nothing left")
                here = outcome
        return Kept(here.text)


def build(steps: Sequence[config.StepSection], *, at: str = "clean") -> Chain:
    """The chain of these steps: loads libraries, models and lists.

    Args:
        steps: sections, in the order in which they are to be applied.
        at: the config field that holds them.

    Raises:
        ConfigError: a package is not installed, or a file is missing or has nothing in it.
    """
    shop = _Workshop()
    rules = [(label(section), shop.make(section, field=f"{at}.{i}")) for i, section in enumerate(steps)]
    return Chain(rules, record_fields(steps))


def record_fields(steps: Sequence[config.StepSection]) -> tuple[str, ...]:
    """Names of the record's further fields that the steps read, each once, in order."""
    names: list[str] = []
    for section in steps:
        if isinstance(section, config.UrlBlocklistSection):
            names.append(section.field)
        elif isinstance(section, config.DatatroveSection):
            names += section.metadata
    return tuple(dict.fromkeys(names))


def label(section: config.StepSection) -> str:
    """What drops and edits call the step: its name, and for a filter of datatrove that of its class."""
    return f"datatrove.{section.filter}" if isinstance(section, config.DatatroveSection) else section.step


def versions(steps: Sequence[config.StepSection]) -> dict[str, str]:
    """Versions of what the steps' results may depend on: packages ("missing" if not installed), and Unicode."""
    packages = {package for section in steps for package in section.packages()}
    return {"unicode": unidata_version} | {package: _version(package) for package in sorted(packages)} if steps else {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


class _Workshop:
    """Makes the rules of one chain, with one splitter per definition of a word."""

    def __init__(self) -> None:
        self._splitters: dict[WordKind, Splitter] = {"whitespace": WHITESPACE, "punctuation": PUNCTUATION}

    def make(self, section: config.StepSection, *, field: str) -> Rule:
        """The rule of a section."""
        match section:
            case config.UnicodeSection():
                return Repair(section, field=field)
            case config.LanguageSection():
                return Language(section, field=field)
            case config.C4Section():
                return C4(section)
            case config.PIISection():
                return PII(section)
            case config.DatatroveSection():
                return Datatrove(section, field=field)
        return self._quality(section, field) or self._list(section, field)

    def _quality(self, section: config.StepSection, field: str) -> Rule | None:
        match section:
            case config.GopherRepetitionSection():
                return GopherRepetition(section, self._splitter(section.words, field))
            case config.GopherQualitySection():
                return GopherQuality(section, self._splitter(section.words, field))
            case config.FineWebQualitySection():
                return FineWebQuality(section, self._splitter(section.words, field))
        return None

    def _list(self, section: config.StepSection, field: str) -> Rule:
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
