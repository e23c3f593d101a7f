"""Shards of a tokens directory in an object store: spans are read in the order of the samples, ahead of the training.

Of the tokens a rank reads the spans of its own samples, each once, and keeps none on a disk: what is read ahead is in
memory, for at most two groups of steps (`StepLoader`). The index of a shard is copied to a temporary directory when a
document boundary in it is asked for. The bytes of a span are not compared with the shard's checksum, which is of the
whole file; sizes are compared when the directory is opened.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.formats.indexed import IndexedTokens
from data_prep.formats.maskfile import MASK
from data_prep.formats.tokenfile import HEADER_BYTES, TokenFile, dtype_in_header
from headrace.base.directory import Manifest, read_manifest
from headrace.base.errors import DataError
from headrace.base.remote_folder import local_tokens
from headrace.base.storage import download, objects_below, read_range
from pipeline.data.files import ShardSpan

AT_ONCE = 32
"""Requests at a time: a store answers each after tens of milliseconds, and answers many at once."""
Bytes = tuple[str, int, int]
"""URL, start and size."""


class RemoteShards:
    """Reads shards of a directory in an object store; see `SpanReader`.

    Args:
        url: of the directory.
    """

    def __init__(self, url: str) -> None:
        self.root: str | None = url
        self._pool: ThreadPoolExecutor | None = None
        self._asked: dict[Bytes, tuple[int, Future[bytes]]] = {}
        self._group = 0
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._indexes: dict[str, TokenFile] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def read(self, spans: Sequence[ShardSpan]) -> list[npt.NDArray[Any]]:
        """See `SpanReader.read`."""
        dtypes = self._dtypes_of(spans)
        wanted = [_bytes(each, ".bin", dtype.itemsize) for each, dtype in zip(spans, dtypes, strict=True)]
        return [np.frombuffer(data, dtype) for data, dtype in zip(self._read(wanted), dtypes, strict=True)]

    def read_masks(self, spans: Sequence[ShardSpan]) -> list[npt.NDArray[Any]]:
        """See `SpanReader.read_masks`."""
        return [np.frombuffer(data, np.uint8) for data in self._read([_bytes(each, MASK, 1) for each in spans])]

    def read_ahead(self, spans: Sequence[ShardSpan]) -> None:
        """Asks the store for spans, of tokens; what was asked for two calls ago and not read since is forgotten."""
        self._group += 1
        for key, (group, future) in list(self._asked.items()):
            if group < self._group - 1:
                future.cancel()
                del self._asked[key]
        dtypes = self._dtypes_of(spans)
        self._ask([_bytes(each, ".bin", dtype.itemsize) for each, dtype in zip(spans, dtypes, strict=True)])

    def read_ahead_masks(self, spans: Sequence[ShardSpan]) -> None:
        """As `read_ahead`, of loss masks, which belong to the tokens that were asked for last."""
        self._ask([_bytes(each, MASK, 1) for each in spans])

    def file(self, prefix: str, tokens: int) -> IndexedTokens:
        """See `SpanReader.file`: its index is copied to a temporary directory first."""
        found = self._indexes.get(prefix)
        if found is None:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="headrace-indexes-")
            local = Path(self._folder.name) / str(len(self._indexes))
            download(f"{prefix}.idx", local.with_suffix(".idx"))
            found = TokenFile.open_index(local)
            if found.tokens.size != tokens:
                why = f"{prefix}.idx is of {found.tokens.size} tokens, the manifest lists {tokens}"
                raise DataError(f"{why}\n  try: copy the dataset there again")
            self._indexes[prefix] = found
        return found

    def _dtypes_of(self, spans: Sequence[ShardSpan]) -> list[np.dtype[Any]]:
        """The dtype of each span's ids, by the code in the header of its shard's index."""
        new = list(dict.fromkeys(each.prefix for each in spans if each.prefix not in self._dtypes))
        for prefix, header in zip(new, self._read([(f"{each}.idx", 0, HEADER_BYTES) for each in new]), strict=True):
            self._dtypes[prefix] = dtype_in_header(header, f"{prefix}.idx")
        return [self._dtypes[each.prefix] for each in spans]

    def _ask(self, wanted: Sequence[Bytes]) -> None:
        self._pool = self._pool or ThreadPoolExecutor(AT_ONCE, thread_name_prefix="remote-shards")
        for each in wanted:
            if each not in self._asked:
                self._asked[each] = self._group, self._pool.submit(read_range, *each)

    def _read(self, wanted: Sequence[Bytes]) -> list[bytes]:
        self._ask(wanted)
        futures = [self._asked[each][1] for each in wanted]
        found = []
        for (url, start, size), future in zip(wanted, futures, strict=True):
            data = future.result()
            self._asked.pop((url, start, size), None)
            if len(data) != size:
                why = f"{url} has {len(data)} of the {size} bytes from {start} on: it was replaced, or is not finished"
                raise DataError(f"{why}\n  try: copy the dataset there again")
            found.append(data)
        return found


def check_objects(url: str, manifest: Manifest) -> None:
    """Compares the sizes of a directory's objects with its manifest; one listing.

    Raises:
        DataError: names the first that is missing or has another size.
        StorageError: the store cannot be read.
    """
    found = objects_below(url)
    for name, entry in manifest.files.items():
        size = found[name].bytes if name in found else None
        if size != entry["bytes"]:
            what = "is missing" if size is None else f"has {size} bytes"
            why = f"{url}/{name} {what}, the manifest lists {entry['bytes']} bytes"
            raise DataError(f"{why}\n  try: copy the dataset there again")


def _bytes(span: ShardSpan, suffix: str, width: int) -> Bytes:
    return f"{span.prefix}{suffix}", span.start * width, span.length * width


def remote_tokens(url: str, *, stat_files: bool) -> tuple[str, dict[str, Any]]:
    """A tokens directory in an object store: what is on this host of it, and how `TokenDataset.open` reads its shards.

    Args:
        url: of the directory.
        stat_files: compare the sizes of its objects with the manifest.

    Raises:
        DataError, StorageError: see `local_tokens` and `check_objects`.
    """
    path = local_tokens(url)
    if stat_files:
        check_objects(url, read_manifest(path, kind="tokens"))
    return str(path), {"files": RemoteShards(url), "stat_files": False}
