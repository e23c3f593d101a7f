"""Config schema of the cleaning chain: one pydantic section per cleaning step, selected by its key "step".

The default thresholds are those of the papers; null switches a rule off. `CleaningSteps` is the type of the config
field `clean`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from foundation.errors import ConfigError
from foundation.paths import LocalPath
from foundation.section import Count, Index, Section, parse, suggest
from foundation.user_function import FunctionName, load_function

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]

WordKind = Literal["whitespace", "punctuation", "spacy"]

_WORD_KINDS = (
    '"punctuation" (punctuation marks are words of their own, as in FineWeb), "whitespace" (split at whitespace, as in '
    'Dolma and RedPajama) or "spacy" (spaCy\'s English tokenizer, as in datatrove)'
)


class StepSection(Section):
    """Base class of the cleaning steps' sections."""

    step: str

    def files(self) -> list[str]:
        """Paths of the files that the step reads. Their contents are part of the job's identity."""
        return []

    def packages(self) -> list[str]:
        """Names on PyPI of the packages whose version can change what the step does."""
        return []


class UnicodeSection(StepSection):
    """Unicode normalization and repair of mojibake (text decoded with the wrong encoding), by ftfy."""

    step: Literal["unicode"] = Field("unicode", description='name of the step: "unicode"')
    normalization: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = Field(
        "NFC", description='Unicode normalization form: "NFC", "NFD", "NFKC" or "NFKD"; null does not normalize'
    )
    mojibake: bool = Field(
        True, description="true repairs text that was decoded with the wrong encoding, e.g. 'Ã©' becomes 'é'"
    )
    html_entities: bool | Literal["auto"] = Field(
        "auto",
        description='whether to replace HTML entities such as &amp; by their characters: true, false, or "auto" (only '
        'in the lines before the first "<" of the text)',
    )
    control_characters: bool = Field(
        True, description="true removes control characters, terminal escape sequences and lone surrogates"
    )
    line_breaks: bool = Field(
        False, description="true replaces every kind of line break (CR LF, CR, U+2028, U+2029, U+0085) by a line feed"
    )
    ligatures: bool = Field(False, description="true replaces Latin ligatures by letters, e.g. ﬁ by fi")
    width: bool = Field(False, description="true replaces half-width and full-width characters by ordinary ones")
    quotes: bool = Field(False, description="true replaces curly quotation marks by straight ones")

    def packages(self) -> list[str]:
        """Implements `StepSection.packages`."""
        return ["ftfy"]


class LanguageSection(StepSection):
    """Language filter: keeps texts in the given languages, as identified by CLD2 (its model is in its package)."""

    step: Literal["language"] = Field("language", description='name of the step: "language"')
    keep: list[str] = Field(min_length=1, description='languages to keep, as CLD2\'s ISO 639 codes, e.g. ["en", "de"]')
    min_share: Fraction = Field(
        0.65, description="smallest fraction of the text in the kept languages together, 0 to 1, e.g. 0.65"
    )
    characters: Count = Field(
        4000, description="CLD2 sees at most this many characters, from the middle of the text, e.g. 4000"
    )

    def packages(self) -> list[str]:
        """Implements `StepSection.packages`."""
        return ["pycld2"]


class _WordsSection(StepSection):
    words: WordKind = Field(
        "punctuation", description=f"definition of a word, which decides what the thresholds mean: {_WORD_KINDS}"
    )

    def packages(self) -> list[str]:
        """Implements `StepSection.packages`."""
        return ["spacy"] if self.words == "spacy" else []


