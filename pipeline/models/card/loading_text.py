"""Instructions to load a model, for each program that serves it, as Markdown. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foundation.foreign_json import read_json

_TRANSFORMERS = """### transformers

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
ids = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=64)[0]))
```
"""
_LLAMA_CPP = """### llama.cpp

```bash
llama-cli -m FOLDER/model.gguf -p "Once" -n 64
llama-server -m FOLDER/model.gguf
```
"""


def how_to_load(
    folder: Path, *, scheme: str, consumers: Mapping[str, Any] | None, tokenizer: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yields a section with a snippet for each program that can load the model, and the reason for each that cannot.

    Args:
        folder: model folder with config.json, or with model.gguf.
        scheme: scheme of the weights, or their dtype.
        consumers: program -> its figures after a compression, or {"not_run": reason}; None if no program was tried.
        tokenizer: "llama_cpp" (llama.cpp's name of the pre-tokenizer, or None) and "why"; None if unknown.
    """
    yield "## How to load it\n"
    yield "FOLDER is where this file lies.\n"
    if (folder / "model.gguf").is_file():
        yield _LLAMA_CPP
        return
    yield _TRANSFORMERS + (_needs(folder) and f"\n{_needs(folder)}\n")
    yield from _vllm(consumers)
    yield from _conversion(scheme, tokenizer)


def _needs(folder: Path) -> str:
    """Names the package that transformers needs for a quantized folder, in a sentence; empty for other folders."""
    config = read_json(folder / "config.json")
    return "It needs `pip install compressed-tensors`." if config.get("quantization_config") else ""


def _vllm(consumers: Mapping[str, Any] | None) -> Iterator[str]:
    text = "### vLLM\n\n```bash\nvllm serve FOLDER\n```\n"
    found = (consumers or {}).get("vllm") or {}
    if "mean_kl" in found:
        yield f"{text}\nvLLM {found['version']} scored this folder (below).\n"
    elif "not_run" in found:
        yield f"{text}\nNot run with this folder: {found['not_run']}.\n"
    else:
        yield f"{text}\nNot tried with this folder.\n"


def _conversion(scheme: str, tokenizer: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields how to convert for llama.cpp; GGUF files are written from a floating-point folder."""
    yield "### llama.cpp\n"
    if tokenizer is not None and tokenizer.get("llama_cpp") is None:
        yield f"llama.cpp has no such tokenizer: {tokenizer.get('why')}.\n"
        return
    if not scheme.startswith(("float", "bfloat")):
        yield "llama.cpp reads GGUF files: quantize the original with the scheme Q8_0 or Q4_K_M in place of this one.\n"
        return
    named = f" Its pre-tokenizer is llama.cpp's `{tokenizer['llama_cpp']}`." if tokenizer else ""
    yield f"Write a GGUF file with `headrace quantize`, scheme Q8_0 or Q4_K_M.{named}\n"
