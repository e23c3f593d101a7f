"""Any filter of datatrove as a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_prep.clean.optional import need
from data_prep.clean.statistics import Statistics
from data_prep.config.cleaning import DatatroveSection
from headrace.base.errors import ConfigError
from headrace.base.section import suggest

_RANDOM = "it draws at random, so that the output would depend on the order of the documents"
_REFUSED = {
    "SamplerFilter": _RANDOM,
    "LambdaFilter": "its rule is Python code, which a config cannot hold",
}


class Datatrove:
    """See `DatatroveSection`. What the filter answers is the reason of a drop; a text that it changes is changed."""

    def __init__(self, section: DatatroveSection, *, field: str) -> None:
        filters = need("datatrove.pipeline.filters", package="datatrove", field=field)
        self._document = need("datatrove.data", package="datatrove", field=field).Document
        self._filter = _make(section, filters, field=field)
        self._metadata = section.metadata

    def __call__(self, text: Statistics, fields: Mapping[str, Any]) -> Statistics | str:
        """See `chain.Rule`."""
        metadata = {name: fields.get(name) for name in self._metadata}
        document = self._document(text=text.text, id="", metadata=metadata)
        try:
            answer = self._filter.filter(document)
        except Exception as error:  # whatever a filter stumbles over costs this text only
            return f"failed: {type(error).__name__}"
        kept, reason = answer if isinstance(answer, tuple) else (answer, None)
        if not kept:
            return reason or "filtered"
        return text if document.text == text.text else Statistics(document.text)


def _make(section: DatatroveSection, filters: Any, *, field: str) -> Any:
    names = sorted(name for name in vars(filters) if name.endswith("Filter") and name not in _REFUSED)
    if section.filter in _REFUSED:
        raise ConfigError(
            f"{field}.filter", section.filter, why=_REFUSED[section.filter], remedy=f"one of {', '.join(names)}"
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
    except Exception as error:  # it may be anything, for arguments that do not fit
        why = f"{type(error).__name__}: {error}"
        remedy = f"see the arguments of datatrove's {section.filter}"
        raise ConfigError(f"{field}.args", section.args, why=why, remedy=remedy) from None
