"""Reader of WebDataset's tar archives: consecutive members with the same key form a sample, which is a document.

Tarfile takes a damaged header within an archive for the archive's end; here the file counts as damaged, as does a file
without an end.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Self

import orjson

from data_prep.sources.bytesource import DamagedFileError, Digest, open_bytes
from data_prep.sources.jsonl import checked
from data_prep.sources.records import (
    TOO_LONG,
    BadRecord,
    Problem,
    Record,
    TextBatch,
    WantedFields,
    in_batches,
    too_long,
)

_PIECE_BYTES = 1 << 20
_ERRORS = "backslashreplace"  # for names that are not UTF-8: different names stay different, and are text


def read(path: str, *, source: str, file: str, wanted: WantedFields, digest: Digest) -> Iterator[TextBatch | BadRecord]:
    """Yields a document for each sample: consecutive members `KEY.EXTENSION`, where KEY ends at the first dot after the
    last slash.

    The fields of a sample are those of its `json` member, that object as `json`, and the texts of its member `txt` and
    of members whose extension is a wanted field. `txt` is the `text` of a sample without another text. Other members,
    such as images, are not read.

    Raises:
        DamagedFileError: the archive is truncated or damaged, or continues after its end. The samples before have been
            yielded, except the last one, which may lack members.
    """
    return in_batches(_records(path, wanted, digest), source=source, file=file, unit="record", wanted=wanted)


class _TarMember(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """Overrides `TarInfo`: leaves only one header error to `TarFile`, the zeros at an archive's end."""
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except (tarfile.HeaderError, ValueError, RecursionError) as error:  # the latter two come from malicious headers
            raise DamagedFileError(f"byte {archive.offset:,}: {error}, where a member or the end should be") from None


class _KeyMembers:
    """The members of one key so far; `problem`: why the first unusable member cannot be used, or None."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.problem: Problem | None = None
        self._texts: dict[str, str] = {}
        self._fields: Record = {}

    def add(self, name: str, extension: str, content: bytes) -> None:
        """Adds the member `name`, which is UTF-8 or, with the extension `json`, JSON."""
        try:
            if extension != "json":
                self._texts[extension] = content.decode().removeprefix("\ufeff")
                return
            found = orjson.loads(content)
            self._fields = {"json": found} | (found if isinstance(found, dict) else {})
        except ValueError as error:
            self.problem = self.problem or ("not JSON" if extension == "json" else "not UTF-8", f"{name}: {error}")

    def record(self, wanted: WantedFields) -> Record | Problem:
        record = {"text": self._texts["txt"]} if "txt" in self._texts else {}
        return self.problem or checked(record | self._fields | self._texts | {"__key__": self.key}, wanted)


def _records(path: str, wanted: WantedFields, digest: Digest) -> Iterator[tuple[int, int, Record | Problem]]:
    try:
        with (
            open_bytes(path, digest) as stream,
            tarfile.open(
                fileobj=stream, mode="r|", tarinfo=_TarMember, bufsize=_PIECE_BYTES, errors=_ERRORS
            ) as archive,
        ):
            for number, sample in enumerate(_samples(archive, wanted)):
                yield number, number, sample.record(wanted)
            while piece := archive.fileobj.read(_PIECE_BYTES):
                if piece.strip(b"\0"):
                    raise DamagedFileError("there is more after the end of the archive")
    except tarfile.TarError as error:
        raise DamagedFileError(str(error)) from None


def _samples(archive: tarfile.TarFile, wanted: WantedFields) -> Iterator[_KeyMembers]:
    sample: _KeyMembers | None = None
    for member in archive:
        archive.members.clear()  # type: ignore[attr-defined]  # a list of all that were read, for an index
        folder, slash, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        if not member.isfile() or not stem:
            continue
        if sample is None or sample.key != folder + slash + stem:
            if sample is not None:
                yield sample
            sample = _KeyMembers(folder + slash + stem)
        if extension not in ("json", "txt", *wanted.columns):
            continue
        if wanted.max_bytes is not None and member.size > wanted.max_bytes:
            detail = too_long(f"{member.name}: {member.size:,} bytes", limit=wanted.max_bytes)
            sample.problem = sample.problem or (TOO_LONG, detail)
            continue
        content = archive.extractfile(member)
        assert content is not None, "a member that is a file"
        sample.add(member.name, extension, content.read())
    if sample is not None:
        yield sample
