"""The config of the cleaning chain: one section per step, chosen by its "step".

Thresholds default to the papers'; null switches a rule off. `Steps` is the type of the config's field `clean`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from headrace.base.errors import ConfigError
from headrace.base.section import Count, Index, Section, parse, suggest

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]

WordKind = Literal["whitespace", "punctuation", "spacy"]

_WORDS = '"whitespace", "punctuation" (marks stand apart, as in FineWeb) or "spacy" (the same by spaCy)'


class StepSection(Section):
    """Base of the steps."""

    step: str

    def files(self) -> list[str]:
        """Files that the step reads: what is in them belongs to the identity of the job."""
        return []

    def packages(self) -> list[str]:
        """Packages, as pip calls them, whose version may change what the step does."""
        return []


class UnicodeSection(StepSection):
    """Unicode normalisation and repair of mojibake, by ftfy."""

    step: Literal["unicode"] = Field("unicode", description='"unicode"')
    normalization: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = Field(
        "NFC", description='Unicode normal form: "NFC", "NFD", "NFKC", "NFKD" or null'
    )
    mojibake: bool = Field(True, description="repair text that was decoded with the wrong encoding")
    html_entities: bool | Literal["auto"] = Field(
        "auto", description='replace &amp; and the like; "auto": in lines before the first "<" of the text'
    )
    control_characters: bool = Field(True, description="remove control characters, terminal escapes, lone surrogates")
    line_breaks: bool = Field(False, description="make every kind of line break a line feed")
    ligatures: bool = Field(False, description="replace Latin ligatures such as ﬁ by letters")
    width: bool = Field(False, description="replace half- and full-width characters by ordinary ones")
    quotes: bool = Field(False, description="replace curly quotes by straight ones")

    def packages(self) -> list[str]:
        """See `StepSection.packages`."""
        return ["ftfy"]


class LanguageSection(StepSection):
    """Keeps texts in given languages, as told by CLD2, whose model is part of its package."""

    step: Literal["language"] = Field("language", description='"language"')
    keep: list[str] = Field(min_length=1, description='languages to keep, by ISO 639 code as CLD2 has it, e.g. ["en"]')
    min_share: Share = Field(0.65, description="share of the text that must be in these languages")
    characters: Count = Field(4000, description="look at so many characters, from the middle of the text")

    def packages(self) -> list[str]:
        """See `StepSection.packages`."""
        return ["pycld2"]


class _WordsSection(StepSection):
    words: WordKind = Field("punctuation", description=f"what a word is: {_WORDS}")

    def packages(self) -> list[str]:
        """See `StepSection.packages`."""
        return ["spacy"] if self.words == "spacy" else []


class GopherRepetitionSection(_WordsSection):
    """Drops repetitive texts: Rae et al. 2021 (arXiv 2112.11446), table A1."""

    step: Literal["gopher_repetition"] = Field("gopher_repetition", description='"gopher_repetition"')
    duplicate_lines: Share | None = Field(0.30, description="largest share of lines that occurred before")
    duplicate_paragraphs: Share | None = Field(0.30, description="largest share of paragraphs that occurred before")
    duplicate_line_characters: Share | None = Field(0.20, description="largest share of characters in such lines")
    duplicate_paragraph_characters: Share | None = Field(
        0.20, description="largest share of characters in such paragraphs"
    )
    top_2gram: Share | None = Field(0.20, description="largest share of characters in the most frequent 2-gram")
    top_3gram: Share | None = Field(0.18, description="largest share of characters in the most frequent 3-gram")
    top_4gram: Share | None = Field(0.16, description="largest share of characters in the most frequent 4-gram")
    duplicate_5grams: Share | None = Field(0.15, description="largest share of characters in repeated 5-grams")
    duplicate_6grams: Share | None = Field(0.14, description="largest share of characters in repeated 6-grams")
    duplicate_7grams: Share | None = Field(0.13, description="largest share of characters in repeated 7-grams")
    duplicate_8grams: Share | None = Field(0.12, description="largest share of characters in repeated 8-grams")
    duplicate_9grams: Share | None = Field(0.11, description="largest share of characters in repeated 9-grams")
    duplicate_10grams: Share | None = Field(0.10, description="largest share of characters in repeated 10-grams")


class GopherQualitySection(_WordsSection):
    """Drops what does not look like prose: Rae et al. 2021 (arXiv 2112.11446), appendix A1.1."""

    step: Literal["gopher_quality"] = Field("gopher_quality", description='"gopher_quality"')
    min_words: Index | None = Field(50, description="fewest words, signs not counted")
    max_words: Index | None = Field(100_000, description="most words, signs not counted")
    min_word_length: Positive | None = Field(3, description="smallest mean length of a word, in characters")
    max_word_length: Positive | None = Field(10, description="largest mean length of a word, in characters")
    max_hashes: float | None = Field(0.1, ge=0, description="most # signs per word")
    max_ellipses: float | None = Field(0.1, ge=0, description="most ellipses per word")
    max_bullet_lines: Share | None = Field(0.9, description="largest share of lines that start with a bullet")
    max_ellipsis_lines: Share | None = Field(0.3, description="largest share of lines that end with an ellipsis")
    min_letter_words: Share | None = Field(0.8, description="smallest share of words with a letter in them")
    min_stop_words: Index | None = Field(2, description="so many different stop words must occur")
    stop_words: list[str] = Field(
        ["the", "be", "to", "of", "and", "that", "have", "with"], description="the stop words, case matters"
    )


class C4Section(StepSection):
    """Drops lines and texts by the rules of C4: Raffel et al. 2020 (arXiv 1910.10683), section 2.2."""

    step: Literal["c4"] = Field("c4", description='"c4"')
    terminal_punctuation: bool = Field(True, description="keep only lines that end in . ! ? or a quotation mark")
    min_sentences: Index | None = Field(5, description="fewest sentences in the lines that are left")
    min_words_per_line: Index = Field(3, description="fewest words of a line, else the line goes")
    max_word_length: Count | None = Field(1000, description="longest word of a line, else the line goes")
    citations: bool = Field(True, description="remove [1], [edit] and [citation needed]")
    lorem_ipsum: bool = Field(True, description="drop texts with 'lorem ipsum'")
    javascript: bool = Field(True, description="remove lines that speak of JavaScript")
    curly_brackets: bool = Field(True, description="drop texts with a {")
    policies: bool = Field(True, description="remove lines about cookies, terms of use and privacy policies")


class FineWebQualitySection(_WordsSection):
    """Drops lists and page furniture: Penedo et al. 2024 (arXiv 2406.17557), section 3.6, and FineWeb's code."""

    step: Literal["fineweb_quality"] = Field("fineweb_quality", description='"fineweb_quality"')
    min_ended_lines: Share | None = Field(
        0.12, description="smallest share of lines that end in a full stop or the like"
    )
    max_short_lines: Share | None = Field(0.67, description="largest share of short lines")
    short_line: Count = Field(30, description="a line of at most so many characters is short")
    max_duplicate_characters: Share | None = Field(
        0.01, description="largest share of characters in lines that occurred before"
    )
    max_line_feeds: float | None = Field(0.3, ge=0, description="most line feeds per word")

    def packages(self) -> list[str]:
        """See `StepSection.packages`."""
        return ["regex", *super().packages()]


