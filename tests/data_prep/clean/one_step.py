"""A function that runs one cleaning step on one text, and a text that passes all of them."""

from __future__ import annotations

from typing import Any

from data_prep.clean.chain import CleanedText, build_chain
from data_prep.config.cleaning import parse_steps


def run(step: str, text: str, *, record: dict[str, Any] | None = None, **keys: Any) -> str:
    """The text after the step, or "-- REASON" if the step drops it."""
    outcome = build_chain(parse_steps([{"step": step, **keys}])).clean(text, record or {})
    if isinstance(outcome, CleanedText):
        return outcome.text
    assert outcome.step == step
    return f"-- {outcome.reason}"


PROSE = (
    "The mill stands where the river leaves the hills, and a headrace leads the water to it.\n"
    "In spring there is more water than the wheel can use; the miller opens the gate beside the weir.\n"
    "Grain comes by cart from farms that lie to the north of the town, with rye for bread and oats for horses.\n"
    "Nobody remembers who built the first wheel, but its axle was found under the floor some years ago.\n"
    "It had been cut from one oak, and it would still have carried a stone of half a ton.\n"
)
"""Ninety words of plain English, which pass every rule."""
