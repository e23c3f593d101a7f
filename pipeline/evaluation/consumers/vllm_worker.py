"""Scores a Hugging Face folder with vLLM. Runs in the Python of vLLM's own environment, which lacks headrace."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

sys.path.insert(0, str(Path(__file__).parent))
from worker import Served, job_of_command_line, serve, threads

os.environ.setdefault("OMP_NUM_THREADS", str(threads()))  # read when torch is loaded

import numpy as np
import vllm


def load(folder: str) -> Served:
    """Loads the folder into an eager vLLM engine without a prefix cache."""
    job = job_of_command_line()
    how: dict[str, Any] = {"enforce_eager": True, "max_logprobs": -1, "disable_log_stats": True}
    # no cache: the same prompt is computed for the warmup and again
    served = vllm.LLM(folder, max_model_len=longest(job), enable_prefix_caching=False, **how)
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

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        settings = vllm.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(each.outputs[0].token_ids) for each in served.generate(asked, settings, use_tqdm=False)]

    return Served(vllm.__version__, tokenize, score, generate)


def longest(job: Path) -> int:
    """Number of positions that the job needs: the longest window or generation, and one more token."""
    length = int(np.load(job / "windows.npy", mmap_mode="r").shape[1])
    about = json.loads((job / "job.json").read_text())
    prompts = about["generation"]["prompts"]
    generated = len(prompts[0]) + about["generation"]["new_tokens"] if prompts else 0
    return max(length, generated) + 1


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
