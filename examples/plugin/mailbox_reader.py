"""A reader for data prep: the mails of an mbox file. In a corpus config:

{"sources": [{"path": "mails/*.mbox", "type": "function", "reader": "mailbox_reader:read"}]}
"""

from __future__ import annotations

import mailbox
from collections.abc import Iterator


def read(path: str) -> Iterator[dict[str, object]]:
    """Yields the plain text of every mail, in the order of the file."""
    for mail in mailbox.mbox(path, create=False):
        parts = [part for part in mail.walk() if part.get_content_type() == "text/plain"]
        texts = [part.get_payload(decode=True).decode(errors="replace") for part in parts]
        yield {"text": "\n".join(texts), "subject": str(mail["subject"])}
