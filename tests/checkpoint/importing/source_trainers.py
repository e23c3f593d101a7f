"""Trains with other trainers and lets them save: source_trainers.py CASES.json OUT.json, on as many ranks as it gets.

A case trains `saved` steps, saves, and goes on to `steps`; its result is the loss of every step, over all ranks. All
cases train the same model on the samples of a tokens directory in Headrace's order.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.sections.data import DataSection
from pipeline.data.mixture import open_mixture
from pipeline.engines.optim.lion import Lion

SEQUENCE, VOCABULARY, BATCH, SEED, LR = 32, 128, 8, 3, 2e-3
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
    "tie_word_embeddings": False,
}
DECAY = 0.1
Losses = list[float]


def all_samples(case: dict[str, Any], step: int) -> Tensor:
    """The samples of a step, from 1: int64 [B, T + 1]."""
    data = DataSection.model_validate({"sources": [{"path": case["tokens"]}], "sequence_length": SEQUENCE})
    return torch.from_numpy(open_mixture(data, seed=SEED).read(range((step - 1) * BATCH, step * BATCH)))


def samples(case: dict[str, Any], step: int) -> Tensor:
    """This rank's samples of a step."""
    return all_samples(case, step).chunk(dist.get_world_size())[dist.get_rank()]


def model_of(case: dict[str, Any]) -> nn.Module:
    """The same Hugging Face model on every rank, fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(11)
    fields = {**MODEL, **case.get("model", {})}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """Mean cross-entropy per target."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def mean(loss: Tensor) -> float:
    """Over all ranks, which have as many targets each."""
    value = loss.detach().double().reshape(1)
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def groups_of(model: nn.Module, *, split: bool) -> list[dict[str, Any]]:
    """One parameter group without weight decay, or one with it and one without, as most trainers have."""
    named = list(model.named_parameters())
    if not split:
        return [{"params": [p for _, p in named], "weight_decay": 0.0}]
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]


def with_deepspeed(case: dict[str, Any]) -> Losses:
    """DeepSpeed's engine: ZeRO in `case["config"]`."""
    import deepspeed  # noqa: PLC0415

    model = model_of(case)
    config = {"train_batch_size": BATCH, "gradient_clipping": 1.0, **case["config"]}
    params = groups_of(model, split=case.get("split", True))
    # a Lion of its own deepspeed has for CUDA and by a compiler; the states of all have the same name
    made = {"sgd": torch.optim.SGD, "lion": Lion}
    kind = next((name for name in made if name in case), None)
    optimizer = torch.optim.AdamW(params, lr=LR) if kind is None else made[kind](params, **case[kind])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if "load" in case:
        engine.load_checkpoint(case["load"])
    losses = []
    for step in range(case.get("loaded", 0) + 1, case["steps"] + 1):
        loss = loss_of(engine, samples(case, step))
        losses.append(mean(loss))
        engine.backward(loss)
        engine.step()
        if step == case.get("saved"):
            engine.save_checkpoint(case["folder"])
            if case.get("universal") and dist.get_rank() == 0:
                to_universal(Path(case["folder"]))
    return losses


def to_universal(folder: Path) -> None:
    """Converts a checkpoint of ZeRO with DeepSpeed's own tool; what it was made of is removed."""
    from deepspeed.checkpoint import ds_to_universal  # noqa: PLC0415

    tag = folder / (folder / "latest").read_text()
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    made = tag.with_name(f"{tag.name}_universal")
    ds_to_universal.main(
        argparse.Namespace(input_folder=str(tag), output_folder=str(made), inject_missing_state=True, **options)
    )
    shutil.rmtree(tag)
    (folder / "latest").unlink()


def with_trainer(case: dict[str, Any]) -> Losses:
    """The Hugging Face Trainer: DDP, or DeepSpeed where `case["deepspeed"]` has its config."""
    from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: PLC0415
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    losses: Losses = []

    class InOrder(Trainer):
        """Takes the samples in their order, and remembers the losses of all steps."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            loss = loss_of(model, inputs["rows"])
            losses.append(mean(loss))
            return loss

    arguments = TrainingArguments(
        output_dir=case["folder"],
        per_device_train_batch_size=BATCH // dist.get_world_size(),
        max_steps=case["steps"],
        save_steps=case["saved"],
        save_total_limit=None,
        learning_rate=LR,
        weight_decay=DECAY,
        max_grad_norm=1.0,
        lr_scheduler_type=case.get("schedule", "constant"),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
        deepspeed=case.get("deepspeed"),
        optim="adamw_torch",
    )
    rows = [row for step in range(1, case["steps"] + 1) for row in all_samples(case, step)]
    trainer = InOrder(
        model=model_of(case),
        args=arguments,
        train_dataset=[{"rows": row} for row in rows],
        data_collator=lambda items: {"rows": torch.stack([item["rows"] for item in items])},
    )
    trainer.train()
    return losses


def with_accelerate(case: dict[str, Any]) -> Losses:
    """A loop with accelerate under DDP, saved by `save_state`."""
    from accelerate import Accelerator  # noqa: PLC0415
    from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: PLC0415

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    model = model_of(case)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups_of(model, split=True), lr=LR))
    losses = []
    for step in range(1, case["steps"] + 1):
        loss = loss_of(model, samples(case, step))
        losses.append(mean(loss))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == case["saved"]:
            accelerator.save_state(case["folder"])
    return losses


def with_fsdp(case: dict[str, Any]) -> Losses:
    """FSDP of torch in a plain loop, saved in one of several ways: `case["save"]`."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: PLC0415

    model: Any = model_of(case)
    if case.get("version", 2) == 1:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(groups_of(model, split=case.get("version", 2) == 2), lr=LR)
    if "load" in case:
        load_nested(case, model, optimizer)
    losses = []
    for step in range(case.get("loaded", 0) + 1, case["steps"] + 1):
        loss = loss_of(model, samples(case, step))
        losses.append(mean(loss))
        loss.backward()
        if case.get("version", 2) == 1:
            model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == case.get("saved"):
            SAVES[case["save"]](case, model, optimizer, step)
    return losses


