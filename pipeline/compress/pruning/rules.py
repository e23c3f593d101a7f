"""Rules of a pruning, checked on the names and shapes of tensors before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import lcm
from pathlib import Path

from foundation.errors import ConfigError, found_by
from foundation.remote_output import check_output, local_output
from pipeline.compress.pruning.axes import EXPERT_FFN, EXPERTS, FFN, GROUPS, HIDDEN, LAYERS, Anatomy, anatomy_of
from pipeline.compress.pruning.config import PruneConfig
from pipeline.compress.pruning.layout import data_ranks, layout_of
from pipeline.compress.pruning.search import Choices, Shape, search
from pipeline.compress.quantization.calibration_rules import open_calibration
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.dataset import TokenDataset
from pipeline.evaluation.consumers.consumer import ConsumerPlan, plan_consumers
from pipeline.evaluation.consumers.description import FOLDER, ModelDescription, architecture, head_size
from pipeline.evaluation.heldout.data import as_trained, open_heldout
from pipeline.models.folder.model_folder import ModelFolder

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WIDTHS = (HIDDEN, FFN, EXPERT_FFN)
_DEFAULT_AXES = (HIDDEN, FFN, EXPERT_FFN, GROUPS)


@dataclass(frozen=True)
class PruningPlan:
    """A checked pruning config, with the model and datasets it refers to.

    Attributes:
        config: the config.
        source: the model to prune.
        anatomy: sizes and tensors of the model.
        dataset: split for the evaluation.
        calibration: split on which importance is measured.
        consumers: programs that score the result.
        shape: axis -> size of the result; None until a latency has been measured.
        choices: allowed sizes in the search for a latency; None for other targets.
        layout: layout in which processes share a model; None if each has a whole one.
    """

    config: PruneConfig
    source: ModelFolder
    anatomy: Anatomy
    dataset: TokenDataset
    calibration: TokenDataset
    consumers: ConsumerPlan
    shape: Shape | None
    choices: Choices | None = None
    layout: ResolvedRun | None = None

    @property
    def output(self) -> Path:
        """The directory to write."""
        return local_output(self.config.output)

    @property
    def dtype(self) -> str:
        """Dtype of the written weights, by name."""
        return self.config.dtype or self.source.dtype


def prepare(config: PruneConfig, *, world_size: int = 1) -> PruningPlan:
    """Checks a config against the model and the dataset it names, and finds the shape.

    Args:
        config: pruning config.
        world_size: number of processes that gather importance; each needs a window.

    Raises:
        ConfigError: the output exists; the model is quantized or of an unknown architecture; a size does not exist, or
            is not allowed; the target cannot be met; there are too few windows.
        DataError: the model or the dataset is missing or damaged.
    """
    source = ModelFolder.open(config.model)
    check_output(config.output, needed=source.weight_bytes)
    if source.quantized_by is not None:
        why = f"it is quantized, by {source.quantized_by}"
        raise ConfigError("model", config.model, why=why, remedy="prune the floating-point model, then quantize")
    if source.extra:
        why = f"it has {len(source.extra)} tensors of layers that predict more tokens ({next(iter(source.extra))}, ...)"
        remedy = "set num_nextn_predict_layers (or mtp_num_hidden_layers) to 0 in config.json and remove these tensors"
        raise ConfigError("model", config.model, why=f"{why}, which pruning does not cut", remedy=remedy)
    anatomy = anatomy_of(source)
    shape, choices = _target(config, source, anatomy)
    config = config.model_copy(update={"data": as_trained(config.data, source.path)})
    dataset = open_heldout(config.data, source)
    layout = layout_of(config, source, anatomy.architecture, world_size=world_size)
    calibration = _calibration(config, anatomy, data_ranks(layout, world_size=world_size))
    about = ModelDescription(
        FOLDER, config.dtype or source.dtype, head_size(source.config), **architecture(source.config)
    )
    consumers = plan_consumers(about, None if config.consumers is None else tuple(config.consumers))
    return PruningPlan(config, source, anatomy, dataset, calibration, consumers, shape, choices, layout)


def _calibration(config: PruneConfig, anatomy: Anatomy, shares: int) -> TokenDataset:
    length, samples = config.data.sequence_length, config.calibration.samples
    dataset = open_calibration(config.data, config.calibration)
    widest = max((axis for axis in _WIDTHS if axis in anatomy.sizes), key=lambda axis: anatomy.sizes[axis])
    if samples * length < anatomy.sizes[widest]:
        tokens, channels = samples * length, anatomy.sizes[widest]
        why = f"{samples} windows have {tokens} tokens, and {widest} has {channels} channels to rank"
        near = -(-channels // length)
        raise ConfigError("calibration.samples", samples, why=why, remedy=f"use {near} or more")
    if samples < shares:
        why = f"{shares} processes share the windows, and each needs one"
        raise ConfigError("calibration.samples", samples, why=why, remedy=f"use {shares} or more")
    return dataset


def _target(config: PruneConfig, source: ModelFolder, anatomy: Anatomy) -> tuple[Shape | None, Choices | None]:
    target = config.target
    given = [name for name in type(target).model_fields if getattr(target, name) is not None]
    if len(given) > 1:
        raise ConfigError("target", given, why="these are several targets", remedy="leave all but one out")
    if config.axes is not None and given in ([], ["shape"]):
        why = "they are sizes that a search may cut, and nothing is searched" + (" for target.shape" if given else "")
        raise ConfigError("axes", config.axes, why=why, remedy="leave it out, or give target.parameters, say")
    if not given:
        remedy = 'add e.g. "target": {"parameters": 1e6}'
        raise ConfigError("target", why="it does not say how small the model has to be", remedy=remedy)
    if target.shape is not None:
        return _explicit(config, anatomy), None
    choices = Choices(anatomy.sizes, _allowed(config, anatomy))
    if target.latency is not None:
        return None, choices
    return _within(config, source, anatomy, choices), None


def _within(config: PruneConfig, source: ModelFolder, anatomy: Anatomy, choices: Choices) -> Shape:
    """Finds the shape for a number of parameters or bytes."""
    each = 1 if config.target.bytes is None else ITEM_BYTES[config.dtype or source.dtype]
    name = "parameters" if config.target.bytes is None else "bytes"
    limit = int(config.target.bytes or config.target.parameters or 0)
    now = anatomy.parameters({}) * each
    if limit >= now:
        why = f"the model has {now:,} {name}"
        raise ConfigError(f"target.{name}", limit, why=why, remedy=f"use less than {now}")
    found = search(choices, lambda shape: anatomy.parameters(shape) * each, limit)
    if found is None:
        needed = anatomy.parameters(choices.smallest) * each
        sizes = ", ".join(f"{axis} {choices.smallest[axis]}" for axis in choices.allowed)
        others = [axis for axis in anatomy.sizes if axis not in choices.allowed]
        more = [axis for axis in others if not found_by([partial(_check_searched, "", axis, anatomy)])]
        remedy = f"use {needed} or more, a smaller multiple_of" + (
            f", or add {' or '.join(more)} to axes" if more else ""
        )
        raise ConfigError(f"target.{name}", limit, why=f"with {sizes} the model still has {needed:,}", remedy=remedy)
    return anatomy.completed(found)


def _allowed(config: PruneConfig, anatomy: Anatomy) -> dict[str, list[int]]:
    """Sizes that the result may have, for every axis that may be cut."""
    names = config.axes if config.axes is not None else [axis for axis in _DEFAULT_AXES if _is_free(axis, anatomy)]
    for axis in names:
        _check_searched(f"axes.{axis}", axis, anatomy)
    if not names:
        raise ConfigError("axes", names, why="no size may be cut", remedy='use e.g. ["intermediate_size"]')
    return {axis: _sizes(axis, anatomy, config.multiple_of) for axis in names}


def _sizes(axis: str, anatomy: Anatomy, multiple: int) -> list[int]:
    if axis == HIDDEN and anatomy.architecture.heads_of_hidden:
        multiple = lcm(multiple, anatomy.head_size)
    step, least = (multiple, multiple) if axis in _WIDTHS else (1, _least(axis, anatomy))
    size = anatomy.sizes[axis]
    return sorted({*range(least, size + 1, step), size})


def _least(axis: str, anatomy: Anatomy) -> int:
    return max(1, anatomy.chosen_experts) if axis == EXPERTS else 1


def _explicit(config: PruneConfig, anatomy: Anatomy) -> Shape:
    assert config.target.shape is not None
    given = {axis: size for axis, size in config.target.shape.model_dump().items() if size is not None}
    if GROUPS in given and anatomy.architecture.heads_of_hidden:
        given = _with_hidden(given, anatomy)
    for axis, size in given.items():
        field = f"target.shape.{axis}"
        _check_axis(field, axis, anatomy, size)
        allowed = _sizes(axis, anatomy, config.multiple_of)
        if size not in allowed:
            raise ConfigError(field, size, why=_why_not(axis, anatomy, config), remedy=_nearest(size, allowed))
    shape = anatomy.completed(given)
    if shape == anatomy.sizes:
        raise ConfigError("target.shape", given, why="these are the model's own sizes", remedy="make one smaller")
    return shape


def _with_hidden(given: dict[str, int], anatomy: Anatomy) -> dict[str, int]:
    """Adds the hidden size that follows from the heads, in an architecture in which the two are tied."""
    hidden = given[GROUPS] * anatomy.head_size
    if given.setdefault(HIDDEN, hidden) != hidden:
        why = f"its heads have {anatomy.head_size} features each, and together they make up the hidden size"
        remedy = f"use hidden_size {hidden}, or leave one of the two out"
        raise ConfigError(f"target.shape.{GROUPS}", given[GROUPS], why=why, remedy=remedy)
    return given


def _why_not(axis: str, anatomy: Anatomy, config: PruneConfig) -> str:
    if axis == EXPERTS and anatomy.chosen_experts > 1:
        return f"the model has {anatomy.sizes[axis]} experts, and each token goes to {anatomy.chosen_experts}"
    if axis == HIDDEN and anatomy.architecture.heads_of_hidden:
        return (
            f"the model has {anatomy.sizes[axis]} in heads of {anatomy.head_size}, multiple_of is {config.multiple_of}"
        )
    if axis in _WIDTHS:
        return f"the model has {anatomy.sizes[axis]}, and channels are kept in multiples of {config.multiple_of}"
    return f"the model has {anatomy.sizes[axis]}"


def _nearest(size: int, allowed: list[int]) -> str:
    below, above = [n for n in allowed if n < size][-1:], [n for n in allowed if n > size][:1]
    return f"use {' or '.join(map(str, below + above))}"


def _check_axis(field: str, axis: str, anatomy: Anatomy, value: object) -> None:
    if axis not in anatomy.sizes:
        why = "this model has no such size that can be cut"
        raise ConfigError(field, value, why=why, remedy=f"use {', '.join(anatomy.sizes)}")
    if axis == LAYERS and anatomy.scaled_by_layer:
        why = "its attention is divided by the number of its layer (scale_attn_by_inverse_layer_idx)"
        raise ConfigError(field, value, why=why, remedy="cut the other sizes")


def _is_free(axis: str, anatomy: Anatomy) -> bool:
    """Whether a search may choose the size of an axis: it does not follow from another axis."""
    return axis in anatomy.sizes and not (axis == GROUPS and anatomy.architecture.heads_of_hidden)


def _check_searched(field: str, axis: str, anatomy: Anatomy) -> None:
    _check_axis(field, axis, anatomy, axis)
    if not _is_free(axis, anatomy):
        why = "in this architecture the heads follow from the hidden size: both are cut together"
        raise ConfigError(field, axis, why=why, remedy="use hidden_size")
    if axis == LAYERS and not anatomy.uniform:
        why = "its layers are not alike, so that the size of the result depends on which of them stay"
        raise ConfigError(
            field, axis, why=why, remedy="give target.shape.num_hidden_layers, and search the others after"
        )
