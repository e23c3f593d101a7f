"""Documents that are longer than a sample: cut into pieces, truncated, or dropped.

A piece that begins in the middle of a conversation is an answer without its prompt; a piece that ends within an answer
lacks its end. So a conversation is truncated to its last whole answer unless asked otherwise. A text is cut.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from data_prep.formats.packfile import I64

Long = Literal["auto", "cut", "truncate", "drop"]


def shorten(bounds: I64, mask: npt.NDArray[np.uint8] | None, *, length: int, long: Long) -> I64:
    """Number of leading tokens of each document to keep: all, or at most T + 1; 0 drops the document.

    Args:
        bounds: int64 [documents + 1], document starts (`TokenFile.document_starts`), ending with the file's end.
        mask: loss mask of the shard; None if all tokens count.
        length: T, tokens per sample.
        long: treatment of long documents; "auto" truncates a document if its mask excludes tokens besides the first and
            the last, and cuts other documents.

    Returns:
        int64 [documents].
    """
    tokens = np.diff(bounds)
    if long == "cut" or (long == "auto" and mask is None):
        return tokens
    for i in np.flatnonzero(tokens > length + 1):
        learnt = None if mask is None else mask[bounds[i] : bounds[i + 1]]
        if long == "drop":
            tokens[i] = 0
        elif learnt is not None and not learnt[1:-1].all():  # BOS and EOS seldom count, even where all else does
            tokens[i] = _whole_answers(learnt[: length + 2])
        elif long == "truncate":
            tokens[i] = length + 1
    return tokens


def _whole_answers(learnt: npt.NDArray[np.uint8]) -> int:
    """Number of tokens up to the end of the last complete answer among these tokens."""
    ends = np.flatnonzero((learnt[:-1] == 1) & (learnt[1:] == 0))
    return int(ends[-1]) + 1 if ends.size else 0


def count_targets(mask: npt.NDArray[np.uint8] | None, starts: I64, tokens: I64) -> int:
    """Counts the targets in pieces of a shard: tokens in the mask, uint8 [tokens], except the first of each piece.

    Args:
        starts, tokens: int64 [pieces], first token and number of tokens of each piece; a single token has no target.
    """
    starts, tokens = starts[tokens > 1], tokens[tokens > 1]
    if mask is None or not starts.size:
        return int((tokens - 1).sum())
    first = int(starts[0])
    edges = np.column_stack([starts + 1, starts + tokens]).ravel() - first  # tokens between pieces are left out
    part = np.append(mask[first : first + edges[-1]], np.uint8(0))  # the last edge is then an index
    return int(np.add.reduceat(part, edges, dtype=np.int64)[::2].sum())


def describe(entry: dict[str, Any], *, length: int) -> str:
    """Describes a packing's long documents in a line, from its manifest; "" if there are none or no counts."""
    if not entry.get("long"):
        return ""
    kept = {"cut": "cut into pieces, of which all but the first begin in the middle", "dropped": "left out"}
    kept["truncated"] = "truncated (a conversation to its last whole answer)"
    counts = [f"{entry[key]:,} {what}" for key, what in kept.items() if entry[key]]
    share = 100 * entry["lost"] / max(1, entry["lost"] + entry["targets"])
    lost = f"; {share:.2f} % of all targets are lost" if entry["lost"] else ""
    return f"{entry['long']:,} documents have more than {length + 1:,} tokens: {', '.join(counts)}{lost}"
