"""Scores model.gguf with llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.consumers.worker import Score, job_of_command_line, serve
from pipeline.gguf_files.libllama import Model, version


def load(folder: str) -> tuple[str, Any, Score]:
    """The version, the tokenizer and what scores a window of ids."""
    model = Model(Path(folder) / "model.gguf")

    def tokenize(text: str) -> list[int]:
        return model.tokenize(text, add_special=False, parse_special=False)

    return version(), tokenize, lambda window: model.logits([int(each) for each in window])


if __name__ == "__main__":
    serve(job_of_command_line(), load)
