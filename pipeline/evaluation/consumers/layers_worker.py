"""KL divergence that the compressed weights of each decoder layer cause alone: `layers_worker ORIGINAL RESULT OUT`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.data.permutation import permute
from pipeline.models.folder.loading import load_model

_TOKENS = 128


@torch.inference_mode()
def main(original: str, result: str, out: str) -> None:
    """Writes [[part, KL in nats], ...], largest first.

    Only weights are exchanged: activations are not quantized here, even if they are while serving.
    """
    model, compressed = (load_model(Path(path), dtype=torch.float32) for path in (original, result))
    own, other = dict(model.named_parameters()), dict(compressed.named_parameters())
    size = model.config.get_text_config().vocab_size
    ids = torch.from_numpy(permute(range(min(_TOKENS, size)), size=size, key=0))[None]
    expected = log_probabilities(model, ids)
    parts: dict[str, list[str]] = {}
    for name, parameter in own.items():
        if name in other and other[name].shape == parameter.shape:
            parts.setdefault(part_of(name), []).append(name)
    rows = []
    for part, names in parts.items():
        kept = {name: own[name].clone() for name in names}
        for name in names:
            own[name].copy_(other[name])
        found = log_probabilities(model, ids)
        rows.append((part, float((expected.exp() * (expected - found)).sum(-1).mean())))
        for name in names:
            own[name].copy_(kept[name])
    Path(out).write_text(json.dumps(sorted(rows, key=lambda row: -row[1])))


def part_of(name: str) -> str:
    """The decoder layer of a parameter, or its module for parameters outside of decoder layers."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else name.rpartition(".")[0]


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities of a model, float64 [1, T, V]."""
    found: Tensor = model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
