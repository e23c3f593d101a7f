"""Every config key has a description that stands alone: editors show it, and errors use it as their remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from foundation.section import Section
from pipeline.config.sections.run import Config


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """The section classes within a field's type: itself, of an optional value, or of a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def keys_of(section: type[Section], at: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, description) of every key; that of a section is its docstring, unless the field has one."""
    for name, field in section.model_fields.items():
        inner = list(sections_in(field.annotation))
        yield at + name, field.description or (inner[0].__doc__ if inner else None) or ""
        for each in inner:
            yield from keys_of(each, f"{at}{name}.")


KEYS = dict(keys_of(Config))


def test_the_keys_of_nested_sections_are_among_those_checked() -> None:
    assert {"bf16.enabled", "zero_optimization.offload_param.buffer_size", "data.sources.max_epochs"} < KEYS.keys()


def test_every_key_has_a_description_of_several_words_in_one_paragraph() -> None:
    assert {key: text for key, text in KEYS.items() if len(text.split()) < 4 or "\n\n" in text} == {}
