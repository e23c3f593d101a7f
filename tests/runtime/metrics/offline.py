"""Reads what an offline W&B run holds: protobuf records in the log format of LevelDB.

Source of the format: doc/log_format.md of LevelDB. W&B puts 7 bytes before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_HEADER, _PIECE_HEADER, _BLOCK = 7, 7, 32768
_WHOLE, _LAST = 1, 4


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """What was logged by the one W&B run of a run's directory, in order."""
    (file,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    records = (Record.FromString(each) for each in _records(file.read_bytes()))
    rows = (record.history.item for record in records if record.HasField("history"))
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def _records(data: bytes) -> Iterator[bytes]:
    assert data.startswith(b":W&B")
    at, record = _HEADER, b""
    while at + _PIECE_HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _PIECE_HEADER:  # the rest of a block is too short for a piece
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + _PIECE_HEADER : at + _PIECE_HEADER + length]
        at += _PIECE_HEADER + length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
