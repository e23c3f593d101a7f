"""Outlier channels: what rounding loses, and what GPTQ and smoothing keep; KL to the original, by transformers.

    python -m benchmarks.outliers MODEL TOKENS [--sequence-length 128]

MODEL is a Llama in one safetensors file. Two models that compute the same are made of it, with 6 channels of every norm
30 times as large in the activations, or in the weights that read them (tests/compress/quantization/outliers.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.base.directory import read_manifest
from tests.compress.quantization.outliers import make_outliers

INT4, INT8, FP8 = {"scheme": "W4A16", "group_size": 64}, {"scheme": "W8A8"}, {"scheme": "FP8"}
SMOOTH, ROTATE, GPTQ = {"smoothing": 0.5}, {"rotation": True}, {"method": "gptq"}
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "weights": (INT4, INT4 | GPTQ, INT4 | SMOOTH, INT4 | GPTQ | SMOOTH, INT4 | GPTQ | ROTATE),
    "activations": (INT8, INT8 | SMOOTH, INT8 | ROTATE, INT8 | GPTQ | SMOOTH, FP8, FP8 | SMOOTH),
    "none": (INT4, INT4 | GPTQ, INT4 | GPTQ | SMOOTH, INT4 | GPTQ | ROTATE, INT8, INT8 | SMOOTH, INT8 | ROTATE),
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("tokens", type=Path, help="tokens directory")
    parser.add_argument("--sequence-length", type=int, default=128)
    asked = parser.parse_args()
    print("outliers | scheme | method | smoothing | rotation | mean KL | top-1 | nats lost")
    with tempfile.TemporaryDirectory(prefix="headrace-outliers-") as folder:
        for where, cases in CASES.items():
            source = asked.model
            if where != "none":
                source = make_outliers(asked.model, Path(folder) / where, activations=where == "activations")
            for number, fields in enumerate(cases):
                shown = [fields["scheme"], fields.get("method", "rtn"), str(fields.get("smoothing", "-"))]
                shown.append("yes" if fields.get("rotation") else "-")
                print(" | ".join([where, *shown, quantized(asked, source, Path(folder) / f"{where}-{number}", fields)]))


def quantized(asked: argparse.Namespace, source: Path, out: Path, fields: dict[str, Any]) -> str:
    """Runs `headrace quantize`; what transformers says of the result."""
    data = {"path": str(asked.tokens), "sequence_length": asked.sequence_length, "max_tokens": 20_000}
    config = {"model": str(source), "output": str(out), "data": data, "consumers": ["transformers"], "max_mean_kl": 20}
    out.with_suffix(".json").write_text(json.dumps(config | fields))
    command = [sys.executable, "-m", "pipeline.quantize", "--config", str(out.with_suffix(".json"))]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    details = read_manifest(out, kind="model").details
    found = details["consumers"]["transformers"]
    lost = details["after"]["loss_nats"] - details["before"]["loss_nats"]
    return f"{found['mean_kl']:.5f} | {found['top1_agreement']:.1%} | {lost:+.4f}"


if __name__ == "__main__":
    main()
