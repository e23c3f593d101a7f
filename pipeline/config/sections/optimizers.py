"""The optimizers of a run: section `optimizer`, and all properties of optimizers except their `step`. No torch.

A type consists of an entry of `KINDS` and a module beside `pipeline/engines/optim/lion.py` that builds it; nothing else
names it (docs/decisions/0015-optimizers.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from foundation.section import Section

_FP32_BYTES = 4
EMA = "ema"
"""Name of the state with the EMA of a parameter (`run.ema`)."""


class UpdateScope(StrEnum):
    """Values on which the update of one element of a parameter depends."""

    ELEMENT = "element"
    """Value, gradient and states of that element alone: exact on any piece of a parameter."""
    MATRIX = "matrix"
    """The whole matrix of the element (Muon): every layout has to gather the matrix before the update."""


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer as configs, checkpoints, layouts and proofs see it. Two runs of equal kinds can exchange its state.

    Attributes:
        name: the `optimizer.type`.
        states: names of its state tensors, as the optimizer names them; each is fp32 with the parameter's shape.
        defaults: defaults of its `optimizer.params` other than lr and weight_decay; None: absent.
        aliases: other names of the type.
        counts_steps: whether it keeps a step counter (bias correction), the scalar `optimizer_step` of a checkpoint.
        scope: values on which the update of an element depends.
        states_need: the `optimizer.params` key without which it keeps no states; torch's fused kernel needs states of
            all parameters.
        state_beta: index of the beta that is the decay rate of its first state; None if the gradient is added to that
            state unscaled.
        l2_decay: whether weight decay is added to the gradient, and so part of the first state; otherwise it is
            decoupled.
        sign_like: whether an element's update does not grow with its gradient, so that the rules of CompleteP hold.
        proof_lr: bounds of the learning rate of a proof. Above the lower bound the weights of a tiny model change
            noticeably in a few steps; above the upper one the curve is chaotic, and rounding alone makes two layouts
            differ.
        usual_betas: betas that an error about invalid betas suggests.
        rest: kind for parameters other than hidden matrices, where the scope is `MATRIX`.
    """

    name: str
    states: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    counts_steps: bool = False
    scope: UpdateScope = UpdateScope.ELEMENT
    states_need: str | None = None
    state_beta: int | None = None
    l2_decay: bool = False
    sign_like: bool = False
    proof_lr: tuple[float, float] = (1e-3, 3e-3)
    usual_betas: tuple[float, float] = (0.9, 0.95)
    rest: OptimizerKind | None = None

    def of(self, *, matrix: bool) -> OptimizerKind:
        """Returns the kind for one parameter, a hidden matrix or not."""
        return self if matrix or self.rest is None else self.rest

    def with_ema(self) -> OptimizerKind:
        """Returns the kind with the EMA of each parameter as one more state."""
        return replace(self, states=(*self.states, EMA), rest=None if self.rest is None else self.rest.with_ema())

    @property
    def module(self) -> str:
        """Name of the module with `build(groups, params, *, lr, fused)`, which makes the torch optimizer."""
        return f"pipeline.engines.optim.{self.name.lower()}"

    @property
    def parameters(self) -> frozenset[str]:
        """The names of all `optimizer.params` that it takes."""
        return frozenset({"lr", "weight_decay", *self.defaults})

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of the fp32 master weight and the states of one parameter, as in a checkpoint."""
        return _FP32_BYTES * (1 + len(self.states))

    def state_bytes(self, *, parameters: float, matrices: float) -> float:
        """Computes the bytes of all master weights and states; `matrices` of the parameters are in hidden matrices."""
        return matrices * self.bytes_per_parameter + (parameters - matrices) * self.of(matrix=False).bytes_per_parameter

    def __str__(self) -> str:
        states = f"{self.name} ({', '.join(self.states) or 'no state'})"
        return states if self.rest is None else f"{states} and {self.rest}"


_BETAS = (0.9, 0.999)
"""DeepSpeed's default betas; Lion's in its paper are 0.9 and 0.99."""

ADAMW = OptimizerKind(
    "AdamW",
    ("exp_avg", "exp_avg_sq"),
    {"betas": _BETAS, "eps": 1e-8, "torch_adam": True, "adam_w_mode": True, "moments_dtype": None},
    aliases=("Adam",),
    counts_steps=True,
    state_beta=0,
    sign_like=True,
)
KINDS = (
    ADAMW,
    OptimizerKind(
        "Lion",
        ("exp_avg",),
        {"betas": _BETAS},
        state_beta=1,
        sign_like=True,
        proof_lr=(3e-4, 1e-3),
        usual_betas=(0.9, 0.99),
    ),
    OptimizerKind(
        "SGD",
        ("momentum_buffer",),
        {"momentum": 0.0, "nesterov": False},
        states_need="momentum",
        l2_decay=True,
        proof_lr=(3e-2, 1e-1),
    ),
    OptimizerKind(
        "Muon",
        ("momentum_buffer",),
        {
            "muon_lr": None,
            "adam_lr": None,
            "momentum": 0.95,
            "nesterov": True,
            "ns_steps": 5,
            "ns_method": "standard",
            "adjust_lr": "match_rms_adamw",
            "betas": (0.9, 0.95),
            "eps": 1e-10,
            "qk_clip": None,
        },
        counts_steps=True,
        scope=UpdateScope.MATRIX,
        sign_like=True,
        rest=ADAMW,
    ),
)
OPTIMIZERS = {name: kind for kind in KINDS for name in (kind.name, *kind.aliases)}
"""Optimizer kinds by `optimizer.type`."""

LISTED = f"{', '.join(kind.name for kind in KINDS[:-1])} or {KINDS[-1].name}"

CODE_BLOCK = 256
"""Number of values that share a scale where moments are stored in 8 bits."""
MOMENTS_BYTES: dict[str | None, float] = {None: 4, "fp32": 4, "bf16": 2, "8bit": 1 + 4 / CODE_BLOCK}
"""`optimizer.params.moments_dtype` -> bytes per element of a state tensor in memory."""


def kind_of(optimizer: Mapping[str, Any]) -> OptimizerKind:
    """Returns the kind of an `optimizer` section in a config as JSON, or in the manifest of a run or checkpoint.

    Args:
        optimizer: `type` (AdamW without one) and `params`.

    Raises:
        KeyError: the type is unknown.
    """
    kind, params = OPTIMIZERS[optimizer.get("type", "AdamW")], optimizer.get("params") or {}
    return kind if kind.states_need is None or params.get(kind.states_need) else replace(kind, states=())


class OptimizerParams(Section):
    """Hyperparameters of all optimizers, under DeepSpeed's names; those that the type does not use are refused."""

    lr: PositiveFloat = Field(
        1e-3, description="Peak learning rate; the scheduler scales it over the steps. A positive number, e.g. 3e-4"
    )
    betas: tuple[float, float] | None = Field(
        None,
        description="Two numbers in [0, 1), e.g. [0.9, 0.95]. AdamW: decay rates of the first and second moment. Lion:"
        " weight of the momentum in the update, and its decay rate. Default: [0.9, 0.999], as in DeepSpeed. Muon: betas"
        " of its AdamW part, default [0.9, 0.95], as in DeepSpeed",
        strict=False,
    )
    eps: PositiveFloat | None = Field(
        None,
        description="Term added to the denominator of AdamW's update for numerical stability, e.g. 1e-8, the default;"
        " the default of Muon's AdamW part is 1e-10, as in DeepSpeed",
    )
    momentum: NonNegativeFloat | None = Field(
        None,
        description="Momentum of SGD, a number in [0, 1), e.g. 0.9; default 0: without momentum and its state."
        " Muon's default is 0.95",
    )
    nesterov: bool | None = Field(
        None, description="true: Nesterov momentum; default false with SGD and true with Muon"
    )
    muon_lr: PositiveFloat | None = Field(
        None,
        description="Muon: peak learning rate of the hidden matrices; default lr. The schedule scales it as it does lr",
    )
    adam_lr: PositiveFloat | None = Field(
        None, description="Muon: peak learning rate of all parameters that AdamW updates; default lr"
    )
    ns_steps: PositiveInt | None = Field(
        None, description="Muon: Newton-Schulz iterations per update; default 5, as published"
    )
    ns_method: Literal["standard"] | None = Field(
        None, description="Muon: the quintic iteration on the matrix itself, the only method offered"
    )
    adjust_lr: Literal["match_rms_adamw", "original"] | None = Field(
        None,
        description="Muon: factor on the update of a matrix with m outputs and n inputs. match_rms_adamw, the default:"
        " 0.2 sqrt(max(m, n)), updates as large as AdamW's, so lr and decay carry over. original: sqrt(max(1, m/n))",
    )
    qk_clip: PositiveFloat | None = Field(
        None,
        description="Muon: largest attention logit of a head (a scaled product of a query and a key), e.g. 100. After a"
        " step in which a head exceeded it, the weights of its queries and keys are scaled down to this limit"
        " (QK-Clip of Kimi K2). Default: not clipped",
    )
    weight_decay: NonNegativeFloat = Field(
        0.0,
        description="Weight decay, e.g. 0.1; 0 is off. Decoupled, except for SGD: there it is added to the gradient"
        " (L2), as in torch. Applied to matrices, not to biases and norms",
    )
    torch_adam: bool | None = Field(
        None,
        description="DeepSpeed's switch to torch's AdamW, which headrace runs on both engines; leave it true, the"
        " default",
    )
    moments_dtype: Literal["fp32", "bf16", "8bit"] | None = Field(
        None,
        description="AdamW's two moments are held in fp32 (the default, 8 bytes per parameter), in bf16 (4) or in 8"
        " bits (2.03, a scale per 256 elements included), rounded stochastically; updates are computed in fp32. Small"
        " ones need engine torch on one device. Checkpoints have them in fp32 either way",
    )
    adam_w_mode: bool | None = Field(
        None,
        description="true, the default: decoupled weight decay (AdamW). Adam with L2 regularisation is not offered:"
        " leave it",
    )

    def rates_at(self, lr: float) -> dict[str, float]:
        """Returns the learning rates at another `lr`; rates of Muon and of its AdamW part keep their ratio to it."""
        own = {"muon_lr": self.muon_lr, "adam_lr": self.adam_lr}
        return {"lr": lr, **{name: rate / self.lr * lr for name, rate in own.items() if rate is not None}}


