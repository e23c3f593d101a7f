"""Rules of a quantization, checked on the names and shapes of tensors before torch is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.remote_output import check_output, local_output
from foundation.section import suggest
from pipeline.compress.quantization.assignment import LayerScheme, units_of
from pipeline.compress.quantization.budget import Budget, check_keys, plan_budget
from pipeline.compress.quantization.calibration_rules import check_imatrix, open_split, plan_calibration
from pipeline.compress.quantization.config import MIXED, SCHEMES, QuantizeConfig
from pipeline.compress.quantization.families import family_of
from pipeline.data.dataset import TokenDataset
from pipeline.evaluation.consumers.consumer import ConsumerPlan, plan_consumers
from pipeline.evaluation.consumers.description import FOLDER, GGUF, ModelDescription, architecture, head_size
from pipeline.evaluation.heldout.data import as_trained, open_heldout
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.folder.text_part import only_decoder_loads
from pipeline.models.gguf.plan import GgufPlan, plan_file
from pipeline.models.router_names import is_router

HEAD = "lm_head"
_EMBEDDINGS = ("embed_tokens", "wte")
"""Possible last parts of the embedding's name."""
LAYERS = "layers"
"""Folder of the calibrated layers in a work directory."""
_PATTERN = "re:"


@dataclass(frozen=True)
class QuantizationPlan:
    """A checked quantization config, with the model, dataset and layers it refers to.

    Attributes:
        config: the config.
        source: the model to quantize.
        dataset: split for the evaluation.
        layers: linear layer to quantize -> weight shape (outputs, inputs); for a GGUF file see `gguf`.
        consumers: programs that score the result.
        gguf: plan of the GGUF file; None for a Hugging Face folder.
        calibration: split that a calibrated method reads; None for rounding to nearest.
        schemes: layer -> its scheme in a Hugging Face folder; empty for scheme mixed until the schemes are chosen.
        budget: byte budget of scheme mixed; None for other schemes.
    """

    config: QuantizeConfig
    source: ModelFolder
    dataset: TokenDataset
    layers: Mapping[str, tuple[int, int]]
    consumers: ConsumerPlan
    gguf: GgufPlan | None = None
    calibration: TokenDataset | None = None
    schemes: Mapping[str, LayerScheme] = field(default_factory=dict)
    budget: Budget | None = None

    @property
    def routers(self) -> list[str]:
        """Names of the routers of a mixture of experts, which are not quantized."""
        return routers(self.source)

    @property
    def output(self) -> Path:
        """The directory to write."""
        return local_output(self.config.output)


def prepare(config: QuantizeConfig, *, folder: Path | None = None) -> QuantizationPlan:
    """Checks a config against the model and the dataset it names.

    Args:
        config: config to check.
        folder: Hugging Face folder exported from the run `config.model`; None if `config.model` is the folder.

    Raises:
        ConfigError: the output exists; the model is already quantized; `skip` names an unknown module, does not skip
            the head of a tied model, or skips everything; the group size does not divide a layer's inputs; the
            dataset was made with another tokenizer.
        DataError: the model or the dataset is missing or damaged.
    """
    check_output(config.output)
    check_keys(config)
    source = ModelFolder.open(folder or config.model)
    if source.quantized_by is not None:
        why = f"it is already quantized, by {source.quantized_by}"
        raise ConfigError("model", config.model, why=why, remedy="name the floating-point model it was made from")
    if only_decoder_loads(source.config):
        why = f"it is a multimodal model ({source.config['model_type']}), and only a decoder alone is quantized"
        remedy = "name the run that trained it, or its export with --extra-weights drop"
        raise ConfigError("model", config.model, why=why, remedy=remedy)
    gguf = _plan_gguf(config, source) if config.gguf else None
    layers = {} if config.gguf else _plan_layers(config, source)
    budget = plan_budget(config, source, layers, gguf)
    config = config.model_copy(update={"data": as_trained(config.data, source.path)})
    dataset = open_heldout(config.data, source)
    if gguf is not None:
        gguf.check_context(config.data.sequence_length)
    schemes = {name: layer_scheme(config, name) for name in layers} if budget is None else {}
    result = _description(config, source, layers)
    consumers = plan_consumers(result, None if config.consumers is None else tuple(config.consumers))
    if config.budget is not None:
        open_split(config.data, config.calibration)
    calibration = plan_calibration(config, layers) if config.calibrated else None
    return QuantizationPlan(config, source, dataset, layers, consumers, gguf, calibration, schemes, budget)