def save_as_trainer(case: dict[str, Any], model: Any, optimizer: Any, step: int) -> None:
    """What the Trainer calls where accelerate runs FSDP, which it does on accelerators only."""
    from types import SimpleNamespace  # noqa: PLC0415

    from accelerate.state import PartialState  # noqa: PLC0415
    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model, save_fsdp_optimizer  # noqa: PLC0415
    from transformers import TrainerState  # noqa: PLC0415

    PartialState(cpu=True)  # its functions log by it
    folder = Path(case["folder"]) / f"checkpoint-{step}"
    kind = "FULL_STATE_DICT" if case.get("full") else "SHARDED_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=case.get("version", 2), state_dict_type=kind)
    plugin.set_state_dict_type(kind)
    here = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    save_fsdp_model(plugin, here, model, str(folder))
    save_fsdp_optimizer(plugin, here, optimizer, model, str(folder))
    if dist.get_rank() == 0:
        TrainerState(global_step=step).save_to_json(str(folder / "trainer_state.json"))
    dist.barrier()


def save_nested(case: dict[str, Any], model: Any, optimizer: Any, step: int) -> None:
    """As torch's tutorials do: model and optimizer under their names."""
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415

    weights, states = get_state_dict(model, optimizer)
    more = {
        "rng_state": torch.get_rng_state(),
        "ema": {name: torch.zeros_like(tensor) for name, tensor in weights.items()},
        "dataloader": {"step": 16},
        "meta": {"iteration": 900},
    }
    state = {"model": weights, "optimizer": states, "step": step, **(more if case.get("more") else {})}
    dcp.save(state, checkpoint_id=case["folder"])


def load_nested(case: dict[str, Any], model: Any, optimizer: Any) -> None:
    """As torch's tutorials do."""
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: PLC0415

    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": 0}
    dcp.load(state, checkpoint_id=case["load"])
    assert state["step"] == case["loaded"]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save_as_torchtitan(case: dict[str, Any], model: Any, optimizer: Any, step: int) -> None:
    """torchtitan's keys, names and order of rows, of a model with Hugging Face's."""
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights = titan_names(get_model_state_dict(model), "{}", fused=False)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    states: dict[str, Any] = {}
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        key = f"state.{{}}.{kind}"
        named = {n: flat[key.format(n)] for n in get_model_state_dict(model)}
        states |= titan_names(named, key, fused=case.get("fused", False))
    state = {
        **weights,
        "optimizer": states | {"param_groups.tok_embeddings.weight.lr": LR},
        "train_state": {"step": torch.tensor(step)},
        "lr_scheduler": {"last_epoch": step},
    }
    dcp.save(state, checkpoint_id=f"{case['folder']}/step-{step}")


def titan_names(tensors: dict[str, Any], key: str, *, fused: bool) -> dict[str, Any]:
    """Tensors under torchtitan's names, queries and keys in its order; `key` has a place for the name."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    found = {
        key.format("tok_embeddings.weight"): whole["model.embed_tokens.weight"],
        key.format("norm.weight"): whole["model.norm.weight"],
        key.format("lm_head.weight" if fused else "output.weight"): whole["lm_head.weight"],
    }
    size = MODEL["hidden_size"] // MODEL["num_attention_heads"]
    for layer in range(MODEL["num_hidden_layers"]):
        own = {n.removeprefix(f"model.layers.{layer}."): t for n, t in whole.items() if f"layers.{layer}." in n}
        q, k, v = (own[f"self_attn.{each}_proj.weight"] for each in "qkv")
        if q.ndim:  # row 2 i + j of a head was row i + j half heads
            q, k = (t.view(-1, 2, size // 2, t.shape[-1]).transpose(1, 2).reshape(t.shape) for t in (q, k))
        names = {"w1": "gate", "w2": "down", "w3": "up"}
        inner = {f"feed_forward.{n}.weight": own[f"mlp.{p}_proj.weight"] for n, p in names.items()}
        inner |= {"attention.wo.weight": own["self_attn.o_proj.weight"]}
        inner |= {"attention_norm.weight": own["input_layernorm.weight"]}
        inner |= {"ffn_norm.weight": own["post_attention_layernorm.weight"]}
        if fused:
            kv = MODEL["num_key_value_heads"]
            parts = (
                [q.view(kv, -1, size, q.shape[-1]), k.view(kv, 1, size, -1), v.view(kv, 1, size, -1)] if q.ndim else []
            )
            together = torch.cat(parts, dim=1).reshape(-1, q.shape[-1]) if q.ndim else q
            inner |= {"attention.qkv_linear.wqkv.weight": together}
        else:
            inner |= {"attention.wq.weight": q, "attention.wk.weight": k, "attention.wv.weight": v}
        found |= {key.format(f"layers.{layer}.{name}"): tensor for name, tensor in inner.items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}


KINDS = {"deepspeed": with_deepspeed, "trainer": with_trainer, "fsdp": with_fsdp, "accelerate": with_accelerate}
SAVES = {"trainer": save_as_trainer, "nested": save_nested, "torchtitan": save_as_torchtitan}


def main() -> None:
    """Trains all cases."""
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29533"}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo")
    cases: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    losses = {name: KINDS[case["kind"]](case) for name, case in cases.items()}
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