class OptimizerSection(Section):
    """The optimizer. DeepSpeed's type `Adam` means AdamW too, unless `adam_w_mode` is false."""

    type: Literal[*OPTIMIZERS] = Field(  # type: ignore[valid-type]
        "AdamW",
        description="AdamW (Adam is another name for it, as in DeepSpeed), Lion, SGD, with or without momentum, or"
        " Muon; upper and lower case are not distinguished",
    )
    params: OptimizerParams = OptimizerParams()

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, raw: Any) -> Any:
        """Fills in the type's defaults for parameters that are not given."""
        params = raw.get("params", {}) if isinstance(raw, Mapping) else None
        kind = raw.get("type", "AdamW") if isinstance(raw, Mapping) else None
        if not isinstance(params, Mapping) or not isinstance(kind, str):
            return raw
        given = {key: value for key, value in params.items() if value is not None}
        if given.get("moments_dtype") == "fp32":  # the default: runs with and without it are the same run
            del given["moments_dtype"]
        defaults = OPTIMIZERS[kind].defaults if kind in OPTIMIZERS else {}
        return {**raw, "params": {**defaults, **given}}

    @property
    def kind(self) -> OptimizerKind:
        """Properties of the optimizer, except its `step`."""
        return kind_of({"type": self.type, "params": vars(self.params)})

    @property
    def has_adamw_rates(self) -> bool:
        """Whether learning rate and weight decay mean the same as for AdamW, so that laws of its hyperparameters hold.

        They do for Muon if its updates are as large as AdamW's (Liu et al. 2025, Moonlight, arXiv:2502.16982, 2.2).
        """
        if self.kind.scope is UpdateScope.ELEMENT:
            return self.kind == ADAMW
        return self.params.adjust_lr == "match_rms_adamw" and len({*self.params.rates_at(self.params.lr).values()}) == 1

    @property
    def moments_bytes(self) -> float:
        """Bytes per element of a state tensor in memory."""
        return MOMENTS_BYTES[self.params.moments_dtype]


