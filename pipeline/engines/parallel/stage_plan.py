"""Finds which modules of a decoder run before its layers, the list of layers, and which modules run after them.

Transformers publishes this as `base_model_pp_plan` for some architectures. For all others it is derived: a tiny model
of the architecture runs once, and hooks record the order in which its modules are called, and the tensors that its
layers take and return (`stage_messages`). The derived plan is not trusted: the architecture trial compares loss and
every gradient of the stages with those of the whole model.

Names are those of the whole model, as in `named_modules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel.stage_messages import CarriedTensor, LayerRecorder, several
from pipeline.engines.parallel.trial_cache import real_tensors
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.decoder_layers import base_of
from pipeline.models.folder.multi_token_names import MODULES
from pipeline.models.hf_config import config_from, config_key, one_line
from pipeline.models.multi_token import modules_of
from pipeline.models.resize.shrink import shrink

REMEDY = "use ZeRO or FSDP2 for this architecture (parallel.pp 1)"
_V, _B, _T = 32, 2, 16


@dataclass(frozen=True)
class StagePlan:
    """The parts of a decoder that pipeline stages are made of.

    Attributes:
        layers: name of the list of decoder layers.
        before: names of the modules with parameters that run before the layers, and belong to the first stage; also
            of single parameters of the base model.
        after: names of the modules with parameters that run after the layers, head included.
        outputs: number of values that a layer returns in a tuple, hidden states first; 0 if it returns a tensor.
        derived: whether the plan is not transformers' own.
        carried: tensors that stages send; empty if these are nothing but hidden states [B, T, D].
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    outputs: int = 0
    derived: bool = False
    carried: tuple[CarriedTensor, ...] = ()


def stage_plan(model: nn.Module) -> StagePlan:
    """Returns transformers' own plan of a whole model, or else the derived plan.

    Raises:
        ConfigError: the model cannot be divided into stages; names the module or the tensor.
    """
    plan = _plan(model)
    for name in (*plan.before, *plan.after):
        owner, _, key = name.rpartition(".")
        if not hasattr(model.get_submodule(owner), key):
            why = f"the tiny {model.config.model_type} that its stages are derived from has {name}, and it has none"  # type: ignore[union-attr]
            raise ConfigError("parallel.pp", why=why, remedy=REMEDY)
    return replace(plan, after=(*plan.after, MODULES)) if modules_of(model) else plan


def _plan(model: nn.Module) -> StagePlan:
    given = _given_plan(model)
    if given is None:
        return _derived_plan(config_key(model.config))
    try:
        found = _derived_plan(config_key(model.config))
    except ConfigError:
        return given
    return replace(given, outputs=found.outputs, carried=found.carried)


def largest_list(model: nn.Module) -> str | None:
    """Returns the name of the outermost list of modules with the most parameters: the layers; None without a list."""
    lists: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inside:
            lists[name] = sum(p.numel() for p in module.parameters())
    return max(lists, key=lambda name: lists[name], default=None)


