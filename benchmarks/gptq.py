"""GPTQ against llm-compressor's: KL to the original, time and memory, W4A16 in groups of 32, the same windows for both.

    python -m benchmarks.gptq MODEL TOKENS --peer PYTHON [--samples 128] [--sequence-length 128]

PYTHON is that of an environment with llmcompressor, which pins transformers of its own. Both results, and rounding to
the nearest, are scored by transformers on held-out windows, in processes of their own. Time is that of the method
alone on the peer's side, and of the whole command, evaluations included, on ours; memory is each process's peak.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.dataset import TokenDataset, choose_windows

PEER = """
import json, resource, sys, time
import numpy as np, torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
source, rows, out = sys.argv[1:]
rows = np.load(rows)
data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": np.ones_like(rows).tolist()})
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
began = time.perf_counter()
oneshot(model=model, dataset=data, recipe=GPTQModifier(ignore=["lm_head"], config_groups=groups),
        num_calibration_samples=len(rows), max_seq_length=rows.shape[1], shuffle_calibration_samples=False,
        tokenizer=AutoTokenizer.from_pretrained(source))
taken = time.perf_counter() - began
model.save_pretrained(out, save_compressed=True)
print(json.dumps([taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3]))
"""


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("tokens", type=Path, help="tokens directory")
    parser.add_argument("--peer", required=True, help="Python with llmcompressor")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--positions", type=int, default=16_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-gptq-") as folder:
        work = Path(folder)
        made = {name: ours(asked, work, name) for name in ("rtn", "gptq")}
        made["llm-compressor"] = peer(asked, work)
        print("method | mean KL | max KL | top-1 | seconds | peak MB")
        for name, (path, seconds, memory) in made.items():
            found = score(asked, path)
            figures = f"{found['mean_kl']:.6f} | {found['max_kl']:.4f} | {found['top1_agreement']:.2%}"
            print(f"{name} | {figures} | {seconds:.1f} | {memory:.0f}")


def ours(asked: argparse.Namespace, work: Path, method: str) -> tuple[Path, float, float]:
    """The folder, seconds and peak megabytes of `headrace quantize`."""
    data = {"path": str(asked.tokens), "sequence_length": asked.sequence_length, "max_tokens": 10_000}
    config = {
        "model": str(asked.model),
        "output": str(work / method),
        "scheme": "W4A16",
        "method": method,
        "data": data,
    }
    config |= {"calibration": {"samples": asked.samples}, "consumers": ["transformers"], "dtype": "float32"}
    (work / f"{method}.json").write_text(json.dumps(config))
    code = (
        "import json, resource, sys, time; began = time.perf_counter()\n"
        "from pipeline.quantize import main; main()\n"
        "print(json.dumps([time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3]))"
    )
    seconds, memory = _last_line([sys.executable, "-c", code, "--config", str(work / f"{method}.json")])
    return work / method, seconds, memory


def peer(asked: argparse.Namespace, work: Path) -> tuple[Path, float, float]:
    """The same of llm-compressor."""
    dataset = TokenDataset.open(asked.tokens, split="train", sequence_length=asked.sequence_length)
    np.save(work / "rows.npy", dataset.read(choose_windows(dataset.windows, asked.samples))[:, :-1])
    out = work / "llm-compressor"
    seconds, memory = _last_line([asked.peer, "-c", PEER, str(asked.model), str(work / "rows.npy"), str(out)])
    for file in asked.model.glob("tokenizer*"):
        shutil.copy(file, out)
    return out, seconds, memory


def score(asked: argparse.Namespace, folder: Path) -> Any:
    """The figures of transformers."""
    command = [sys.executable, "-m", "pipeline", "compress", "verify", folder, "--original", asked.model]
    command += ["--data", asked.tokens, "--sequence-length", asked.sequence_length, "--positions", asked.positions]
    found: dict[str, Any] = _last_line([*map(str, command), "--consumers", "transformers", "--json"])
    return found["consumers"]["transformers"]


def _last_line(command: list[str]) -> Any:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
