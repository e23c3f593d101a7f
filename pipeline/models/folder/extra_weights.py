"""Tensors in a model folder that its language model does not use, such as layers that predict more tokens. No torch.

DeepSeek-V3 stores its multi-token prediction (MTP) modules as decoder layers behind the last one: with
num_hidden_layers 61 and num_nextn_predict_layers 1, as `model.layers.61.*`. Other families name them `mtp.*`,
`model.mtp_layers.*` or `model.mtp_block.*`. transformers' causal language models have no such modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipeline.models.folder.weight_files import HfFields

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Config keys for the number of layers that predict more tokens."""
_NAMED = re.compile(r"(^|\.)mtp")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_OTHER_TOWERS = re.compile("vision|visual|audio|speech")


def extra_names(config: HfFields, names: Iterable[str]) -> set[str]:
    """Returns the names of the tensors that belong to layers that predict more tokens.

    Args:
        config: the parsed config.json, of which `num_hidden_layers` and the keys of `COUNTS` are read.
        names: names of the tensors in the folder.
    """
    every = list(names)
    text = {**config, **(config.get("text_config") or {})}
    depth = text.get("num_hidden_layers")
    beyond = {name: number for name in every if (number := layer_number(name)) >= (depth or number + 1)}
    end = depth + _count(text) if depth and beyond else 0
    return {name for name in every if _NAMED.search(name)} | {n for n, number in beyond.items() if number < end}


def layer_number(name: str) -> int:
    """Returns the number of the decoder layer that a tensor belongs to; -1 outside of decoder layers."""
    found = None if _OTHER_TOWERS.search(name) else _LAYER.search(name)
    return -1 if found is None else int(found[2])


def renumbered(name: str, *, by: int) -> str:
    """Returns a tensor's name with the number of its layer changed `by` so much, if it has one."""
    number = layer_number(name)
    if number < 0 or _NAMED.search(name):
        return name
    return _LAYER.sub(lambda found: f"{found[1]}layers.{number + by}.", name, count=1)


def _count(text: HfFields) -> int:
    """Number of layers that predict more tokens; transformers leaves the key out where it has the default value."""
    given = next((text[key] for key in COUNTS if isinstance(text.get(key), int)), None)
    if given is not None:
        return int(given)
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  takes seconds

    kind = text.get("model_type")
    default: Any = CONFIG_MAPPING[kind]() if kind in CONFIG_MAPPING else None
    return int(next((value for key in COUNTS if (value := getattr(default, key, None))), 0))


def extra_line(folder: str | Path, names: Sequence[str], *, what: str = "are not loaded") -> str:
    """Returns the message about tensors that the language model does not use.

    Args:
        folder: the model folder, as the user named it.
        names: names of the tensors.
        what: Verb and the rest of the sentence about them, for instance "are not loaded".
    """
    shown = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    return f"{folder}: {len(names)} tensors that the language model does not use {what}: {shown}"
