"""Overrides derived tensor-parallel shards by a table of the user's (`parallel.tp_plan`).

A key names a linear layer, a norm, a parameter or a block: with * for numbers, in full or below the base model, as in
transformers' `base_model_tp_plan`. The rest of its block keeps the derived styles, and the attributes to divide are
found anew. As for derived plans, the outputs of two ranks have to add up to the recorded output of the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from itertools import product

from torch import nn

from foundation.errors import ConfigError
from pipeline.engines.parallel.tensor_plan import BlockCall, BlockKind, called_modules, scalings, sums_to_output
from pipeline.engines.parallel.tensor_styles import COLWISE, GATHERED, ROWWISE, WHOLE, BlockPlan

_FIELD = "parallel.tp_plan"
_REMEDY = "remove it: headrace explain layout FAMILY prints what is derived"


def table_plans(
    table: Mapping[str, str], calls: Mapping[str, BlockCall], derived: Mapping[BlockKind, BlockPlan]
) -> dict[BlockKind, BlockPlan]:
    """Returns the plans of the blocks that a table names.

    Args:
        table: `parallel.tp_plan`.
        calls: recorded calls of a tiny model's blocks and parts of blocks, by name.
        derived: plans of these blocks without the table.

    Raises:
        ConfigError: a key names nothing, or two ranks with its style compute another output.
    """
    blocks = {BlockKind.of(name, call.block): call for name, call in calls.items()}
    entries: dict[BlockKind, dict[str, str]] = {}
    for key, style in table.items():
        for kind, inner in _named(key, blocks, derived).items():
            entries.setdefault(kind, {})[inner] = style
    return {kind: _plan(kind, blocks[kind], own, derived.get(kind)) for kind, own in entries.items()}


def _named(
    key: str, blocks: Mapping[BlockKind, BlockCall], derived: Mapping[BlockKind, BlockPlan]
) -> dict[BlockKind, str]:
    """Returns the kinds of blocks in which a key names something, with the name in the block; "" for the block."""
    found: dict[BlockKind, str] = {}
    every: list[str] = []
    for kind, call in blocks.items():
        inside = [name for name, _ in call.block.named_modules()] + list(kind.parameters)
        full = {f"{kind.name}.{name}" if name else kind.name: name for name in inside}
        every += full
        named = next((name for whole, name in full.items() if f".{whole}".endswith(f".{key}")), None)
        if named is not None:
            found[kind] = named
    if not found:
        near = get_close_matches(key, every, n=1, cutoff=0.0)
        why = "no module or parameter of a block in a decoder layer has this name"
        raise ConfigError(_FIELD, key, why=why, remedy=f"use a name like {near[0] if near else 'those in the model'}")
    # of a block and a part of it, the one that is sharded, else the part
    best = {kind: name for kind, name in found.items() if kind in derived} or found
    return {kind: name for kind, name in best.items() if not any(_within(other, kind) for other in best)}


def _within(part: BlockKind, block: BlockKind) -> bool:
    return part.name.startswith(f"{block.name}.")


def _plan(kind: BlockKind, call: BlockCall, own: Mapping[str, str], derived: BlockPlan | None) -> BlockPlan:
    if own.get("") == WHOLE:
        return BlockPlan({})
    before = derived.styles if derived else {}
    found = _proven(call, {**before, **own})
    if found is not None:
        return found
    wrong = next(
        (n for n in own if _proven(call, {**before, **{k: v for k, v in own.items() if k != n}})), next(iter(own))
    )
    name = f"{kind.name}.{wrong}" if wrong else kind.name
    why = f"with the style {own[wrong]} the outputs of two tensor-parallel ranks do not add up to those of {kind.name}"
    raise ConfigError(_FIELD, {name: own[wrong]}, why=why, remedy=_REMEDY)


def _proven(call: BlockCall, styles: Mapping[str, str]) -> BlockPlan | None:
    """Returns a plan with some styles with which the ranks' outputs add up to the recorded output; None without."""
    linears, norms = called_modules(call)
    every = {name: style for name, style in styles.items() if style != GATHERED or _gathers(name, norms, styles)}
    every = {name: WHOLE for name in linears if name not in every} | every
    if list(every.values()).count(ROWWISE) != 1 or not _exist(call.block, every):
        return None
    apart = {name.rpartition(".")[0] for name, style in every.items() if style == WHOLE} - {""}
    ways = product(scalings(call.block, apart), (False, True) if call.has_residual else (False,))
    plans = (BlockPlan(every, scaled, own_residual) for scaled, own_residual in ways)
    return next((plan for plan in plans if sums_to_output(call, plan, norms)), None)


def _gathers(name: str, norms: Mapping[str, tuple[str, object]], styles: Mapping[str, str]) -> bool:
    """Whether a norm normalizes the outputs of a layer that is sharded; of another layer it has all features."""
    return name in norms and styles.get(norms[name][0]) == COLWISE


def _exist(block: nn.Module, styles: Mapping[str, str]) -> bool:
    names = {name for name, _ in block.named_modules()} | {name for name, _ in block.named_parameters()}
    return set(styles) <= names
