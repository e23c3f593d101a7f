"""Reads shards of tokens directories in object stores: spans in the order of the samples, ahead of the training.

A training run reads spans through a bounded cache on a disk of this host (`read_ahead`). Without a cache, as in verbs
that score some samples, spans are read ahead into memory, for at most two groups of steps (`StepLoader`). The index of
a shard is copied to this host when one of its document boundaries is needed, and is compared with the manifest's
checksum. The bytes of a span are not, since the shard's checksum covers the whole file. Sizes are compared when the
directory is opened, and the cache has its own checksums.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.formats.indexed import IndexedTokens
from data_prep.formats.maskfile import MASK
from data_prep.formats.tokenfile import TokenFile
from foundation.directory import Manifest, check_kind
from foundation.errors import DataError
from foundation.lock import LockedError
from foundation.remote_directory import cache_root, read_remote_manifest
from foundation.remote_folder import local_tokens
from foundation.storage import objects_below, read_range
from pipeline.data.files import ShardSpan
from pipeline.data.read_ahead import Index, ReadAhead, fetch_index
from pipeline.data.span_cache import Bytes, Part

_AT_ONCE = 32
"""Number of concurrent requests for data read without the cache."""
_OTHERS_S = 30.0
"""Seconds to wait for another process that is downloading a part needed now."""
_DTYPES: dict[int, np.dtype[Any]] = {
    size: np.dtype(name) for size, name in {1: "u1", 2: "<u2", 4: "<i4", 8: "<i8"}.items()
}
"""Size of an id in bytes -> its dtype. Signed ids are never negative, so they are read as unsigned."""
Read = Callable[[], bytes | memoryview]


class RemoteShards:
    """Reads shards of directories in object stores; see `SpanReader`.

    Attributes:
        ahead: read-ahead into a cache on this host; None unless a run has opened one.
    """

    def __init__(self) -> None:
        self.ahead: ReadAhead | None = None
        self._directories: dict[str, tuple[Path, Manifest]] = {}
        self._looked_at: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._asked: dict[Bytes, tuple[int, Read]] = {}
        self._group = 0
        self._indexes: dict[str, TokenFile] = {}

    def open(self, url: str, *, stat_files: bool) -> tuple[Path, Manifest]:
        """Opens a tokens directory, once; returns its part on this host, and its manifest.

        Args:
            url: URL of the directory.
            stat_files: whether to compare the sizes of its objects with the manifest.

        Raises:
            DataError: there is no tokens directory, it is damaged, or an object is missing or has another size.
            StorageError: the store cannot be read.
        """
        if url not in self._directories:
            found = read_remote_manifest(url)
            path = local_tokens(url, found=found)
            check_kind(url, found[1], kind="tokens")
            self._directories[url] = path, found[1]
        if stat_files and url not in self._looked_at:
            check_objects(url, self._directories[url][1])
            self._looked_at.add(url)
        return self._directories[url]

    def another(self) -> RemoteShards:
        """Makes a second reader of the same directories, with its own read-ahead."""
        found = RemoteShards()
        found._directories, found._looked_at = self._directories, self._looked_at
        return found

    @property
    def fingerprints(self) -> dict[str, str]:
        """URL -> fingerprint of the directories that are open."""
        return {url: manifest.fingerprint for url, (_, manifest) in self._directories.items()}

    def read(self, spans: Sequence[ShardSpan]) -> list[npt.NDArray[Any]]:
        """Reads the tokens of spans; see `SpanReader.read`."""
        dtypes = [self._dtype(each) for each in spans]
        return [np.frombuffer(data, dtype) for data, dtype in zip(self._read(self.tokens(spans)), dtypes, strict=True)]

    def read_masks(self, spans: Sequence[ShardSpan]) -> list[npt.NDArray[Any]]:
        """Reads the loss masks of spans; see `SpanReader.read_masks`."""
        return [np.frombuffer(data, np.uint8) for data in self._read(masks(spans))]

    def read_ahead(self, spans: Sequence[ShardSpan]) -> None:
        """Requests spans of tokens from the store; drops spans requested two calls ago and not read since."""
        self.read_parts_ahead([], 0)
        self._ask(self.tokens(spans))

    def read_ahead_masks(self, spans: Sequence[ShardSpan]) -> None:
        """Requests loss masks from the store, for the tokens requested last."""
        self._ask(masks(spans))

    def read_parts_ahead(self, parts: Iterable[Sequence[Bytes]], step: int) -> None:
        """Requests the spans of the steps from `step` on, in the parts in which they are cached; see `read_ahead`."""
        self._group += 1
        for key, (group, read) in list(self._asked.items()):
            if group < self._group - 1:
                if isinstance(owner := getattr(read, "__self__", None), Future):
                    owner.cancel()
                del self._asked[key]
        for spans in parts:
            if self.ahead is None or not spans:
                self._ask(spans)
            else:
                self._ask_cached(self.ahead, Part(self.ahead.order, step, tuple(spans)))

    def file(self, prefix: str, tokens: int) -> IndexedTokens:
        """Opens a shard, whose index is copied to this host first; see `SpanReader.file`."""
        found = self._indexes.get(prefix)
        if found is None:
            index = self.index(prefix)
            fetch_index(index)
            found = TokenFile.open_index(Path(index.path).with_suffix(""))
            if found.tokens.size != tokens:
                why = f"{prefix}.idx is of {found.tokens.size} tokens, the manifest lists {tokens}"
                raise DataError(f"{why}\n  try: copy the dataset there again")
            self._indexes[prefix] = found
        return found

    def index(self, prefix: str) -> Index:
        """Returns the index of a shard."""
        url, manifest = self._directory(prefix)
        name = f"{prefix.removeprefix(f'{url}/')}.idx"
        folder = cache_root() / "indexes" / f"{PurePosixPath(url).name}-{manifest.fingerprint[:16]}"
        return Index(f"{prefix}.idx", str(folder / name), manifest.files[name]["sha256"])

    def index_bytes(self, prefix: str) -> int:
        """Returns the size of the index of a shard."""
        url, manifest = self._directory(prefix)
        return int(manifest.files[f"{prefix.removeprefix(f'{url}/')}.idx"]["bytes"])

    def tokens(self, spans: Sequence[ShardSpan]) -> list[Bytes]:
        """Returns the byte ranges of the tokens of spans."""
        return [_bytes(each, ".bin", self._dtype(each).itemsize) for each in spans]

    def _directory(self, prefix: str) -> tuple[str, Manifest]:
        url = prefix.rsplit("/", 2)[0]  # URL/SPLIT/SHARD
        return url, self._directories[url][1]

    def _dtype(self, span: ShardSpan) -> np.dtype[Any]:
        url, manifest = self._directory(span.prefix)
        size = manifest.files[f"{span.prefix[len(url) + 1 :]}.bin"]["bytes"]
        width, rest = divmod(int(size), span.tokens)
        if rest or width not in _DTYPES:
            raise DataError(f"{span.prefix}.bin: {size} bytes are not {span.tokens} ids\n  try: make the dataset again")
        return _DTYPES[width]

    def _ask(self, wanted: Sequence[Bytes]) -> None:
        self._pool = self._pool or ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="remote-shards")
        for each in wanted:
            if each not in self._asked:
                self._asked[each] = self._group, self._pool.submit(read_range, *each).result

    def _ask_cached(self, ahead: ReadAhead, part: Part) -> None:
        """Reads a part in a thread, from the cache or, if it is not there, from the store."""
        loading: Future[Sequence[bytes | memoryview]] = Future()

        def load() -> None:
            try:
                loading.set_result(self._load(ahead, part))
            except BaseException as error:  # raised where the part is read
                loading.set_exception(error)

        threading.Thread(target=load, name="cached-shards", daemon=True).start()

        def reading(number: int) -> Read:
            return lambda: loading.result()[number]

        for number, each in enumerate(part.spans):
            self._asked.setdefault(each, (self._group, reading(number)))

    def _load(self, ahead: ReadAhead, part: Part) -> Sequence[bytes | memoryview]:
        data = ahead.read(part)
        return self._load_directly(ahead, part) if data is None else _split(part, data)

    def _load_directly(self, ahead: ReadAhead, part: Part) -> Sequence[bytes | memoryview]:
        """Reads a part from the store, unless another rank has done so meanwhile, and stores it for the others."""
        with suppress(LockedError, OSError), ahead.cache.downloading(part.key, timeout_s=_OTHERS_S):
            if (data := ahead.cache.read(part)) is not None:
                return _split(part, data)
            read = _read_at_once(part)
            ahead.store(part, read)
            return read
        return _read_at_once(part)

    def _read(self, wanted: Sequence[Bytes]) -> list[bytes | memoryview]:
        self._ask(wanted)
        reads = [self._asked[each][1] for each in wanted]
        found = []
        for (url, start, size), read in zip(wanted, reads, strict=True):
            data = read()
            self._asked.pop((url, start, size), None)
            if len(data) != size:
                why = f"{url} has {len(data)} of the {size} bytes from {start} on: it was replaced, or is not finished"
                raise DataError(f"{why}\n  try: copy the dataset there again")
            found.append(data)
        return found


def _split(part: Part, data: memoryview) -> list[memoryview]:
    ends = itertools.accumulate(size for _, _, size in part.spans)
    return [data[end - size : end] for end, (_, _, size) in zip(ends, part.spans, strict=True)]


def _read_at_once(part: Part) -> list[bytes]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda each: read_range(*each), part.spans))


def check_objects(url: str, manifest: Manifest) -> None:
    """Compares the sizes of a directory's objects with its manifest; one listing.

    Raises:
        DataError: an object is missing or has another size; names the first.
        StorageError: the store cannot be read.
    """
    found = objects_below(url)
    for name, entry in manifest.files.items():
        size = found[name].bytes if name in found else None
        if size != entry["bytes"]:
            what = "is missing" if size is None else f"has {size} bytes"
            why = f"{url}/{name} {what}, the manifest lists {entry['bytes']} bytes"
            raise DataError(f"{why}\n  try: copy the dataset there again")


def masks(spans: Sequence[ShardSpan]) -> list[Bytes]:
    """Returns the byte ranges of the loss masks of spans."""
    return [_bytes(each, MASK, 1) for each in spans]


def _bytes(span: ShardSpan, suffix: str, width: int) -> Bytes:
    return f"{span.prefix}{suffix}", span.start * width, span.length * width
