"""Scores model.gguf with llama.cpp."""

from __future__ import annotations

from pathlib import Path

from pipeline.evaluation.consumers.worker import Served, job_of_command_line, serve, threads
from pipeline.models.gguf.libllama import Model, version


def load(folder: str) -> Served:
    """Loads model.gguf."""
    model = Model(Path(folder) / "model.gguf", threads=threads())

    def tokenize(text: str) -> list[int]:
        return model.tokenize(text, add_special=False, parse_special=False)

    return Served(version(), tokenize, lambda window: model.logits([int(each) for each in window]), model.generate)


if __name__ == "__main__":
    serve(job_of_command_line(), load)