def _description(
    config: QuantizeConfig, source: ModelFolder, layers: Mapping[str, tuple[int, int]]
) -> ModelDescription:
    """Description of the expected result, for the choice of consumers."""
    expected = ModelDescription(GGUF if config.gguf else FOLDER, config.scheme, head_size(source.config))
    if config.gguf:
        return expected
    candidates = frozenset(map(str, config.budget.candidates)) if config.budget else frozenset({config.scheme})
    own = {config.head} if config.head else set()
    found = {name for name in linear_layers(source) if ".experts." in name}
    experts = candidates if found & layers.keys() else frozenset()
    # with mixed bits a layer may stay unquantized
    plain = bool(found - layers.keys() if config.budget is None else found) and (
        bool(experts) or config.scheme != "FP8"
    )
    group = config.group if config.budget is None else SCHEMES["W4A16"].group
    of_experts: dict[str, Any] = {"experts": experts, "experts_group": group, "plain_experts": plain}
    return replace(expected, dense=candidates | own, **of_experts, **architecture(source.config))


def work_path(output: Path) -> Path:
    """The work directory of an output, for the exported run and calibrated layers."""
    return output.parent / f".{output.name}.work"


def _plan_gguf(config: QuantizeConfig, source: ModelFolder) -> GgufPlan:
    for key in ("group_size", "skip", "dtype", "method", "smoothing", "rotation", "head", "untie"):
        if key in config.model_fields_set and getattr(config, key) is not None:
            why = f"{config.scheme} is a type of GGUF files, which says how every tensor is stored"
            null = f" (--set {key}=null)" if type(config).model_fields[key].default is None else ""
            raise ConfigError(key, getattr(config, key), why=why, remedy=f"leave it out{null}, or use scheme W4A16")
    plan = plan_file(source, config.scheme)
    if config.imatrix:
        check_imatrix(config)
    return plan


def _plan_layers(config: QuantizeConfig, source: ModelFolder) -> dict[str, tuple[int, int]]:
    if config.scheme == MIXED and config.group_size is not None:
        why = "the layers of scheme mixed have the group sizes of their own schemes"
        raise ConfigError("group_size", config.group_size, why=why, remedy="leave it out")
    if config.scheme != MIXED and config.what.activations and config.group_size is not None:
        why = f"{config.scheme} has one scale for each row of weights, as the kernels that serve it expect"
        raise ConfigError("group_size", config.group_size, why=why, remedy="leave it out, or use scheme W4A16")
    _check_method(config)
    if config.imatrix:
        why = f"{config.scheme} is written to a Hugging Face folder, and importance matrices are for GGUF types"
        remedy = 'use "method": "gptq", which is calibrated on the same text, or a GGUF type'
        raise ConfigError("imatrix", True, why=why, remedy=remedy)
    if config.smoothing is not None:
        family_of(source.config, key="smoothing", value=config.smoothing)
    if config.rotation:
        _check_rotation(config, source)
    layers = _layers(config, source)
    names = list(config.budget.candidates) if config.scheme == MIXED and config.budget else []
    for name, shape in layers.items():
        for group in {layer_scheme(config, name).group, *(SCHEMES[each].group for each in names)} - {None}:
            check_group_size({name: shape}, int(group or 1), among=layers)
    return layers


