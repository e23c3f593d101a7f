"""Second moments of the inputs of linear layers; layers that read one tensor (query, key, value) share its moments.

Shapes: I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from foundation.errors import ConfigError


class SecondMoments:
    """Mean of x x^T over all inputs of the observed layers.

    Args:
        device: device of the sums.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._tokens: dict[tuple[str, ...], int] = {}
        self._input: Tensor | None = None
        self._version = 0
        self._readers: list[str] = []

    @contextmanager
    def observe(self, linear: Mapping[str, nn.Module]) -> Iterator[None]:
        """Observes layers, given as name -> layer, until the block ends."""
        handles = [module.register_forward_pre_hook(self._hook(name)) for name, module in linear.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._add()

    def pop(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yields (layers with equal inputs, mean over tokens fp32 [I, I]), each freed when the next is taken."""
        if len({name for names in self._sums for name in names}) < sum(map(len, self._sums)):
            self._separate()
        while self._sums:
            names = next(iter(self._sums))
            # an expert without tokens is rounded to nearest
            yield names, self._sums.pop(names).div_(max(1, self._tokens[names]))

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, positional: tuple[Tensor, ...]) -> None:
            if positional[0] is not self._input:
                self._add()
                self._input, self._version = positional[0], positional[0]._version
            self._check_unchanged()
            self._readers.append(name)

        return hook

    def _check_unchanged(self) -> None:
        """Refuses a model that changes an input in place: inputs are added up after the layers have run."""
        if self._input is not None and self._input._version != self._version:
            why = f"the model changes the input of {self._readers[0]} in place, after it was read"
            raise ConfigError("method", "gptq", why=why, remedy='use "auto-round" or "rtn"')

    def _add(self) -> None:
        """Adds the last input, once all layers that read it are known."""
        if self._input is None:
            return
        self._check_unchanged()
        rows, names = self._input.reshape(-1, self._input.shape[-1]).float(), tuple(self._readers)
        if names not in self._sums:
            self._sums[names] = torch.zeros(rows.shape[1], rows.shape[1], device=self._device)
            self._tokens[names] = 0
        self._sums[names].addmm_(rows.T, rows)
        self._tokens[names] += len(rows)
        self._input, self._readers = None, []

    def _separate(self) -> None:
        """Splits the sums by layer if the layers did not read the same tensor in every batch."""
        sums, tokens = self._sums, self._tokens
        self._sums, self._tokens = {}, {}
        for names, total in sums.items():
            for name in names:
                known = self._sums.get((name,))
                self._sums[name,] = total.clone() if known is None else known.add_(total)
                self._tokens[name,] = self._tokens.get((name,), 0) + tokens[names]
