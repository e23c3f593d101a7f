"""Decides which text is a path, for every config key, command-line argument and call of the API that takes one.

Support for reading or writing further URLs begins here.
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
"""Pattern of `s3://bucket/run`, and `s3:/bucket/run`, which `pathlib` makes of it. One letter is a Windows drive."""
_VARIABLE = re.compile(r"\$\{[^}]*\}|\$[A-Za-z_][A-Za-z0-9_]*")
"""Pattern of `$HOME`, `${HOME}`, and `${oc.env:HOME}` of OmegaConf."""
STORES = ("s3", "gs", "az", "abfs", "hf")
"""Schemes of URLs that are read in place, where a key or an argument takes them."""
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
        url: What becomes of the URL of an object store: `refused`; `kept`, if the verb itself reads or writes there;
            `output`, if the verb writes on this host and its output is uploaded; or the kind of directory that is
            copied to this host.
        to: Type of the argument's value.
        named: Whether the path follows a name and a `=`.
    """

    url: Literal["refused", "kept", "output", "run", "folder", "directory"]
    to: type = str
    named: bool = False

    def __call__(self, text: str) -> Any:
        """The value of the argument, from text in which a URL has been replaced."""
        return self.to(text)

    def as_path(self) -> PathArgument:
        """The same argument, whose value is a `Path`."""
        return replace(self, to=Path)

    def after_name(self) -> PathArgument:
        """The same argument as `NAME=PATH`."""
        return replace(self, named=True)


LOCAL = PathArgument("refused")
OUTPUT = PathArgument("output")
RUN = PathArgument("run")
"""A run, or a checkpoint of one."""
FOLDER = PathArgument("folder")
"""A model or a tokenizer."""
DIRECTORY = PathArgument("directory")
"""Any directory with a manifest, of which the files that are needed are copied."""
PLACE = PathArgument("kept")


def is_url(text: str | Path) -> bool:
    """Whether a text is a URL, such as `zip://inner::s3://bucket/x`, even after `Path` has merged its slashes."""
    return "://" in str(text) or _SCHEME.match(str(text)) is not None


def is_store_url(text: str) -> bool:
    """Whether a text is the URL of a directory in one of `STORES`."""
    scheme, separator, rest = text.partition("://")
    return bool(separator) and scheme in STORES and bool(rest.strip("/"))


def local_path(text: str) -> str:
    """Checks that text is a path on this host, and returns it unchanged; empty text is allowed ("none" for some keys).

    Raises:
        RefusedValueError: it is a URL, begins with a `~` or holds a variable that no shell has replaced, or holds a
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
    """The value of a variable, as a shell and OmegaConf read it: `${NAME}`, `${NAME:-ELSE}`, `${oc.env:NAME,ELSE}`."""
    name, _, otherwise = found[0].strip("${}").removeprefix("oc.env:").replace(":-", ",").partition(",")
    return os.environ.get(name) or otherwise.strip() or f"/path/of/{re.sub('[^A-Za-z0-9_]', '_', name)}"


def refuse_url(path: str | Path, *, field: str) -> None:
    """Refuses text that is no path of a file system.

    Args:
        path: text to check.
        field: config key or argument that the text was given for.

    Raises:
        ConfigError: it is a URL, has a `~` or variable that no shell has replaced, or a null character.
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
    """Checks a path, or the URL of a directory in an object store; returns it, a URL without a slash at its end.

    Raises:
        RefusedValueError: the path is invalid for `local_path`, or the URL is of another kind.
    """
    return text.rstrip("/") if is_store_url(text) else local_path(text)


PathOrUrl = Annotated[str, AfterValidator(path_or_url)]
"""The type of every config key that is a path, or a URL of an object store."""
LocalPath = Annotated[str, AfterValidator(local_path)]
"""The type of every config key that is a path."""