def _check_method(config: QuantizeConfig) -> None:
    # a head is outside of the decoder layers, and every method rounds it to nearest
    names = {config.scheme, *(config.budget.candidates if config.budget else ())}
    if config.method == "auto-round" and "FP8" in names:
        why = "it learns which way a weight is rounded to an integer, and FP8 stores e4m3"
        raise ConfigError("method", config.method, why=why, remedy="use gptq, or another scheme than FP8")
    if config.method != "auto-round" and "iterations" in config.calibration.model_fields_set:
        why = f"method {config.method} learns nothing"
        remedy = 'leave it out, or use "method": "auto-round"'
        raise ConfigError("calibration.iterations", config.calibration.iterations, why=why, remedy=remedy)


def layer_scheme(config: QuantizeConfig, name: str) -> LayerScheme:
    """The scheme that the config gives to a layer."""
    if name == HEAD and config.head is not None:
        return LayerScheme(config.head, _group(config, config.head))
    return LayerScheme(config.scheme, config.group)


def _group(config: QuantizeConfig, scheme: str) -> int | None:
    return config.group if scheme == config.scheme else SCHEMES[scheme].group


def routers(source: ModelFolder) -> list[str]:
    """Names of the modules that choose a token's experts: too small and too sensitive to be quantized."""
    weights = (name.rpartition(".") for name in source.tensors)
    return [module for module, _, leaf in weights if leaf == "weight" and is_router(module)]


def _check_rotation(config: QuantizeConfig, source: ModelFolder) -> None:
    remedy = "leave it out; smoothing helps against outliers, too"
    if family_of(source.config, key="rotation", value=True).norms_outputs:
        why = f"{source.config['model_type']} has norms after its layers, and a rotation does not commute with them"
        raise ConfigError("rotation", True, why=why, remedy=remedy)
    if source.tied:
        why = f"the head of {config.model} is its embedding, into which the last norm must not be folded"
        raise ConfigError("rotation", True, why=why, remedy=remedy)


def linear_layers(source: ModelFolder) -> dict[str, tuple[int, int]]:
    """Finds linear layers, as name -> (outputs, inputs): matrices in numbered decoder layers, and the head.

    Embeddings are matrices, too, but are outside the numbered layers in every decoder of transformers. Routers are left
    out.
    """
    found = {}
    for name, info in source.tensors.items():
        module, _, leaf = name.rpartition(".")
        in_block = any(part.isdigit() for part in module.split("."))
        matrix = leaf == "weight" and len(info.shape) == 2 and not is_router(module)
        if matrix and (in_block or module == HEAD):
            found[module] = (info.shape[0], info.shape[1])
    return found


def check_group_size(
    layers: Mapping[str, tuple[int, int]], group: int, *, among: Mapping[str, tuple[int, int]] | None = None
) -> None:
    """Refuses a group size that does not divide the inputs of every layer.

    Args:
        layers: name -> (outputs, inputs) of the layers to check.
        group: group size.
        among: layers whose inputs the proposed group sizes have to divide; `layers` when None.

    Raises:
        ConfigError: names the first layer that does not fit and the nearest group sizes that divide all layers.
    """
    for name, (_, inputs) in layers.items():
        if inputs % group:
            why = f"{name} has {inputs} inputs, which {group} does not divide"
            raise ConfigError("group_size", group, why=why, remedy=_nearest(among or layers, group))


def _nearest(layers: Mapping[str, tuple[int, int]], group: int) -> str:
    common = gcd(*(inputs for _, inputs in layers.values()))
    divisors = [n for n in range(1, common + 1) if common % n == 0]
    below, above = [n for n in divisors if n < group], [n for n in divisors if n > group]
    near = [str(n) for n in (*below[-1:], *above[:1])]
    return f"use {' or '.join(near)}, which {'divides' if len(near) == 1 else 'divide'} the inputs of every layer"


