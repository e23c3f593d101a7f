"""llama.cpp's library, without which some tests are skipped."""

from __future__ import annotations

import pytest

from pipeline.models.gguf import libllama


@pytest.fixture
def llama_cpp() -> None:
    if not libllama.installed():
        pytest.skip("needs llama.cpp's library (pip install xllamacpp)")
