"""Names of columns that hold ids, and of columns that mark which tokens count in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foundation.errors import DataError

IDS = ("input_ids", "tokens", "token_ids")
LABELS, ATTENTION = "labels", "attention_mask"
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Names of loss masks, 1 for a token that counts in the loss: Megatron's and nanotron's, and two of TRL."""
IGNORED = -100
"""Label of a token that does not count in the loss, in Hugging Face and torch's cross entropy."""


def find_ids(names: Sequence[str], path: Path) -> str:
    """Finds the name of the column of ids.

    Raises:
        DataError: no column has one of the known names.
    """
    for name in IDS:
        if name in names:
            return name
    raise DataError(
        f"{path} has the columns {', '.join(names)}, and none is {' or '.join(IDS)}: no tokens\n"
        "  try: rename the column of ids; or headrace prep, if it holds text"
    )