def _layers(config: QuantizeConfig, source: ModelFolder) -> dict[str, tuple[int, int]]:
    modules = {name.rpartition(".")[0] for name in source.tensors}
    for entry in config.skip:
        _check_skip(entry, modules)
    every = linear_layers(source)
    layers = {name: shape for name, shape in every.items() if not _skipped(name, config.skip)}
    _check_fused(config, every, layers.keys())
    wanted = config.head is not None or not _skipped(HEAD, config.skip)
    if config.untie and not wanted:
        why = f"{HEAD} is in skip: the head would get weights of its own, and nothing smaller in return"
        remedy = 'give head a scheme, e.g. "head": "W8A8"; or leave it out'
        raise ConfigError("untie", config.untie, why=why, remedy=remedy)
    if source.tied and wanted and not config.untie:
        why = f"the head of {config.model} is its embedding"
        key, value = ("head", config.head) if config.head else ("skip", config.skip)
        remedy = '"untie": true gives the head weights of its own; or leave the head as it is'
        raise ConfigError(key, value, why=why, remedy=remedy if config.head else f'add "{HEAD}", or {remedy}')
    if wanted and (source.tied or HEAD in modules):
        rows = (name for name in modules if name.rpartition(".")[2] in _EMBEDDINGS)
        layers[HEAD] = _matrix(source, next(rows) if source.tied else HEAD)
    if not layers:
        why = f"no linear layer of {config.model} is left to quantize"
        raise ConfigError("skip", config.skip, why=why, remedy=f'use ["{HEAD}"]')
    return layers


def _check_fused(config: QuantizeConfig, every: Collection[str], layers: Set[str]) -> None:
    """Refuses to skip a part of a product that vLLM fuses, because its loader fails; allowed unless vLLM is a consumer.

    Raises:
        ConfigError: names the parts.
    """
    if config.consumers is not None and "vllm" not in config.consumers:
        return
    parts = [names for names in units_of(every).values() if 0 < len(layers & set(names)) < len(names)]
    if parts:
        skipped = next(name for name in parts[0] if name not in layers)
        own = list(dict.fromkeys(name.rpartition(".")[2] for name in parts[0]))
        parent = re.escape(skipped.rpartition(".")[0]) if len(parts) == 1 else ".*"
        entry = _PATTERN + (r".*\.experts\..*" if ".experts." in skipped else rf"{parent}\.({'|'.join(own)})$")
        why = f"{skipped} is skipped, and vLLM runs {', '.join(own)} of a layer as one product, with one scheme"
        remedy = f"name consumers without vllm, or skip all of them: {json.dumps(entry)}"
        raise ConfigError("skip", config.skip, why=why, remedy=remedy)


def _matrix(source: ModelFolder, module: str) -> tuple[int, int]:
    rows, columns = source.tensors[f"{module}.weight"].shape
    return rows, columns


def _check_skip(entry: str, modules: Collection[str]) -> None:
    if entry == HEAD:
        return  # the default; it has no effect if the head is not stored
    if entry.startswith(_PATTERN):
        _compile(entry)
    elif entry not in modules:
        near = suggest(entry, sorted(modules))
        remedy = (
            f"did you mean '{near}'?" if near else f'use a full module name, or a pattern such as "{_PATTERN}.*mlp.*"'
        )
        raise ConfigError("skip", entry, why="the model has no such module", remedy=remedy)


def _skipped(name: str, skip: list[str]) -> bool:
    return any(_compile(e).match(name) is not None if e.startswith(_PATTERN) else e == name for e in skip)


def _compile(entry: str) -> re.Pattern[str]:
    try:
        return re.compile(entry.removeprefix(_PATTERN))
    except re.error as error:
        remedy = 'use a regular expression of Python\'s re module, e.g. "re:.*down_proj$"'
        raise ConfigError("skip", entry, why=f"not a regular expression: {error}", remedy=remedy) from None