class GopherRepetitionSection(_WordsSection):
    """Gopher repetition filter: drops repetitive texts (Rae et al. 2021, arXiv 2112.11446, table A1)."""

    step: Literal["gopher_repetition"] = Field("gopher_repetition", description='name of the step: "gopher_repetition"')
    duplicate_lines: Fraction | None = Field(
        0.30, description="largest fraction of lines that repeat an earlier line, 0 to 1; null: no limit"
    )
    duplicate_paragraphs: Fraction | None = Field(
        0.30, description="largest fraction of paragraphs that repeat an earlier paragraph, 0 to 1; null: no limit"
    )
    duplicate_line_characters: Fraction | None = Field(
        0.20, description="largest fraction of the text's characters in repeated lines, 0 to 1; null: no limit"
    )
    duplicate_paragraph_characters: Fraction | None = Field(
        0.20, description="largest fraction of the text's characters in repeated paragraphs, 0 to 1; null: no limit"
    )
    top_2gram: Fraction | None = Field(
        0.20, description="largest fraction of characters in occurrences of the most frequent 2-gram; null: no limit"
    )
    top_3gram: Fraction | None = Field(
        0.18, description="largest fraction of characters in occurrences of the most frequent 3-gram; null: no limit"
    )
    top_4gram: Fraction | None = Field(
        0.16, description="largest fraction of characters in occurrences of the most frequent 4-gram; null: no limit"
    )
    duplicate_5grams: Fraction | None = Field(
        0.15, description="largest fraction of characters in 5-grams that repeat an earlier one; null: no limit"
    )
    duplicate_6grams: Fraction | None = Field(
        0.14, description="largest fraction of characters in 6-grams that repeat an earlier one; null: no limit"
    )
    duplicate_7grams: Fraction | None = Field(
        0.13, description="largest fraction of characters in 7-grams that repeat an earlier one; null: no limit"
    )
    duplicate_8grams: Fraction | None = Field(
        0.12, description="largest fraction of characters in 8-grams that repeat an earlier one; null: no limit"
    )
    duplicate_9grams: Fraction | None = Field(
        0.11, description="largest fraction of characters in 9-grams that repeat an earlier one; null: no limit"
    )
    duplicate_10grams: Fraction | None = Field(
        0.10, description="largest fraction of characters in 10-grams that repeat an earlier one; null: no limit"
    )


class GopherQualitySection(_WordsSection):
    """Gopher quality filter: drops texts that do not look like prose (Rae et al. 2021, arXiv 2112.11446, app. A1.1)."""

    step: Literal["gopher_quality"] = Field("gopher_quality", description='name of the step: "gopher_quality"')
    min_words: Index | None = Field(
        50, description="fewest words in a text, not counting punctuation and symbols; null: no limit"
    )
    max_words: Index | None = Field(
        100_000, description="most words in a text, not counting punctuation and symbols; null: no limit"
    )
    min_word_length: Positive | None = Field(3, description="smallest mean word length, in characters; null: no limit")
    max_word_length: Positive | None = Field(10, description="largest mean word length, in characters; null: no limit")
    max_hashes: float | None = Field(0.1, ge=0, description="most # characters per word, e.g. 0.1; null: no limit")
    max_ellipses: float | None = Field(
        0.1, ge=0, description="most ellipses (... or …) per word, e.g. 0.1; null: no limit"
    )
    max_bullet_lines: Fraction | None = Field(
        0.9, description="largest fraction of lines that start with a bullet (• or -), 0 to 1; null: no limit"
    )
    max_ellipsis_lines: Fraction | None = Field(
        0.3, description="largest fraction of lines that end with an ellipsis (... or …), 0 to 1; null: no limit"
    )
    min_letter_words: Fraction | None = Field(
        0.8, description="smallest fraction of words that contain a letter, 0 to 1; null: no limit"
    )
    min_stop_words: Index | None = Field(
        2, description="fewest different words of 'stop_words' that must occur in the text; null: no limit"
    )
    stop_words: list[str] = Field(
        ["the", "be", "to", "of", "and", "that", "have", "with"],
        description='stop words for min_stop_words, case-sensitive; the default is English, e.g. ["der", "die", "und"]',
    )


