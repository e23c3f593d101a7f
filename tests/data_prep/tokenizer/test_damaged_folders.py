"""Damaged tokenizer folders are errors that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from data_prep.tokenizer.load import describe
from data_prep.tokenizer.train import write_folder
from foundation.errors import DataError


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[]", b'{"model": {}}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_folder_is_an_error_with_its_file(name: str, content: bytes | None, tmp_path: Path) -> None:
    """As of a Megatron-LM dataset, whose tokenizer is described when training starts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens(["a", "b"])
    write_folder(tokenizer, tmp_path, eos_token="a")
    assert describe(tmp_path, kind="given")["eos_id"] == 0
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    if name == "tokenizer_config.json" and content in (None, b'{"model": {}}'):  # a folder without special tokens
        assert describe(tmp_path, kind="given")["eos_id"] is None
        return
    with pytest.raises(DataError, match=f"{name} is (damaged|missing)"):
        describe(tmp_path, kind="given")
