"""Scores a Hugging Face folder with transformers, loaded as a user loads it: quantized activations stay quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.consumers.worker import Score, job_of_command_line, serve
from pipeline.evaluation.loading import check_keys


def load(folder: str) -> tuple[str, Any, Score]:
    """The version, the tokenizer and what scores a window of ids."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    check_keys(Path(folder), info)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    @torch.inference_mode()
    def score(window: Any) -> Any:
        logits = model(input_ids=torch.from_numpy(np.asarray(window))[None], use_cache=False).logits
        return logits[0].float().numpy()

    return transformers.__version__, tokenize, score


if __name__ == "__main__":
    serve(job_of_command_line(), load)
