"""Records the operations of an architecture's `_init_weights` on a parameter, without memory for the parameter.

`_init_weights` runs on a parameter on the meta device, and the operations that write into it are recorded. If they fill
it with a constant, or with normal or uniform numbers, `models.construction.counter` can compute any part of it. For all
other operations (a formula, a decomposition, a copy) the architecture's code runs with real memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import initialization

from pipeline.models.construction import counter
from pipeline.models.construction.rectangle import Rectangle

aten = torch.ops.aten
_DRAWS: dict[Any, Literal["normal", "uniform"]] = {aten.normal_.default: "normal", aten.uniform_.default: "uniform"}
"""Operations that draw numbers; both have the defaults 0 and 1, for mean and standard deviation or for the limits."""


@dataclass(frozen=True)
class Fill:
    """One operation that fills rows of a parameter.

    Attributes:
        kind: normal (a mean, b standard deviation), uniform (from a to b), or constant (a).
        first: first row that is filled.
        rows: number of rows that are filled; None for the whole parameter.
    """

    kind: Literal["normal", "uniform", "constant"]
    a: float
    b: float = 0.0
    first: int = 0
    rows: int | None = None


def recorded_fills(parameter: nn.Parameter, initialize: Callable[[], None]) -> tuple[Fill, ...] | None:
    """Returns the operations that fill a parameter, in order, beginning with the last that fills the whole parameter.

    Args:
        parameter: parameter on meta, in the module that `initialize` changes.
        initialize: function that runs the architecture's own code.

    Returns:
        None if other operations write into the parameter, or no operation fills the whole parameter.
    """
    recorder = _Recorder(parameter)
    try:
        with recorder, _visible_on_meta():
            initialize()
    except (NotImplementedError, RuntimeError, AttributeError, TypeError, ValueError):
        return None  # the code reads values, which meta tensors lack
    same = parameter.untyped_storage()._cdata == recorder.storage
    return tuple(recorder.fills) if same and recorder.known else None


def filled(
    fills: tuple[Fill, ...], shape: tuple[int, ...], *, key: int, box: Rectangle | None, device: torch.device
) -> Tensor:
    """Computes the values of a parameter's box after operations that fill the parameter, fp32.

    Args:
        fills: operations from `recorded_fills`; the first fills all of the parameter.
        shape: shape of the full parameter.
        key: key of the random numbers, 64 bits.
        box: part to compute; None for the whole parameter.
        device: device that computes the box.
    """
    box = Rectangle.full(shape) if box is None else box
    result = _part_of(fills[0], shape, key, box, device)
    for fill in fills[1:]:
        assert fill.rows is not None
        first = max(fill.first, box.offsets[0])
        count = min(fill.first + fill.rows, box.offsets[0] + box.sizes[0]) - first
        if count > 0:
            at = first - box.offsets[0]
            result[at : at + count] = _part_of(fill, shape, key, box.rows(at, count), device)
    return result


def _part_of(fill: Fill, shape: tuple[int, ...], key: int, box: Rectangle, device: torch.device) -> Tensor:
    if fill.kind == "normal":
        return counter.normal(shape, key=key, mean=fill.a, std=fill.b, box=box, device=device)
    if fill.kind == "uniform":
        return counter.uniform(shape, key=key, low=fill.a, high=fill.b, box=box, device=device)
    return torch.full(box.sizes, fill.a, dtype=torch.float32, device=device)


class _Recorder(TorchDispatchMode):
    """Records operations in `fills`; `known` is whether they alone determine the parameter's values."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.storage = parameter.untyped_storage()._cdata
        self._shape, self._row = parameter.shape, parameter[0].numel() if parameter.ndim else 1
        self.fills: list[Fill] = []
        self.known = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and value.untyped_storage()._cdata == self.storage:
                self._record(func, value, args[1:], kwargs or {})
        return result

    def _record(self, func: Any, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fill = _fill(func, args, kwargs)
        if fill is None:
            self.known = False
        elif target.shape == self._shape and target.storage_offset() == 0 and target.is_contiguous():
            self.fills, self.known = [Fill(*fill)], True
        elif target.is_contiguous() and not (target.storage_offset() % self._row or target.numel() % self._row):
            first, rows = target.storage_offset() // self._row, target.numel() // self._row
            self.fills.append(Fill(*fill, first, rows))
        else:
            self.known = False


def _fill(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Literal["normal", "uniform", "constant"], float, float] | None:
    given = [float(each) for each in args if isinstance(each, int | float)]
    if len(given) != len(args) or kwargs.get("generator") is not None:
        return None
    if func is aten.zero_.default:
        return "constant", 0.0, 0.0
    if func is aten.fill_.Scalar:
        return "constant", given[0], 0.0
    if func in _DRAWS:
        a, b = (*given, *(0.0, 1.0)[len(given) :])
        return _DRAWS[func], a, b
    return None


@contextmanager
def _visible_on_meta() -> Iterator[None]:
    """Makes functions of `torch.nn.init` that do nothing on meta write, so that unknown operations are recorded."""
    silent: dict[str, Any] = dict.fromkeys(_SILENT, _unknown)
    with (
        patch.multiple(torch.nn.init, _no_grad_trunc_normal_=_unknown, **silent),
        patch.dict(initialization.TORCH_INIT_FUNCTIONS, silent),
        torch.random.fork_rng(devices=[]),  # the code may draw numbers that belong to no parameter
    ):
        yield


_SILENT = ("dirac_", "orthogonal_", "sparse_", "eye_")


def _unknown(tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    with torch.no_grad():
        return tensor.mul_(1.0)
