"""Names of columns: which holds ids, and which say where loss is taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.base.errors import DataError

IDS = ("input_ids", "tokens", "token_ids")
LABELS, ATTENTION = "labels", "attention_mask"
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Of which 1 is a token with loss: Megatron's and nanotron's name, and two of TRL."""
IGNORED = -100
"""The label of a token without loss, as Hugging Face and torch's cross entropy have it."""


def find_ids(names: Sequence[str], path: Path) -> str:
    """The name of the column of ids.

    Raises:
        DataError: there is none.
    """
    for name in IDS:
        if name in names:
            return name
    raise DataError(
        f"{path} has the columns {', '.join(names)}, and none is {' or '.join(IDS)}: no tokens\n"
        "  try: rename the column of ids; or headrace prep, if it holds text"
    )
