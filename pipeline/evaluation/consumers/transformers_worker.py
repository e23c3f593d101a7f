"""Scores a Hugging Face folder with transformers, loaded as a user loads it: quantized activations stay quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from pipeline.evaluation.consumers.worker import Served, job_of_command_line, serve, threads
from pipeline.models.folder.loading import check_keys
from pipeline.models.tokenizer_files import load_tokenizer


def load(folder: str) -> Served:
    """Loads the folder's model and tokenizer; a missing or unexpected tensor is an error."""
    torch.set_num_threads(threads())
    model, info = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    check_keys(Path(folder), info)
    return served(model.eval(), folder)


def served(model: Any, folder: str) -> Served:
    """Serves a loaded model, on any device, with the tokenizer of its folder."""
    model.generation_config.eos_token_id = None  # generation continues after the end of a text
    # a folder may lack one: windows of ids need none
    found = any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer = load_tokenizer(Path(folder)) if found else None

    def tokenize(text: str) -> list[int]:
        assert tokenizer is not None, f"{folder} has no tokenizer"
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    @torch.inference_mode()
    def score(window: Any) -> Any:
        ids = torch.from_numpy(np.asarray(window))[None].to(model.device)
        return model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=model.device)
        how = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens}
        made: list[list[int]] = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)[
            :, ids.shape[1] :
        ].tolist()
        return made

    return Served(transformers.__version__, tokenize, score, generate)


if __name__ == "__main__":
    serve(job_of_command_line(), load)
