"""Multi-token prediction (MTP): modules that predict tokens further ahead, one after another.

Module k predicts the token k + 1 positions after the next one. It combines a hidden state with the embedding of a token
ahead, and runs one decoder layer:

    h_k[i] = Norm(Layer(M [Norm(Emb(t[i + k])); Norm(h_(k-1)[i])])),    logits = Head(h_k),    k = 1, 2, ...

h_0 is the model's last hidden state. Embedding and head are the model's own. Source: DeepSeek-AI 2024, DeepSeek-V3
(arXiv:2412.19437), section 2.2. As in vLLM and SGLang, h_0 and the states handed on are those after the final norm.

The modules are attached to a Hugging Face model as `mtp`, under the names of `folder/multi_token_names.py`. The decoder
layer is a copy of one of the model's own; so everything that layouts do to such a layer is done to the copy.

Shapes: B samples, T positions of this rank, D features.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import ConfigError
from pipeline.models.decoder_layers import base_of, decoder_layers
from pipeline.models.folder.multi_token_names import MODULES, module_names

_LAYER = re.compile(rf"{MODULES}\.\d+\.layer(?=\.|$)")
_FULL = ("full_attention", "attention")

LayerCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a decoder layer besides the hidden states."""


class MultiTokenModule(nn.Module):
    """One module.

    Args:
        norm: the model's final norm, which is copied.
        layer: the decoder layer, which is copied.
        width: D.
        normed: whether the family has a norm after the layer.
    """

    def __init__(self, norm: nn.Module, layer: nn.Module, *, width: int, normed: bool) -> None:
        super().__init__()
        weight = next(norm.parameters())
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * width, width, bias=False, dtype=weight.dtype, device=weight.device)
        configs = (each.config for each in layer.modules() if hasattr(each, "config"))
        self.layer = copy.deepcopy(layer, {id(each): each for each in configs})  # the config stays the model's
        self.norm = copy.deepcopy(norm) if normed else nn.Identity()

    def forward(self, hidden: Tensor, embedded: Tensor, call: LayerCall) -> Tensor:
        """Computes h_k [B, T, D].

        Args:
            hidden: h_(k-1) [B, T, D].
            embedded: embeddings of the tokens k positions ahead, [B, T, D].
            call: arguments of the model's own decoder layer: masks, rotary tables.
        """
        args, kwargs = call
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        output = self.layer(self.eh_proj(joined), *args, **kwargs)
        states: Tensor = self.norm(output[0] if isinstance(output, tuple) else output)
        return states


class MultiTokenModules(nn.Module):
    """The modules of a model, as children "0", "1", ...; not a ModuleList, which would look like decoder layers.

    Args:
        modules: the modules.
        source: name of the model's decoder layer that was copied.
    """

    def __init__(self, modules: list[MultiTokenModule], *, source: str) -> None:
        super().__init__()
        self.source = source
        for k, module in enumerate(modules):
            self.add_module(str(k), module)


def attach_modules(model: Any, *, depth: int) -> None:
    """Attaches `depth` modules to a whole Hugging Face causal language model on meta, in place.

    Raises:
        ConfigError: the architecture has no final norm or no decoder layer with attention, or the family's names do not
            allow so many modules.
    """
    config, names = model.config, module_names(model.config.model_type)
    if names.most is not None and depth > names.most:
        why = f"in {config.model_type}'s files all modules share one projection"
        raise ConfigError("loss.mtp.depth", depth, why=why, remedy=f"use {names.most}")
    norm, layers = _final_norm(model), _attention_layers(model)
    embedded = model.get_input_embeddings().weight.shape[-1] == config.hidden_size
    needed = (norm is not None, "final norm"), (layers, "layer with attention"), (embedded, "embedding of their width")
    missing = next((what for there, what in needed if not there), None)
    if norm is None or missing is not None:
        why = f"the modules need a {missing}, and none was found in {config.model_type}"
        raise ConfigError("loss.mtp", depth, why=why, remedy="remove it")
    dense = [each for each in layers if not _has_experts(each)]
    layer = (dense or layers)[-1] if names.dense else layers[-1]
    source = next(name for name, module in model.named_modules() if module is layer)
    normed = "norm" in names.parts
    made = [MultiTokenModule(norm, layer, width=config.hidden_size, normed=normed) for _ in range(depth)]
    model.add_module(MODULES, MultiTokenModules(made, source=source))


def modules_of(model: nn.Module) -> list[MultiTokenModule]:
    """Returns the modules of a model or of its last pipeline stage; none of another stage or a model without them."""
    found = getattr(model, MODULES, None)
    return list(found.children()) if isinstance(found, MultiTokenModules) else []  # type: ignore[arg-type]


def original_module(model: nn.Module, name: str) -> str:
    """Returns the name of the model's own module of which a module within `mtp.k.layer` is a copy; else the name."""
    found = _LAYER.match(name)
    return name if found is None else getattr(model, MODULES).source + name[found.end() :]


def _final_norm(model: Any) -> nn.Module | None:
    width, base = model.config.hidden_size, base_of(model)
    norms = (
        module
        for module in base.children()
        if "norm" in type(module).__name__.lower() and next(iter(module.parameters()), torch.empty(0)).shape == (width,)
    )
    return max(enumerate(norms), default=(0, None), key=lambda each: each[0])[1]


def _attention_layers(model: Any) -> list[nn.Module]:
    """Returns the decoder layers with full attention; all with attention if the config does not name their kinds."""
    layers = [layer for _, layer in sorted(decoder_layers(base_of(model)).items())]
    attending = [each for each in layers if any("attention" in type(one).__name__.lower() for one in each.children())]
    kinds = getattr(model.config, "layer_types", None) or []
    full = [layer for layer, kind in zip(layers, kinds, strict=False) if kind in _FULL and layer in attending]
    return full or attending


def _has_experts(layer: nn.Module) -> bool:
    return any("experts" in name.split(".") for name, _ in layer.named_parameters())
