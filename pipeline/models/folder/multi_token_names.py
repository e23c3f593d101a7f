"""Names of multi-token prediction (MTP) modules in the files of model families. No torch.

A model of this project names the parts of module k (from 0) `mtp.k.enorm`, `mtp.k.hnorm`, `mtp.k.eh_proj`,
`mtp.k.layer` and `mtp.k.norm`. Families store them under other names. The tables follow the loaders of vLLM 0.30
(vllm/model_executor/models/*_mtp.py). Families without a table have the names of DeepSeek-V3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MODULES = "mtp"
"""Name of the list of modules in a model."""

_OWN = re.compile(rf"{MODULES}\.(\d+)\.(\w+)\.(.+)$")


@dataclass(frozen=True)
class ModuleNames:
    """How a family names and builds its modules.

    Attributes:
        parts: own name of a part -> its name in files, where {n} is the number of decoder layers plus k, and {k} is k.
        copies: suffixes after `layer` under which the files repeat the embedding and the head.
        most: largest number of modules that the names allow; None for any.
        dense: whether the module's decoder layer has a dense MLP although the model has experts.
        count: config key for the number of modules.
    """

    parts: Mapping[str, str]
    copies: tuple[str, ...] = ()
    most: int | None = None
    dense: bool = False
    count: str = "num_nextn_predict_layers"

    def in_files(self, name: str, *, layers: int) -> str:
        """Returns the name in files of a tensor of a module; other names are returned unchanged.

        Args:
            name: name in the model, or after transformers' conversion of experts.
            layers: number of decoder layers in the files.
        """
        found = _OWN.match(name)
        if found is None:
            return name
        k = int(found[1])
        return f"{self.parts[found[2]].format(n=layers + k, k=k)}.{found[3]}"

    def in_model(self, names: Iterable[str], *, layers: int, depth: int) -> dict[str, str]:
        """Maps names in files to names in the model, for the tensors of the first modules; copies become "".

        Args:
            names: names in the files.
            layers: number of decoder layers in the files.
            depth: number of modules of the model.
        """
        prefixes: dict[str, str] = {}
        for k in range(depth):
            named = {part: text.format(n=layers + k, k=k) for part, text in self.parts.items()}
            # longer names first: DeepSeek-V3's layer is the prefix of the other parts
            prefixes |= {f"{text}.": f"{MODULES}.{k}.{part}." for part, text in named.items()}
            prefixes |= {f"{named['layer']}.{copy}": "" for copy in self.copies}
        ordered = sorted(prefixes, key=len, reverse=True)
        found: dict[str, str] = {}
        for name in names:
            prefix = next((each for each in ordered if name.startswith(each)), None)
            if prefix is not None:
                found[name] = prefixes[prefix] and prefixes[prefix] + name.removeprefix(prefix)
        return found


_DEEPSEEK = ModuleNames(
    {
        "enorm": "model.layers.{n}.enorm",
        "hnorm": "model.layers.{n}.hnorm",
        "eh_proj": "model.layers.{n}.eh_proj",
        "norm": "model.layers.{n}.shared_head.norm",
        "layer": "model.layers.{n}",
    },
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
_QWEN_PARTS = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "norm": "mtp.norm",
    "layer": "mtp.layers.{k}",
}
_ERNIE = ModuleNames(
    {
        "enorm": "model.mtp_emb_norm.{k}",
        "hnorm": "model.mtp_hidden_norm.{k}",
        "eh_proj": "model.mtp_linear_proj.{k}",
        "layer": "model.mtp_block.{k}",
    },
    dense=True,
)
_QWEN, _QWEN35 = ModuleNames(_QWEN_PARTS, most=1), ModuleNames(_QWEN_PARTS, most=1, count="mtp_num_hidden_layers")
_FAMILIES = {
    "qwen3_next": _QWEN,
    "exaone_moe": _QWEN,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN35),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), _ERNIE),
}


def module_names(model_type: str) -> ModuleNames:
    """Returns a family's names."""
    return _FAMILIES.get(model_type, _DEEPSEEK)


def renamed_stored(stored: Mapping[str, Any], names: ModuleNames, *, layers: int, depth: int) -> dict[str, Any]:
    """Returns the tensors of a folder by their names in a model with `depth` modules, without copies of embedding and
    head."""
    found = names.in_model(stored, layers=layers, depth=depth)
    return {found.get(name, name): info for name, info in stored.items() if found.get(name, name)}
