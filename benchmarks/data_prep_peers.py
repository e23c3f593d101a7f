"""The tools of `benchmarks/data_prep.py` that have no command line of their own."""

from __future__ import annotations

import os
import runpy
import sys
import time


def engine(corpus: str, tokenizer: str) -> None:
    """Runs fastokens alone, in one thread, with batches of a map task's size; only the encoding is timed."""
    os.environ["FASTOKENS_BPE_THREADS"] = "1"
    import orjson  # noqa: PLC0415
    from fastokens import Tokenizer  # noqa: PLC0415

    loaded = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    batches: list[list[str]] = [[]]
    characters = 0
    with open(corpus, "rb") as lines:  # noqa: PTH123
        for line in lines:
            text = orjson.loads(line)["text"]
            batches[-1].append(text)
            characters += len(text)
            if characters >= 1 << 18:
                batches.append([])
                characters = 0
    began = time.process_time()
    for batch in batches:
        loaded.encode_batch_flat(batch, False, True)
    seconds = time.process_time() - began
    size = sum(len(text.encode()) for batch in batches for text in batch)
    print(f"engine alone: {size / 1e6 / seconds:.1f} MB/s", file=sys.stderr)


def datatrove(corpus: str, tokenizer: str) -> None:
    """Runs datatrove's reader and tokenizer step on the two halves of the corpus, without its shuffling merge."""
    from datatrove.executor import LocalPipelineExecutor  # noqa: PLC0415
    from datatrove.pipeline.readers import JsonlReader  # noqa: PLC0415
    from datatrove.pipeline.tokens import DocumentTokenizer  # noqa: PLC0415

    steps = [
        JsonlReader(corpus),
        DocumentTokenizer("tokens", tokenizer_name_or_path=f"{tokenizer}/tokenizer.json", shuffle_documents=False),
    ]
    LocalPipelineExecutor(steps, tasks=2, workers=2, logging_dir="logs").run()


def datasets(corpus: str, tokenizer: str) -> None:
    """Runs `load_dataset` and `map` with two processes; the output is Arrow files, not shards."""
    from datasets import load_dataset  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    texts = load_dataset("json", data_files=corpus, cache_dir="cache")["train"]
    names = texts.column_names
    texts.map(lambda rows: {"ids": loaded(rows["text"])["input_ids"]}, batched=True, num_proc=2, remove_columns=names)


def run(script: str, *arguments: str) -> None:
    """Runs a script of Megatron-LM, also with a Python before 3.12."""
    import typing  # noqa: PLC0415

    import typing_extensions  # noqa: PLC0415

    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    sys.path.insert(0, script.rsplit("/", 2)[0])
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
