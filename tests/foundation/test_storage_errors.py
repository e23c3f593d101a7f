"""A full disk or a path without permission ends a command with a message, whatever library raised it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
from safetensors import SafetensorError

from foundation.cli import guarded


def raiser(error: Exception) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "out/file"),
            "out/file: No space left on device\n  try: free space",
        ),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            "No space left on device\n  try: free space",
        ),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "out"),
            "out: Permission denied\n  try: check the path",
        ),
    ],
)
def test_a_storage_error_says_what_to_do(error: Exception, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raiser(error)) == 2
    assert f"error: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), SafetensorError("header too large")])
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        guarded(raiser(error))
