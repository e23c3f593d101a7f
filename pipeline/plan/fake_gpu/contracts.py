"""Contracts: what an operator demands of its arguments on CUDA and does not demand on a CPU.

A contract is a function that checks one call. The first paragraph of its docstring is the demand, the paragraph after
"Source:" names the code that has it. `table` has all of them; `docs/reference/contracts.md` shows the table. Where
torch has the check itself (a meta kernel), the contract asks torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from foundation.errors import HeadraceError


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        operator: name of the operator, without its overload.
        values: name of a parameter in the operator's schema -> argument, or default.
        ranks: number of ranks of the process group of a collective; 1 for other operators.
    """

    operator: str
    values: dict[str, Any]
    ranks: int = 1

    def tensors(self, *names: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (parameter, tensor) for the tensors among arguments; of all parameters if none is named."""
        for name in names or self.values:
            for each in tree_leaves(self.values.get(name)):
                if isinstance(each, Tensor):
                    yield name, each

    def shapes(self) -> str:
        """Describes the tensors among the arguments: name, dtype, shape and strides."""
        return ", ".join(f"{name} {described(each)}" for name, each in list(self.tensors())[:8])


Check = Callable[[Call], Iterator[str]]


@dataclass(frozen=True)
class Contract:
    """A demand on calls of operators.

    Attributes:
        name: short name, in words.
        operators: names of the operators.
        demand: the requirement that a call has to satisfy.
        source: code that has the demand, with the version.
        check: function that yields what is wrong with a call.
        of_streams: whether a call alone does not show it, because the order of earlier calls matters.
    """

    name: str
    operators: tuple[str, ...]
    demand: str
    source: str
    check: Check
    of_streams: bool

    def verify(self, call: Call) -> None:
        """Raises `BrokenContractError` if the call breaks the contract."""
        for wrong in self.check(call):
            raise BrokenContractError(self, call.operator, wrong, call.shapes())


class BrokenContractError(HeadraceError):
    """A call that breaks a contract.

    Args:
        contract: the contract.
        operator: name of the operator.
        wrong: the violation, in words.
        shapes: the call's tensors, in words.
    """

    def __init__(self, contract: Contract, operator: str, wrong: str, shapes: str) -> None:
        super().__init__(contract, operator, wrong, shapes)
        self.contract, self.operator, self.wrong, self.shapes = contract, operator, wrong, shapes

    def __str__(self) -> str:
        tensors = f" ({self.shapes})" if self.shapes else ""
        demand = f"it demands: {self.contract.demand} Source: {self.contract.source}"
        return f'contract "{self.contract.name}" is broken by {self.operator}: {self.wrong}{tensors}; {demand}'


def contract(*operators: str, of_streams: bool = False) -> Callable[[Check], Contract]:
    """Makes a contract of the check of these operators, from its name and docstring."""

    def made(check: Check) -> Contract:
        demand, _, source = inspect.cleandoc(check.__doc__ or "").partition("Source:")
        assert source, f"{check.__name__} names no source"
        name = check.__name__.replace("_", " ")
        return Contract(name, operators, " ".join(demand.split()), " ".join(source.split()), check, of_streams)

    return made


@cache
def table() -> tuple[Contract, ...]:
    """Returns all contracts."""
    from pipeline.plan.fake_gpu import contracts_collectives as collectives  # noqa: PLC0415
    from pipeline.plan.fake_gpu import contracts_operators as operators  # noqa: PLC0415

    return *operators.KERNELS, *collectives.CONTRACTS, *operators.STREAMS


@cache
def contracts_of(operator: str) -> tuple[Contract, ...]:
    """Returns the contracts of a kernel or collective, for which a call is all that they need."""
    return tuple(each for each in table() if operator in each.operators and not each.of_streams)


def call_of(op: Any, args: Any, kwargs: Any, *, ranks: int = 1) -> Call:
    """Binds arguments to the parameters of an operator's schema."""
    values = {each.name: each.default_value for each in op._schema.arguments}
    values.update(zip(values, args, strict=False))
    return Call(op._schema.name.rpartition("::")[2], {**values, **kwargs}, ranks)


def described(tensor: Tensor) -> str:
    """Describes a tensor: dtype, shape and strides."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} strides {list(tensor.stride())} on {tensor.device.type}"


def dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements are in one piece of memory without gaps, in any order of its dims."""
    return tensor.numel() == 0 or bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))
