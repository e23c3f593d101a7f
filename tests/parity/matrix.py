"""The parity matrix: the factors of a layout and of its numerics, and a cell of the matrix as a training run.

The config rules define which combinations are legal; `choice.py` selects those that are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.plan.proof.case import Case
from pipeline.plan.proof.shrunk_run import reference_config, with_precision

MOST_RANKS = 8
SAMPLES = 8


@dataclass(frozen=True)
class RunLength:
    """How many steps a cell is run, and after which it saves the state that the next cell resumes from."""

    steps: int
    saved: int


LONG, SHORT = RunLength(20, 15), RunLength(6, 4)
"""The curve, and what the tests have time for in every cell. The first gradient alone tells a wrong layout from a right
one, and the state that a cell resumes from a wrong update; 20 steps tell a decay of a moment that is wrong by 0.01: one
cell of each engine, and all cells of the sweep."""
SEQUENCE = 32
VOCABULARY = 128

Values = dict[str, Any]
"""Factor -> value: one cell of the matrix."""

LAYOUT: dict[str, tuple[Any, ...]] = {
    "sharding": ("deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3", "torch-0", "torch-2", "torch-3"),
    "pipeline": ("none", "1f1b-2", "1f1b-4", "gpipe-2", "interleaved_1f1b-2", "zero_bubble-2"),
    "tp": (1, 2),
    "cp": ("none", "ulysses-2", "ring-2"),
    "dp": (1, 2, 4),
    "extra": ("none", "shard", "offload_optimizer", "offload_both"),
    "accumulation": (1, 2, 4),
}
"""Factors of the layout. The config rules define which combinations are legal."""

NUMBERS: dict[str, tuple[Any, ...]] = {
    "activation_checkpointing": ("none", "full", "selective"),
    "chunk": (None, 12),
    "tied": (False, True),
    "mask": (False, True),
    "z_loss": (0.0, 1e-2),
    "clip": (0.0, 0.5),
    "compile": (False, True),
}
"""Factors that are legal in nearly every layout. 12 divides no sequence here, so the last chunk is shorter. Compiled
layers are traced and differentiated as for inductor (aot_eager), without its kernels; the reference has none."""

COMPLETEP: dict[str, Any] = {
    "parametrization": "completep",
    "base": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
"""Of a cell with `completep`, which is no factor of the matrix: see `test_other_factors.py`. Width and depth are twice
the base model's and the MLP three times, so that every kind of parameter has a learning rate of its own."""

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
MUON: dict[str, Any] = {"type": "Muon", "params": {"lr": 3e-3, "adam_lr": 2e-3, "weight_decay": 0.1}}
"""Of a cell with `muon`, which is no factor of the matrix either: see `test_other_factors.py`."""

CLIPPED_LOGIT = 0.03
"""Of a cell with `qk_clip`, beside `muon`: the model's logits are 0.06 before its first step."""

PRECISIONS = ("fp32", "bf16", "fp16")
CURVE = ("tied", "mask", "z_loss", "clip", "precision")
"""Factors that change the training curve; a reference is run for each combination that occurs."""


def config_of(values: Values, tokens: str, *, steps: int = LONG.steps) -> tuple[dict[str, Any], int]:
    engine, stage = values["sharding"].split("-")
    schedule, _, pp = values["pipeline"].partition("-")
    context, _, cp = values["cp"].partition("-")
    mesh = {"pp": int(pp or 1), "tp": values["tp"], "cp": int(cp or 1)}
    processes = mesh["pp"] * mesh["tp"] * mesh["cp"] * values["dp"]
    parallel: dict[str, Any] = dict(mesh)
    if pp:
        parallel["schedule"] = schedule
    if cp:
        parallel["cp_method"] = context
    if values["extra"] == "shard":
        parallel["hybrid_shard_size"] = 2
    if values.get("ep"):
        parallel |= {"ep": values["ep"], "ep_overlap": bool(values.get("overlap"))}
    loss = {"z_loss": values["z_loss"]} | ({"chunk": values["chunk"]} if values["chunk"] else {})
    config = {
        "engine": engine,
        "model": {"config": model_of(values), **(COMPLETEP if values.get("completep") else {})},
        "data": {
            "sources": [{"path": tokens}],
            "sequence_length": SEQUENCE,
            "mask_documents": values["mask"],
        },
        "loss": loss,
        "memory": {"activation_checkpointing": values["activation_checkpointing"]},
        "compile": {"enabled": values["compile"], "backend": "aot_eager"},
        "parallel": parallel,
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": values["accumulation"],
        "optimizer": _optimizer(values),
        "gradient_clipping": values["clip"],
        "zero_optimization": _zero(engine, int(stage), values["extra"]),
        "fp16": {"initial_scale_power": 12},
        "run": {"dir": "replaced", "steps": steps, "seed": 7},
    }
    return with_precision(config, values["precision"]), processes


