"""Scores a Hugging Face folder with vLLM. Run by the Python of vLLM's own environment, where headrace is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import vllm

sys.path.insert(0, str(Path(__file__).parent))
from worker import job_of_command_line, serve


def load(folder: str) -> tuple[str, Any, Any]:
    """The version, the tokenizer and what scores a window of ids."""
    job = job_of_command_line()
    length = int(np.load(job / "windows.npy", mmap_mode="r").shape[1])
    served = vllm.LLM(folder, max_model_len=length + 1, enforce_eager=True, max_logprobs=-1, disable_log_stats=True)
    tokenizer = served.get_tokenizer()
    settings = vllm.SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False, flat_logprobs=True
    )
    size = served.llm_engine.model_config.get_vocab_size()

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def score(window: Any) -> Any:
        prompt = {"prompt_token_ids": [int(each) for each in window]}
        (done,) = served.generate([prompt], settings, use_tqdm=False)
        return dense(done.prompt_logprobs, size)

    return vllm.__version__, tokenize, score


def dense(found: Any, size: int) -> Any:
    """float32 [T - 1, V] of vLLM's log-probabilities of a prompt, whose first position has none."""
    out = np.full((len(found) - 1, size), -np.inf, dtype=np.float32)
    for row in range(1, len(found)):
        entries = found[row]
        ids = np.fromiter(entries.keys(), dtype=np.int64, count=len(entries))
        out[row - 1, ids] = np.fromiter((each.logprob for each in entries.values()), np.float32, count=len(entries))
    return out


if __name__ == "__main__":
    serve(job_of_command_line(), load)