class C4Section(StepSection):
    """C4 filter: removes lines and drops texts by the rules of C4 (Raffel et al. 2020, arXiv 1910.10683, sec. 2.2)."""

    step: Literal["c4"] = Field("c4", description='name of the step: "c4"')
    terminal_punctuation: bool = Field(
        True, description="true keeps only lines that end in . ! ? or a quotation mark, and not in ..."
    )
    min_sentences: Index | None = Field(
        5, description="fewest sentences in the lines that remain, else the text is dropped; null: no limit"
    )
    min_words_per_line: Index = Field(3, description="fewest words in a line, else the line is removed; 0: no limit")
    max_word_length: Count | None = Field(
        1000, description="longest word in a line, in characters, else the line is removed; null: no limit"
    )
    citations: bool = Field(True, description="true removes [1], [edit] and [citation needed] from lines")
    lorem_ipsum: bool = Field(True, description="true drops texts that contain 'lorem ipsum'")
    javascript: bool = Field(True, description="true removes lines that contain 'javascript', in any case")
    curly_brackets: bool = Field(True, description="true drops texts that contain a {; set false for code")
    policies: bool = Field(
        True, description="true removes lines about cookies, terms of use and privacy policies (in English)"
    )


class FineWebQualitySection(_WordsSection):
    """FineWeb quality filter: drops lists and navigation text (Penedo et al. 2024, arXiv 2406.17557, section 3.6)."""

    step: Literal["fineweb_quality"] = Field("fineweb_quality", description='name of the step: "fineweb_quality"')
    min_ended_lines: Fraction | None = Field(
        0.12,
        description="smallest fraction of lines that end in sentence-final punctuation of any script; null: no limit",
    )
    max_short_lines: Fraction | None = Field(
        0.67, description="largest fraction of short lines (see 'short_line'), 0 to 1; null: no limit"
    )
    short_line: Count = Field(30, description="a line of at most this many characters is short, e.g. 30")
    max_duplicate_characters: Fraction | None = Field(
        0.01, description="largest fraction of characters in lines that repeat an earlier line; null: no limit"
    )
    max_line_feeds: float | None = Field(0.3, ge=0, description="most line feeds per word, e.g. 0.3; null: no limit")

    def packages(self) -> list[str]:
        """Implements `StepSection.packages`."""
        return ["regex", *super().packages()]


class PIISection(StepSection):
    """PII masking: replaces email addresses and public IP addresses by fixed strings."""

    step: Literal["pii"] = Field("pii", description='name of the step: "pii"')
    email: str | None = Field(
        "email@example.com", description="replacement for email addresses; null leaves them in the text"
    )
    ip: str | None = Field(
        "192.0.2.1", description="replacement for public IPv4 addresses; null leaves them in the text"
    )
    ipv6: str | None = Field(
        "2001:db8::1", description="replacement for public IPv6 addresses; null leaves them in the text"
    )


class UrlBlocklistSection(StepSection):
    """URL blocklist: drops texts by the domain, the URL, or words in the URL of their record."""

    step: Literal["url_blocklist"] = Field("url_blocklist", description='name of the step: "url_blocklist"')
    field: str = Field("url", min_length=1, description='field of the record that holds the URL, e.g. "url"')
    domains: list[LocalPath] = Field(
        [],
        description='paths of files with one blocked domain per line, e.g. ["domains.txt"]; subdomains are blocked too',
    )
    urls: list[LocalPath] = Field(
        [],
        description='paths of files with one blocked URL per line, e.g. ["urls.txt"]; scheme, fragment and final slash '
        "do not matter",
    )
    words: list[LocalPath] = Field(
        [], description='paths of files with one word per line that must not occur in a URL, e.g. ["words.txt"]'
    )
    missing: Literal["keep", "drop"] = Field(
        "keep", description='what to do with a record without a URL: "keep" or "drop"'
    )

    def files(self) -> list[str]:
        """Implements `StepSection.files`."""
        return [*self.domains, *self.urls, *self.words]


class WordBlocklistSection(StepSection):
    """Word blocklist: drops texts that contain a word or phrase of a list, in any case."""

    step: Literal["word_blocklist"] = Field("word_blocklist", description='name of the step: "word_blocklist"')
    words: list[LocalPath] = Field(
        min_length=1, description='paths of files with one blocked word or phrase per line, e.g. ["words.txt"]'
    )
    match: Literal["words", "substrings"] = Field(
        "words",
        description='"words" matches whole words; "substrings" matches anywhere, for languages written without spaces',
    )

    def files(self) -> list[str]:
        """Implements `StepSection.files`."""
        return list(self.words)