class PIISection(StepSection):
    """Masks email addresses and public IP addresses."""

    step: Literal["pii"] = Field("pii", description='"pii"')
    email: str | None = Field("email@example.com", description="what stands for an email address; null leaves them")
    ip: str | None = Field("192.0.2.1", description="what stands for a public IPv4 address; null leaves them")
    ipv6: str | None = Field("2001:db8::1", description="what stands for a public IPv6 address; null leaves them")


class UrlBlocklistSection(StepSection):
    """Drops texts by where they come from."""

    step: Literal["url_blocklist"] = Field("url_blocklist", description='"url_blocklist"')
    field: str = Field("url", min_length=1, description="the field of the record that holds the URL")
    domains: list[str] = Field([], description="files with one domain per line; its subdomains are meant too")
    urls: list[str] = Field([], description="files with one URL per line")
    words: list[str] = Field([], description="files with one word per line that may not stand in a URL")
    missing: Literal["keep", "drop"] = Field("keep", description='what to do without a URL: "keep" or "drop"')

    def files(self) -> list[str]:
        """See `StepSection.files`."""
        return [*self.domains, *self.urls, *self.words]


class WordBlocklistSection(StepSection):
    """Drops texts with words or phrases of a list."""

    step: Literal["word_blocklist"] = Field("word_blocklist", description='"word_blocklist"')
    words: list[str] = Field(min_length=1, description="files with one word or phrase per line")
    match: Literal["words", "substrings"] = Field(
        "words", description='"words", or "substrings" for languages without blanks'
    )

    def files(self) -> list[str]:
        """See `StepSection.files`."""
        return list(self.words)


