"""Cleaning steps that run a filter of datatrove, or a function of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_prep.clean.document import Document
from data_prep.clean.optional import import_optional
from data_prep.config.cleaning import DatatroveSection, FunctionSection
from foundation.errors import ConfigError, DataError
from foundation.section import suggest
from foundation.user_function import load_function

_RANDOM = "it draws at random, so the output would depend on the order of the documents"
_UNSUPPORTED = {"SamplerFilter": _RANDOM, "LambdaFilter": "its rule is Python code, which a config cannot hold"}


class Datatrove:
    """The cleaning step of `DatatroveSection`; the filter returns a drop's reason, and may change the text."""

    def __init__(self, section: DatatroveSection, *, field: str) -> None:
        filters = import_optional("datatrove.pipeline.filters", package="datatrove", field=field)
        self._document_class = import_optional("datatrove.data", package="datatrove", field=field).Document
        self._filter = _make(section, filters, field=field)
        self._metadata = section.metadata

    def __call__(self, document: Document, fields: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        metadata = {name: fields.get(name) for name in self._metadata}
        theirs = self._document_class(text=document.text, id="", metadata=metadata)
        try:
            result = self._filter.filter(theirs)
        except Exception as error:  # an exception of a filter drops only this text
            return f"failed: {type(error).__name__}"
        kept, reason = result if isinstance(result, tuple) else (result, None)
        if not kept:
            return reason or "filtered"
        return document if theirs.text == document.text else Document(theirs.text)


class OwnFilter:
    """The cleaning step of `FunctionSection`. The function must give the same result for the same text."""

    def __init__(self, section: FunctionSection, *, field: str) -> None:
        self._function, self._fields = load_function(section.function, field=f"{field}.function"), section.fields

    def __call__(self, document: Document, fields: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`.

        Raises:
            DataError: the function fails, or returns neither a string nor None.
        """
        name = self._function.name
        try:
            result = self._function.call(document.text, {each: fields.get(each) for each in self._fields})
        except Exception as error:  # the user's code runs here
            text = f"{name} failed with {type(error).__name__}: {error}; on the text {document.text[:80]!r}"
            raise DataError(f"{text}\n  try: mend the function; it is called as {name}(text, fields)") from error
        if result is None:
            return "filtered"
        if not isinstance(result, str):
            why = f"{name} returned {type(result).__name__}"
            raise DataError(f"{why}\n  try: return the text, an edited text, or None to drop the document")
        return document if result == document.text else Document(result)


def _make(section: DatatroveSection, filters: Any, *, field: str) -> Any:
    names = sorted(name for name in vars(filters) if name.endswith("Filter") and name not in _UNSUPPORTED)
    if section.filter in _UNSUPPORTED:
        raise ConfigError(
            f"{field}.filter", section.filter, why=_UNSUPPORTED[section.filter], remedy=f"one of {', '.join(names)}"
        )
    if section.filter not in names:
        near = suggest(section.filter, names)
        remedy = f"did you mean '{near}'?" if near else f"the filters are: {', '.join(names)}"
        raise ConfigError(f"{field}.filter", section.filter, why="datatrove has no such filter", remedy=remedy)
    if section.args.get("keep_fraction"):
        value = section.args["keep_fraction"]
        raise ConfigError(f"{field}.args.keep_fraction", value, why=_RANDOM, remedy="leave it out")
    try:
        return getattr(filters, section.filter)(**section.args)
    except Exception as error:  # filters raise any type for wrong arguments
        why = f"{type(error).__name__}: {error}"
        remedy = f"see the arguments of datatrove's {section.filter}"
        raise ConfigError(f"{field}.args", section.args, why=why, remedy=remedy) from None
