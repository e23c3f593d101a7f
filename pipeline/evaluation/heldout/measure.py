"""Evaluates a model folder in a subprocess, so that exactly the written files are measured. No torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

from foundation.errors import DataError
from foundation.task_figures import Figures
from pipeline.evaluation.heldout.data import HeldOutData


def measure(folder: Path, data: HeldOutData) -> Figures:
    """Runs `python -m pipeline.evaluation.heldout` on a folder; its progress bar appears on stderr.

    Returns:
        The JSON: loss_nats, perplexity, bits_per_byte, tokens, tokens_per_second, weight_bytes, dtype, device, ...

    Raises:
        DataError: the folder cannot be loaded in the subprocess, or its perplexity is not finite.
    """
    # -P: a folder named pipeline in the current directory must not shadow this package
    command = [sys.executable, "-P", "-m", "pipeline.evaluation.heldout", str(folder), "--json", *_arguments(data)]
    quiet = os.environ | {"TQDM_DISABLE": "1"}  # the libraries' progress bars would interleave with ours
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=quiet, check=False)
    if done.returncode != 0:
        why = f"its evaluation in a subprocess ended with exit code {done.returncode}; its message is above"
        raise DataError(f"{folder} was not accepted: {why}")
    return finite(folder, json.loads(done.stdout.splitlines()[-1]))


def finite(folder: Path, result: Figures) -> Figures:
    """Returns the result after checking that its perplexity is finite.

    Raises:
        DataError: the perplexity is not finite.
    """
    if not math.isfinite(result["perplexity"]):
        raise DataError(f"{folder} was not accepted: its held-out perplexity is {result['perplexity']}")
    return result


def _arguments(data: HeldOutData) -> list[str]:
    limit = [] if data.max_tokens is None else ["--max-tokens", str(data.max_tokens)]
    lengths = ["--sequence-length", str(data.sequence_length), "--batch-size", str(data.batch_size)]
    lengths.append("--mask-documents" if data.mask_documents else "--no-mask-documents")
    return ["--data", data.path, "--split", data.split, *lengths, *limit]