class DecontaminateSection(StepSection):
    """Drops texts that share a run of words with evaluation data: Brown et al. 2020 (arXiv 2005.14165), appendix C."""

    step: Literal["decontaminate"] = Field("decontaminate", description='"decontaminate"')
    evaluations: list[str] = Field(min_length=1, description="files of evaluation data: .jsonl, or any other as text")
    fields: list[str] | None = Field(
        None, description="fields of the jsonl records that count; default: every string in them"
    )
    ngram: Count = Field(13, description="words in a run")

    def files(self) -> list[str]:
        """See `StepSection.files`."""
        return list(self.evaluations)


class DatatroveSection(StepSection):
    """Any filter of datatrove."""

    step: Literal["datatrove"] = Field("datatrove", description='"datatrove"')
    filter: str = Field(min_length=1, description='the filter\'s class, e.g. "GopherQualityFilter"')
    args: dict[str, Any] = Field({}, description="arguments of the class")
    metadata: list[str] = Field([], description='fields of the record that the filter reads, e.g. ["url"]')
    reads: list[str] = Field([], description="files that the filter reads, so that a change of them is noticed")

    def files(self) -> list[str]:
        """See `StepSection.files`."""
        return list(self.reads)

    def packages(self) -> list[str]:
        """See `StepSection.packages`."""
        return ["datatrove"]


SECTIONS: dict[str, type[StepSection]] = {
    section.model_fields["step"].default: section
    for section in (
        UnicodeSection,
        LanguageSection,
        GopherRepetitionSection,
        GopherQualitySection,
        C4Section,
        FineWebQualitySection,
        PIISection,
        UrlBlocklistSection,
        WordBlocklistSection,
        DecontaminateSection,
        DatatroveSection,
    )
}
"""The sections by the name of their step."""


def _parse_each(raw: object, info: ValidationInfo) -> object:
    """Sections of the list, each by its own class, so that an error names the step's own keys."""
    if not isinstance(raw, list):
        return raw
    return [_parse_one(item, at=f"{info.field_name or 'clean'}.{i}") for i, item in enumerate(raw)]


def _parse_one(raw: object, *, at: str) -> object:
    if not isinstance(raw, dict):
        return raw
    name = raw.get("step")
    if name not in SECTIONS:
        near = suggest(str(name), sorted(SECTIONS))
        remedy = f"did you mean '{near}'?" if near else f"the steps are: {', '.join(SECTIONS)}"
        raise ConfigError(f"{at}.step", name, why="there is no such step", remedy=remedy)
    return parse(SECTIONS[name], raw, at=at)


Step = Annotated[
    UnicodeSection
    | LanguageSection
    | GopherRepetitionSection
    | GopherQualitySection
    | C4Section
    | FineWebQualitySection
    | PIISection
    | UrlBlocklistSection
    | WordBlocklistSection
    | DecontaminateSection
    | DatatroveSection,
    Field(discriminator="step"),
]

Steps = Annotated[list[Step], BeforeValidator(_parse_each)]
"""Type of the field `clean`; its errors name the step and the nearest key."""


def parse_steps(raw: Sequence[dict[str, Any]], *, at: str = "clean") -> list[StepSection]:
    """Sections of parsed JSON, outside of a whole config.

    Raises:
        ConfigError: an unknown step or key, a value out of range.
    """
    sections = [_parse_one(item, at=f"{at}.{i}") for i, item in enumerate(raw)]
    assert all(isinstance(section, StepSection) for section in sections)
    return sections  # type: ignore[return-value]