def _optimizer(values: Values) -> dict[str, Any]:
    clipped = {"qk_clip": CLIPPED_LOGIT} if values.get("qk_clip") else {}
    return {**MUON, "params": {**MUON["params"], **clipped}} if values.get("muon") else ADAMW


def model_of(values: Values) -> dict[str, Any]:
    """Llama with four layers: enough for four pipeline stages, which the cost of the head makes unequal.

    Qwen3-MoE of the same sizes in a cell with `experts`, or with `ep`, see `test_other_factors.py`.
    """
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts = {"model_type": "qwen3_moe", "head_dim": 8, **sizes} if _has_experts(values) else {}
    return {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": values["tied"],
        **experts,
    }


def _zero(engine: str, stage: int, extra: str) -> dict[str, Any]:
    made: dict[str, Any] = {"stage": stage}
    if extra in ("offload_optimizer", "offload_both"):
        made["offload_optimizer"] = {"device": "cpu"}
    if extra == "offload_both":
        made["offload_param"] = {"device": "cpu"}
    if engine == "deepspeed":
        # the sizes of `proof.shrunk_run`: several buckets, and partitioned matrices
        made |= {"reduce_bucket_size": 4096} if stage else {}
        made |= {"stage3_param_persistence_threshold": 64, "sub_group_size": 16384} if stage == 3 else {}
    return made


def is_legal(values: Values) -> bool:
    """Whether the config rules accept the cell, it is not the reference itself, and it has at most MOST_RANKS ranks."""
    config, processes = config_of({**_defaults(), **values}, "tokens")
    if processes > MOST_RANKS or (values["extra"] == "shard" and values["dp"] * _cp(values) != 4):
        return False
    try:
        run = resolve(parse(Config, config), world_size=processes)
    except ConfigError:
        return False
    return not run.alone  # the one on one device has tests of its own


def _cp(values: Values) -> int:
    return int(values["cp"].partition("-")[2] or 1)


def _defaults() -> Values:
    return {**{name: choices[0] for name, choices in NUMBERS.items()}, "precision": "fp32"}


def name_of(values: Values) -> str:
    """A cell's name: the values that are not the defaults."""
    defaults = {**_defaults(), "pipeline": "none", "tp": 1, "cp": "none", "extra": "none"}
    named = [name for name in [*LAYOUT, *NUMBERS, "precision"] if values[name] != defaults.get(name)]
    shown = [name if values[name] is True else f"{_SHORT.get(name, name)}{values[name]}" for name in named]
    return ",".join([*shown, *_apart(values), *([f"ep{values['ep']}"] if values.get("ep") else [])])


def _apart(values: Values) -> list[str]:
    """What a cell has beside the factors of the matrix, and shares with its reference."""
    experts = ["experts"] if _has_experts(values) else []
    return [name for name in ("completep", "muon", "qk_clip") if values.get(name)] + experts


def _has_experts(values: Values) -> bool:
    return bool(values.get("experts") or values.get("ep"))


_SHORT = {
    "sharding": "",
    "accumulation": "acc",
    "pipeline": "",
    "cp": "",
    "extra": "",
    "activation_checkpointing": "ac-",
    "precision": "",
}


def curve_of(values: Values) -> tuple[Any, ...]:
    """The values that a cell shares with its reference."""
    return (*_apart(values), *(values[name] for name in CURVE))


def case_of(values: Values, tokens: str, *, length: RunLength, resume_from: tuple[str, int] | None = None) -> Case:
    config, processes = config_of(values, tokens, steps=length.steps)
    return Case(name_of(values), config, processes, save=(1, length.saved), resume_from=resume_from)


def reference_of(values: Values, tokens: str, *, length: RunLength) -> Case:
    config, _ = config_of({**values, "dp": 1}, tokens, steps=length.steps)
    made = reference_config({**config, "gradient_accumulation_steps": 4}, dp=1)
    return Case("reference-" + "-".join(map(str, curve_of(values))), made, 1, save=(1, length.saved))