def _given_plan(model: Any) -> StagePlan | None:
    """Reads `base_model_pp_plan`; None if there is none, or it does not assign every parameter to a stage."""
    plan = list(getattr(model.config, "base_model_pp_plan", None) or ())
    base, prefix = model.base_model, f"{model.base_model_prefix}."
    lists = [name for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1:
        return None
    head = model.get_output_embeddings()
    heads = {id(p) for p in head.parameters()}
    for name, parameter in model.named_parameters():
        planned = name.startswith(prefix) and name.removeprefix(prefix).split(".")[0] in plan
        if not planned and id(parameter) not in heads and not name.startswith(f"{MODULES}."):
            return None
    at = plan.index(lists[0])
    before, after = ([prefix + name for name in part] for part in (plan[:at], plan[at + 1 :]))
    after += [name for name, module in model.named_modules() if module is head]
    return StagePlan(prefix + lists[0], tuple(before), tuple(after))


@cache
def _derived_plan(key: str) -> StagePlan:
    """Derives the plan of an architecture from a tiny model; cached by config.

    If layers take more than hidden states, from a second model with all layers of the real one.
    """
    config = config_from(key)
    with real_tensors():
        plan = _Derivation(_tiny_model(config, layers=2)).plan()
        return _Derivation(_tiny_model(config, layers=config.num_hidden_layers)).plan() if plan.carried else plan


def _tiny_model(config: PretrainedConfig, *, layers: int) -> nn.Module:
    small = shrink(config, divide=1, layers=layers, vocab_size=_V)
    tiny = build_meta(small, dtype=torch.float32, attn_implementation="eager")
    materialize(tiny, InitByName(tiny, seed=0), device=torch.device("cpu"))
    return tiny.eval()


class _Derivation:
    """Derives the plan of a tiny model by running it.

    Args:
        model: a tiny model on the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._kind = model, model.config.model_type  # type: ignore[union-attr]
        found = largest_list(model)
        if found is None:
            raise self._refused("it has no list of layers")
        self._list = found
        self._layers: list[nn.Module] = list(model.get_submodule(self._list))  # type: ignore[call-overload]
        self._recorder = LayerRecorder(self._layers)
        self._done: dict[str, set[int]] = {}

    def plan(self) -> StagePlan:
        """Runs the model and returns its plan."""
        self._run()
        if self._recorder.called != list(range(len(self._layers))):
            raise self._refused(f"its layers {self._list} do not run once each, in order")
        if len(self._recorder.outputs) != 1:
            raise self._refused(f"its layers {self._list} return different kinds of values")
        before, after = [], []
        for name, done in self._parts().items():
            if done <= {0}:
                before.append(name)
            elif done == {len(self._layers)}:
                after.append(name)
            else:
                raise self._refused(f"its module {name} runs between the layers, or before and after them")
        carried = self._recorder.carried()
        config: Any = self._model.config
        return StagePlan(
            self._list,
            tuple(before),
            tuple(after),
            self._recorder.outputs.pop(),
            derived=True,
            carried=carried if several(carried, hidden_states=(_B, _T, config.hidden_size)) else (),
        )

    def _run(self) -> None:
        hooks = [self._hook(name, module) for name, module in self._outside() if module._parameters]
        ids = torch.arange(_B * _T).view(_B, _T) % _V
        try:
            with self._recorder.recording():
                self._model(input_ids=ids, use_cache=False)
        except ConfigError:
            raise
        except Exception as error:  # each architecture fails in its own way
            raise self._refused(f"transformers' own forward pass fails on a tiny model: {one_line(error)}") from None
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str, module: nn.Module) -> Any:
        def called(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._done.setdefault(name, set()).add(len(self._recorder.called))

        return module.register_forward_hook(called)

    def _outside(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields all modules outside of the layers."""
        within = (self._list, f"{self._list}.")
        for name, module in self._model.named_modules():
            if name != within[0] and not name.startswith(within[1]):
                yield name, module

    def _parts(self) -> dict[str, set[int]]:
        """Maps modules with parameters outside of the layers to the numbers of layers done when they are called.

        A module that is not called counts as before the layers if it is listed before them. Parameters of the base
        model itself count as before the layers if the first layer's input depends on them.
        """
        parts: dict[str, set[int]] = {}
        end, listed = len(self._layers), False
        for name, module in self._model.named_modules():
            listed |= name == self._list
            if not module._parameters or name.startswith(f"{self._list}."):
                continue
            own = [key for key, parameter in module._parameters.items() if parameter is not None]
            if name and module is base_of(self._model):
                for key in own:
                    parts[f"{name}.{key}"] = {0 if self._recorder.starts_with(module._parameters[key]) else end}
            elif own and not name:
                raise self._refused(f"its parameter {own[0]} belongs to no module of a stage")
            elif own:
                parts[name] = self._done.get(name, {end if listed else 0})
        return parts

    def _refused(self, why: str) -> ConfigError:
        why = f"{self._kind} has no base_model_pp_plan, and none can be derived: {why}"
        return ConfigError("parallel.pp", why=why, remedy=REMEDY)
