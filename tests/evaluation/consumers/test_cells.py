"""One cell of every kind: each architecture, scheme and tokenizer of the sweep at least once, by what serves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.consumers.cells import ARCHITECTURES, SCHEMES, TOKENIZERS, groups, run_cell

CELLS = (
    "llama, bf16, sentencepiece-bpe",
    "qwen3, W8A8, bpe",
    "mistral, FP8, sentencepiece-bpe",
    "gemma, Q8_0, sentencepiece-bpe",
    "gpt2, Q4_K_M, bpe",
    "mixtral, W4A16, bpe",
    "qwen3_moe, W4A16, sentencepiece-bpe",
    "deepseek_v3, FP8, bpe",
)
SWEPT = (
    "llama, bf16, sentencepiece-bpe",
    "mistral, FP8, sentencepiece-bpe",
    "gemma, Q8_0, sentencepiece-bpe",
    "mixtral, W4A16, bpe",
    "qwen3_moe, W4A16, sentencepiece-bpe",
    "deepseek_v3, FP8, bpe",
)
"""Files of gemma are scored in `models/gguf/test_write.py`, experts in `compress/quantization/test_experts.py`."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cells")


def test_every_architecture_scheme_and_tokenizer_has_a_cell() -> None:
    known = {cell for cells in groups().values() for cell in cells}
    assert known.issuperset(CELLS)
    parts = [set(each) for each in zip(*(cell.split(", ") for cell in CELLS), strict=True)]
    assert parts == [set(ARCHITECTURES), set(SCHEMES), set(TOKENIZERS)]


@pytest.mark.usefixtures("warm_vllm")
@pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=pytest.mark.sweep if c in SWEPT else pytest.mark.integration) for c in CELLS]
)
def test_a_compressed_model_is_accepted_by_what_serves_it(cell: str, work: Path) -> None:
    passed, why = run_cell(cell, work)
    assert passed, why
    assert "refused" not in why
    expected = "llama.cpp" if cell.split(", ")[1].startswith("Q") else "transformers"
    assert expected in why
