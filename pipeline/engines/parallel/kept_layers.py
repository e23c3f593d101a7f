"""Pre-flight check of `model.keep_layers`: a tiny model without the other layers has to equal one that skips them.

A model may depend on layer positions in ways that are not known here (GPT-2 divides attention by the layer's number).
So a tiny model is tried: the kept layers must have the logits of the original model whose other layers do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel.architecture_trial import TOLERANCE, RandomValues, random_model
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.rectangle import Rectangle
from pipeline.models.decoder_layers import decoder_layers
from pipeline.models.hf_config import one_line
from pipeline.models.layers import keep_layers, original_name
from pipeline.models.resize.shrink import shrink

_V, _T = 32, 16


def check_kept_layers(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Refuses layers whose computation changes with their position.

    Args:
        config: the original model's Hugging Face config. If its tiny model cannot be built, other checks decide.
        layers: `model.keep_layers`. Logits are compared for layers in the original order; for another order, only the
            presence of every layer's parameters is checked.

    Raises:
        ConfigError: a tiny model with only these layers fails, or its logits differ.
    """
    wanted = sorted(layers)
    try:
        whole = shrink(config, divide=1, layers=config.num_hidden_layers, vocab_size=_V)
    except ConfigError:
        return
    try:
        original = random_model(whole)
        expected = _logits(original, without=set(range(whole.num_hidden_layers)) - set(wanted))
    except Exception as error:  # each architecture fails in its own way
        raise _refused(config, layers, f"leaving out layers of a tiny one fails: {one_line(error)}") from None
    try:
        found = _logits(_kept(original, whole, wanted))
        if wanted != list(layers):
            _kept(original, whole, layers)
    except ConfigError as error:
        if error.field == "model.keep_layers":
            raise
        raise _refused(config, layers, f"a tiny model with only these is refused: {error.why}") from None
    except Exception as error:
        raise _refused(config, layers, f"a tiny model with only these fails: {one_line(error)}") from None
    if not bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max()):
        raise _refused(
            config, layers, "a tiny model with only these computes other logits than the original without the others"
        )


def _refused(config: PretrainedConfig, layers: Sequence[int], what: str) -> ConfigError:
    why = f"layers of {config.model_type} may depend on their position: {what}"
    return ConfigError("model.keep_layers", list(layers), why=why, remedy="leave it out, or use another model")


class _OriginalValues(RandomValues):
    """Values of the whole model's parameters, by their names in the model of the kept layers."""

    def __init__(self, whole: nn.Module, layers: Sequence[int]) -> None:
        super().__init__(whole)
        self._original = original_name(layers)

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        return super().value(self._original(name), box=box, device=device)


def _kept(original: nn.Module, whole: PretrainedConfig, layers: Sequence[int]) -> nn.Module:
    """Builds the model of some layers, with their values in the original."""
    model = build_meta(keep_layers(whole, layers), dtype=torch.float32, attn_implementation="eager")
    materialize(model, _OriginalValues(original, layers), device=torch.device("cpu"))
    return model


@torch.no_grad()
def _logits(model: Any, *, without: set[int] = frozenset()) -> Tensor:  # type: ignore[assignment]
    """Computes the logits [1, T, V] of a model; layers in `without` return their input."""
    layers = decoder_layers(model)
    hooks = [layers[number].register_forward_hook(_input, with_kwargs=True) for number in without]
    logits: Tensor = model.eval()(input_ids=torch.arange(_T)[None] % _V, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits


def _input(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
