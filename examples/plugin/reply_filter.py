"""A filter for data prep: removes quoted lines of mails, and drops mails about vacations. In a corpus config:

{"clean": [{"step": "function", "function": "reply_filter:own_words", "fields": ["subject"]}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def own_words(text: str, fields: Mapping[str, Any]) -> str | None:
    """Returns the text without lines that begin with ">"; None drops the document."""
    if "out of office" in str(fields["subject"]).lower():
        return None
    return "\n".join(line for line in text.splitlines() if not line.startswith(">"))
