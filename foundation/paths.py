"""Decides which text is a path, for every config key, command-line argument and API call that takes a path.

To support reading or writing further kinds of URLs, start here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from foundation.errors import ConfigError, RefusedValueError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?=[^/]|/|$)")
"""Pattern of `s3://bucket/run`, and of `s3:/bucket/run`, to which `pathlib` turns it. One letter is a Windows drive."""
_VARIABLE = re.compile(r"\$\{[^}]*\}|\$[A-Za-z_][A-Za-z0-9_]*")
"""Pattern of `$HOME`, `${HOME}`, and OmegaConf's `${oc.env:HOME}`."""
STORES = ("s3", "gs", "az", "abfs", "hf")
"""Schemes of URLs that are read in place, if a key or an argument takes them."""
_COPIED_BY = {
    "s3": "headrace copy (what headrace made) or aws s3 sync",
    "gs": "headrace copy (what headrace made) or gcloud storage rsync -r",
    "az": "headrace copy (what headrace made) or azcopy copy --recursive",
    "abfs": "azcopy copy --recursive",
    "abfss": "azcopy copy --recursive",
    "hdfs": "hdfs dfs -copyToLocal (or -copyFromLocal)",
    "hf": "hf download (or hf upload)",
    "http": "curl -LO",
    "https": "curl -LO",
}
"""Scheme of a URL -> the program that copies between its store and a disk."""


@dataclass(frozen=True)
class PathArgument:
    """The `type` of a command-line argument that is a path.

    Attributes:
        url: Treatment of an object store's URL: `refused`; `kept`, if the verb itself reads or writes there; `output`,
            if the verb writes on this host and its output is uploaded; or the kind of directory to copy to this host.
        to: Type of the argument's value.
        named: Whether the path follows a name and a `=`.
    """

    url: Literal["refused", "kept", "output", "run", "folder", "directory"]
    to: type = str
    named: bool = False

    def __call__(self, text: str) -> Any:
        """Returns the argument's value, from text whose URL has been replaced by a path."""
        return self.to(text)

    def as_path(self) -> PathArgument:
        """The same argument with a `Path` as its value."""
        return replace(self, to=Path)

    def after_name(self) -> PathArgument:
        """The same argument as `NAME=PATH`."""
        return replace(self, named=True)


LOCAL = PathArgument("refused")
OUTPUT = PathArgument("output")
RUN = PathArgument("run")
"""A run, or one of its checkpoints."""
FOLDER = PathArgument("folder")
"""A model or a tokenizer."""
DIRECTORY = PathArgument("directory")
"""Any directory with a manifest; only the needed files are copied."""
PLACE = PathArgument("kept")


def is_url(text: str | Path) -> bool:
    """Whether a text is a URL, such as `zip://inner::s3://bucket/x`, even if `Path` has merged its slashes."""
    return "://" in str(text) or _SCHEME.match(str(text)) is not None


def is_store_url(text: str) -> bool:
    """Whether a text is the URL of a directory in one of `STORES`."""
    scheme, separator, rest = text.partition("://")
    return bool(separator) and scheme in STORES and bool(rest.strip("/"))


def local_path(text: str) -> str:
    """Checks that text is a path on this host, and returns it unchanged; empty text is allowed ("none" for some keys).

    Raises:
        RefusedValueError: the text is a URL, begins with `~`, or contains a variable that no shell has replaced or a
            null character.
    """
    if "\0" in text:
        raise RefusedValueError("a path has no null character", "write the path without it")
    if is_url(text):
        raise RefusedValueError(
            "it is a URL, and directories and files are read and written on file systems only: taken as a path it would"
            " be a folder below the working directory",
            _instead_of_url(text),
        )
    home, _, rest = text.partition("/")
    if home.startswith("~") and not Path(home).exists():
        expanded = os.path.expanduser(text)  # noqa: PTH111  (Path.expanduser raises for an unknown user)
        instead = expanded if expanded != text else f"/home/{home[1:]}/{rest}"
        raise RefusedValueError(f"no shell has replaced {home}: it would be a folder of that name", f"use {instead}")
    variables = _VARIABLE.findall(text)
    if variables and not Path(text).exists():
        why = f"no shell has replaced {variables[0]}: it would be a part of the name"
        raise RefusedValueError(why, f"use {_VARIABLE.sub(_value, text)}")
    return text


def _value(found: re.Match[str]) -> str:
    """The value of a variable, as a shell or OmegaConf reads it: `${NAME}`, `${NAME:-ELSE}`, `${oc.env:NAME,ELSE}`."""
    name, _, otherwise = found[0].strip("${}").removeprefix("oc.env:").replace(":-", ",").partition(",")
    return os.environ.get(name) or otherwise.strip() or f"/path/of/{re.sub('[^A-Za-z0-9_]', '_', name)}"


def refuse_url(path: str | Path, *, field: str) -> None:
    """Refuses text that is not a file-system path.

    Args:
        path: text to check.
        field: config key or argument whose value is the text.

    Raises:
        ConfigError: the text is a URL, or has a `~` or variable that no shell has replaced, or a null character.
    """
    try:
        local_path(str(path))
    except RefusedValueError as error:
        raise ConfigError(field, str(path), why=error.why, remedy=error.remedy) from None


def _instead_of_url(text: str) -> str:
    found = _SCHEME.match(text)
    scheme = found[1].lower() if found else ""
    rest = text[found.end() :] if found else text
    if scheme == "file":
        return f"use /{rest.lstrip('/')}"
    name = rest.rstrip("/").rpartition("/")[2] or "data"
    tool = _COPIED_BY.get(scheme.removesuffix("a").removesuffix("n") if scheme in ("s3a", "s3n") else scheme)
    copying = f"{tool} copies between the two" if tool else "copy between the two"
    return f"use a path of a local, shared or mounted file system, e.g. /data/{name}; {copying}"


def path_or_url(text: str) -> str:
    """Checks a path, or a directory's URL in an object store; returns it, a URL without its final slash.

    Raises:
        RefusedValueError: `local_path` refuses the path, or the URL has another scheme.
    """
    return text.rstrip("/") if is_store_url(text) else local_path(text)


PathOrUrl = Annotated[str, AfterValidator(path_or_url)]
"""Type of config keys that take a path or an object store's URL."""
LocalPath = Annotated[str, AfterValidator(local_path)]
"""Type of config keys that take a path."""
