"""The tensors that pipeline stages send each other, and one message of them.

Between the layers of most decoders there are only hidden states [B, T, D]. Others hand on more: several residual
streams (hyper-connections of DeepSeek-V4, AltUp of Gemma 3n), the embeddings (Zamba), an input for every layer
(Gemma 3n and 4), the keys and values of an earlier layer (Gemma 3n and 4), the tokens that an indexer has selected
(GLM-5), a router's state (Zaya). Which these are is found in a forward pass of a tiny model, by the identity of the
tensors that layers take and return, and by autograd's graph: a stage receives what depends on parameters or layers of
earlier stages, and computes masks, positions and everything else again.

A message is one tensor [N] of the model's dtype: integers are sent as their bits, other floating-point dtypes are
converted, as hidden states are. Its shapes are known to the sender alone: before the first micro-batch of a shape is
trained or scored, a forward pass without gradients goes through the stages, and each sends its shapes to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Path = tuple[Any, ...]
"""Place of a tensor in a layer's call: 0 and an index for an argument, 1 and a name for a keyword, then keys within."""


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor that layers take and that a stage cannot compute alone.

    Attributes:
        origin: number of layers that have run when it exists.
        uses: (layer, place in its call) of every layer that takes it, in order.
        shape: its shape in the tiny model, B = 2 and T = 16.
    """

    origin: int
    uses: tuple[tuple[int, Path], ...]
    shape: tuple[int, ...]

    def crosses(self, border: int) -> bool:
        """Whether it is in the message to the stage whose first layer has this index."""
        return self.origin <= border <= self.uses[-1][0]


def several(carried: Sequence[CarriedTensor], *, hidden_states: tuple[int, ...]) -> bool:
    """Whether anything but one tensor with the shape of hidden states, for the next layer alone, is sent."""
    borders = range(1, 1 + max(one.uses[-1][0] for one in carried))
    messages = [[each for each in carried if each.crosses(border)] for border in borders]
    return any(len(each) != 1 or len(each[0].uses) > 1 or each[0].shape != hidden_states for each in messages)


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yields the tensors in nested tuples, lists and mappings, with their places."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from _tensors(each, (*path, index))


def _replaced(value: Any, path: Path, tensor: Tensor) -> Any:
    """Puts a tensor at a place of nested values: into mappings and lists themselves, but into copies of tuples.

    A place that does not exist yet is made, e.g. the keys and values of a layer that did not run in this stage.
    """
    if not path:
        return tensor
    key, rest = path[0], path[1:]
    if isinstance(value, (tuple, list)) or value is None:
        parts = list(value or ()) + [None] * (key + 1 - len(value or ()))
        parts[key] = _replaced(parts[key], rest, tensor)
        return tuple(parts)
    value[key] = _replaced(value.get(key), rest, tensor)
    return value


class LayerRecorder:
    """Records the tensors that the layers of a tiny model take and return, in one forward pass.

    Args:
        layers: the layers, in order.

    Attributes:
        called: indices of the layers that have run.
        outputs: numbers of values that layers return in a tuple; 0 for a tensor.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self.called: list[int] = []
        self.outputs: set[int] = set()
        self._calls: list[tuple[int, Path, Tensor]] = []
        self._made: dict[int, int] = {}  # id of a tensor that a layer made -> layers that had run
        self._nodes: dict[Any, int] = {}  # autograd node of such a tensor -> the same
        self._kept: list[Tensor] = []  # so that no id is used twice

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records within a block."""
        hooks: list[Any] = []
        for index, layer in enumerate(self._layers):
            hooks.append(layer.register_forward_pre_hook(self._before(index), with_kwargs=True))
            hooks.append(layer.register_forward_hook(self._after(index), with_kwargs=True))
        try:
            with torch.enable_grad():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, index: int) -> Any:
        def called(_layer: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls += [(index, path, tensor) for path, tensor in _tensors((args, kwargs))]

        return called

    def _after(self, index: int) -> Any:
        def called(_layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.called.append(index)
            self.outputs.add(len(output) if isinstance(output, (tuple, list)) else 0)
            taken = {id(tensor) for _, _, tensor in self._calls}
            for _, tensor in _tensors((output, args, kwargs)):
                if id(tensor) not in taken:
                    self._made.setdefault(id(tensor), index + 1)
                    self._nodes.setdefault(tensor.grad_fn, index + 1)
                    self._kept.append(tensor)

        return called

    def carried(self) -> tuple[CarriedTensor, ...]:
        """Returns the tensors that depend on parameters or on layers, with the layers that take them."""
        self._nodes.pop(None, None)
        uses: dict[int, list[tuple[int, Path]]] = {}
        tensors = {id(tensor): tensor for _, _, tensor in self._calls}
        for index, path, tensor in self._calls:
            if tensor.requires_grad or id(tensor) in self._made:
                uses.setdefault(id(tensor), []).append((index, path))
        return tuple(
            CarriedTensor(self._origin(tensors[key]), tuple(places), tuple(tensors[key].shape))
            for key, places in uses.items()
        )

    def _origin(self, tensor: Tensor) -> int:
        if id(tensor) in self._made:
            return self._made[id(tensor)]
        return max((self._nodes.get(node, 0) for node in self._graph(tensor)), default=0)

    def starts_with(self, parameter: nn.Parameter | None) -> bool:
        """Whether the first layer's call depends on a parameter."""
        first = [tensor for index, _, tensor in self._calls if index == 0]
        return any(getattr(node, "variable", None) is parameter for each in first for node in self._graph(each))

    def _graph(self, tensor: Tensor) -> Iterator[Any]:
        """Yields the nodes of autograd's graph that made a tensor, back to the tensors that layers made."""
        waiting, seen = [tensor.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            yield node
            waiting += [] if node in self._nodes else [other for other, _ in node.next_functions]


Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class StageMessage:
    """Takes the tensors of a received message into the calls of a stage's layers, and packs those of the next one.

    Args:
        layers: the layers of a model reduced to a stage, all of them.
        carried: the tensors that stages send.
        own: (first, end) indices of the stage's layers.
        dtype: dtype of messages.

    Attributes:
        shapes: shape of a micro-batch's ids -> dtypes and shapes of the tensors that the previous stage sends.
        sent_shapes: dtypes and shapes of the last message to the next stage.
    """

    def __init__(
        self, layers: Sequence[nn.Module], carried: Sequence[CarriedTensor], own: tuple[int, int], *, dtype: torch.dtype
    ) -> None:
        first, end = own
        self._dtype = dtype
        self._taken = [each for each in carried if first and each.crosses(first)]
        self._given = [each for each in carried if end < len(layers) and each.crosses(end)]
        self._values: dict[CarriedTensor, Tensor] = {}
        self.shapes: dict[torch.Size, Shapes] = {}
        self.sent_shapes: Shapes = ()
        for index, layer in enumerate(layers):
            if index >= first:
                layer.register_forward_pre_hook(self._hook(index, own=index < end), with_kwargs=True, prepend=True)

    def _hook(self, index: int, *, own: bool) -> Any:
        taken = [(each, path) for each in self._taken for layer, path in each.uses if layer == index]
        given = [(each, path) for each in self._given for layer, path in each.uses if layer == index]

        def called(_layer: nn.Module, args: Any, kwargs: Any) -> Any:
            if not own:
                found = dict(_tensors((args, kwargs)))
                for each, path in given:
                    if path in found:
                        self._values.setdefault(each, found[path])
                return None
            call = (args, kwargs)
            for each, path in taken:
                if each in self._values:
                    call = _replaced(call, path, self._values[each])
            return call

        return called

    @property
    def count(self) -> int:
        """Number of tensors in a received message."""
        return len(self._taken)

    def size(self, ids: torch.Size) -> int:
        """Returns N, the elements of a received message, for micro-batches of ids of this shape."""
        return _size(self.shapes[ids], self._dtype)

    @property
    def sent_size(self) -> int:
        """N of the last message to the next stage."""
        return _size(self.sent_shapes, self._dtype)

    def receive(self, message: Tensor, ids: torch.Size) -> None:
        """Unpacks the previous stage's message for a micro-batch of ids of this shape."""
        offset = 0
        for each, (dtype, shape) in zip(self._taken, self.shapes[ids], strict=True):
            size = _packed_size(dtype, shape, self._dtype)
            part = message[offset : offset + size]
            offset += size
            values = part if dtype.is_floating_point else part.detach().clone().view(torch.int64)
            self._values[each] = values.view(shape).to(dtype)
        assert offset == len(message)

    def sent(self) -> Tensor:
        """Packs the next stage's message [N]."""
        tensors = [self._values[each] for each in self._given]
        self.sent_shapes = tuple((each.dtype, tuple(each.shape)) for each in tensors)
        return torch.cat([self._packed(each) for each in tensors])

    def _packed(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1)
        return flat.to(self._dtype) if flat.is_floating_point() else flat.to(torch.int64).view(self._dtype)

    def forget(self) -> None:
        """Drops references to tensors, which belong to the finished forward pass."""
        self._values = {}


def _packed_size(dtype: torch.dtype, shape: tuple[int, ...], packed: torch.dtype) -> int:
    count = torch.Size(shape).numel()
    return count if dtype.is_floating_point else count * (torch.int64.itemsize // packed.itemsize)


def _size(shapes: Shapes, dtype: torch.dtype) -> int:
    return sum(_packed_size(each, shape, dtype) for each, shape in shapes)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.float64)
_DIMS = 6


def send_shapes(message: StageMessage, *, to: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sends dtypes and shapes of a stage's last message to the rank of the next stage."""
    rows = [
        [_DTYPES.index(dtype), len(shape), *shape, *[0] * (_DIMS - len(shape))] for dtype, shape in message.sent_shapes
    ]
    dist.send(torch.tensor(rows, dtype=torch.int64, device=device), dst=to, group=group)


def receive_shapes(
    message: StageMessage, ids: torch.Size, *, source: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Receives what `send_shapes` sends, for micro-batches of ids of this shape."""
    rows = torch.empty(message.count, 2 + _DIMS, dtype=torch.int64, device=device)
    dist.recv(rows, src=source, group=group)
    message.shapes[ids] = tuple((_DTYPES[row[0]], tuple(row[2 : 2 + row[1]])) for row in rows.tolist())