_TENSORS = "its update of an element depends on the whole tensor ({}), and layouts hand an optimizer pieces of tensors"
_OWN_WIRE = "it compresses and reduces gradients between ranks itself, so that the layout would enter the loss curve"
_WIDTHS = "muP's learning rates are those of a parametrization here, not of an optimizer"
_COMPLETEP = "use AdamW with model.parametrization completep and model.base, which scale it as muP does"
_LIBRARY = "it is element-wise, but not one of the optimizers of headrace train"
_OURS = f"use {LISTED}"
_OWN_LOOP = f"{_OURS}, or your own loop (docs/how-to/own-loop.md), which takes any element-wise torch optimizer"

REFUSED_TYPES: dict[str, tuple[str, str]] = {
    "adafactor": (_TENSORS.format("means of its rows and columns"), _OURS),
    "lamb": (_TENSORS.format("a trust ratio of norms"), _OURS),
    "lars": (_TENSORS.format("a trust ratio of norms"), _OURS),
    "shampoo": (_TENSORS.format("preconditioners of its dims"), _OURS),
    "soap": (_TENSORS.format("preconditioners of its dims"), _OURS),
    "prodigy": (_TENSORS.format("one step size is estimated from all of them"), _OURS),
    "onebitadam": (_OWN_WIRE, _OURS),
    "zerooneadam": (_OWN_WIRE, _OURS),
    "onebitlamb": (_OWN_WIRE, _OURS),
    "muadam": (_WIDTHS, _COMPLETEP),
    "muadamw": (_WIDTHS, _COMPLETEP),
    "musgd": (_WIDTHS, _COMPLETEP),
    **dict.fromkeys(("adagrad", "adadelta", "adamax", "nadam", "radam", "rmsprop"), (_LIBRARY, _OWN_LOOP)),
}
"""Lower-case names of known optimizers that are not supported -> (why, what to do instead)."""