class DecontaminateSection(StepSection):
    """Decontamination: drops texts that share an n-gram of words with evaluation data.

    Source: Brown et al. 2020 (arXiv 2005.14165), appendix C.
    """

    step: Literal["decontaminate"] = Field("decontaminate", description='name of the step: "decontaminate"')
    evaluations: list[LocalPath] = Field(
        min_length=1,
        description='paths of the evaluation data, e.g. ["mmlu.jsonl"]; .jsonl and .ndjson are read by record, any '
        "other file as one text, .gz is decompressed",
    )
    fields: list[str] | None = Field(
        None, description='fields of the evaluation records to compare, e.g. ["question"]; null: every string in them'
    )
    ngram: Count = Field(
        13, description="words in an n-gram that must not be shared, ignoring case and punctuation, e.g. 13 as in GPT-3"
    )

    def files(self) -> list[str]:
        """Implements `StepSection.files`."""
        return list(self.evaluations)


class DatatroveSection(StepSection):
    """A filter of datatrove, by class name."""

    step: Literal["datatrove"] = Field("datatrove", description='name of the step: "datatrove"')
    filter: str = Field(min_length=1, description='class name of the datatrove filter, e.g. "GopherQualityFilter"')
    args: dict[str, Any] = Field(
        {}, description='keyword arguments of the filter class, e.g. {"min_doc_words": 30}; default: its own defaults'
    )
    metadata: list[str] = Field([], description='fields of the record that the filter reads, e.g. ["url"]')
    reads: list[LocalPath] = Field(
        [],
        description='paths of files that the filter reads, e.g. ["list.txt"]; their contents become part of the '
        "job's identity, so that a change is detected",
    )

    def files(self) -> list[str]:
        """Implements `StepSection.files`."""
        return list(self.reads)

    def packages(self) -> list[str]:
        """Implements `StepSection.packages`."""
        return ["datatrove"]


class FunctionSection(StepSection):
    """A filter of your own: a function of the text that returns the text, an edited one, or None to drop it."""

    step: Literal["function"] = Field("function", description='name of the step: "function"')
    function: FunctionName = Field(
        description='your function as module:function, e.g. "my_filters:long_enough"; it gets the text and a dict of '
        "the fields, and returns the text, an edited text, or None, which drops it"
    )
    fields: list[str] = Field([], description='fields of the record that the function reads, e.g. ["url"]')

    def files(self) -> list[str]:
        """Implements `StepSection.files`: the module's file, so that a change of it is detected."""
        return [str(load_function(self.function, field="clean.function").path)]


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
        FunctionSection,
    )
}
"""The section classes by the name of their step."""


def _parse_each(raw: object, info: ValidationInfo) -> object:
    """Parses each item of the list with its step's class: an error then names that step's keys."""
    if not isinstance(raw, list):
        return raw
    return [_parse_one(item, at=f"{info.field_name or 'clean'}.{i}") for i, item in enumerate(raw)]


def _parse_one(raw: object, *, at: str) -> object:
    if not isinstance(raw, dict):
        return raw
    name = raw.get("step")
    if not isinstance(name, str) or name not in SECTIONS:
        near = suggest(str(name), sorted(SECTIONS))
        remedy = f"did you mean '{near}'?" if near else f"the steps are: {', '.join(SECTIONS)}"
        raise ConfigError(f"{at}.step", name, why="there is no such step", remedy=remedy)
    return parse(SECTIONS[name], raw, at=at)


CleaningStep = Annotated[
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
    | DatatroveSection
    | FunctionSection,
    Field(discriminator="step"),
]

CleaningSteps = Annotated[list[CleaningStep], BeforeValidator(_parse_each)]
"""Type of the config field `clean`. Its validation errors name the step and the nearest key."""


def parse_steps(raw: Sequence[dict[str, Any]], *, at: str = "clean") -> list[StepSection]:
    """Validates cleaning steps that are not part of a whole config.

    Args:
        raw: parsed JSON, one object per step.
        at: dotted config path of the list, for error messages.

    Raises:
        ConfigError: an unknown step or key, or a value out of range.
    """
    sections = [_parse_one(item, at=f"{at}.{i}") for i, item in enumerate(raw)]
    assert all(isinstance(section, StepSection) for section in sections)
    return sections  # type: ignore[return-value]
