"""Job scripts as they are submitted: a script of `slurm/` with a site's options in its header.

The text stays the shipped one, with its comments. Options take the place of those in the header, and the settings of
the submission (environment, arguments) follow it, so that the file says everything and can be submitted again by hand.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

_OPTION = re.compile(r"##?SBATCH\s+(--[\w-]+)")
_HINT = re.compile(r"# (Edit the header|A line that starts with '##SBATCH')")


def fill(shipped: Path, *, about: str, options: Mapping[str, str | None], settings: Sequence[str]) -> str:
    """The text of a script of `slurm/` with other options.

    Args:
        shipped: the script.
        about: one line on the origin of the new script.
        options: option of sbatch, with its dashes -> value, None for one without a value.
        settings: lines of bash that run before the script's own.
    """
    lines = shipped.read_text(encoding="utf-8").splitlines()
    body = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    left = dict(options)
    header = [_replaced(line, left) for line in lines[1:body] if not _HINT.match(line)]
    header += [_line(name, value) for name, value in left.items()]
    kept = [line for line in header if line]
    return "\n".join([lines[0], f"# {about}", "#", *kept, "", *settings, "", *lines[body:], ""])


def option_of(text: str) -> tuple[str, str | None]:
    """Name and value of an option such as `--constraint=h100` or `--exclusive`."""
    name, equals, value = text.replace(" ", "=", 1).partition("=")
    return name, value if equals else None


def quoted(words: Sequence[str]) -> str:
    """Words as a command line, quoted for bash."""
    return shlex.join(words)


def _replaced(line: str, left: dict[str, str | None]) -> str:
    """A line of the header with the new value of its option, which is taken out of `left`."""
    found = _OPTION.match(line)
    return _line(found[1], left.pop(found[1])) if found and found[1] in left else line


def _line(name: str, value: str | None) -> str:
    return f"#SBATCH {name}" if value is None else f"#SBATCH {name}={value}"
