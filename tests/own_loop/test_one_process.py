"""Custom loops in this process: schedulers, no_sync, final weights of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from foundation.errors import ConfigError, DataError, TrainingError
from pipeline.own_loop import LoopEngine, prepare

CONFIG: dict[str, Any] = {
    "engine": "torch",
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0,
}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def micro_batch(engine: LoopEngine) -> None:
    engine.backward(engine(torch.ones(4, 3)).square().mean())


def test_the_engine_steps_a_scheduler_once_per_update_and_a_second_step_is_an_error() -> None:
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    engine, optimizer, _ = prepare(model, optimizer, config=CONFIG, scheduler=scheduler)
    rates = []
    for _ in range(4):
        micro_batch(engine)
        engine.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 0.5, 0.5, 0.25]
    with pytest.raises(TrainingError, match="the learning rate would change twice"):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.25]
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert scheduler.state_dict()["last_epoch"] == 2


def test_a_scheduler_of_schedulers_is_stepped_through() -> None:
    model, optimizer = small()
    warm = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=1)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[1])
    engine, _, _ = prepare(model, optimizer, config={**CONFIG, "gradient_accumulation_steps": 1}, scheduler=both)
    rates = []
    for _ in range(3):
        micro_batch(engine)
        engine.step()
        rates.append(both.get_last_lr()[0])
    assert rates == pytest.approx([1.0, 0.1, 0.01])


def test_a_scheduler_that_needs_the_loss_is_refused() -> None:
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match="its step needs metrics"):
        prepare(model, optimizer, config=CONFIG, scheduler=scheduler)


def test_a_schedule_of_the_config_beside_a_torch_scheduler_is_refused() -> None:
    model, optimizer = small()
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    with pytest.raises(ConfigError, match="both would set its learning rate"):
        prepare(model, optimizer, config={**CONFIG, **WARMUP})


def test_no_sync_is_for_micro_batches_before_the_last() -> None:
    model, optimizer = small()
    engine, _, _ = prepare(model, optimizer, config=CONFIG)
    completed = []
    for number in range(4):
        completed.append(engine.sync_gradients)
        if number % 2 == 0:
            with engine.no_sync():
                micro_batch(engine)
        else:
            with engine.no_sync(), pytest.raises(TrainingError, match="micro-batch 2 of 2"):
                micro_batch(engine)
            micro_batch(engine)
        assert engine.step() == completed[-1]
    assert completed == [False, True, False, True]


def test_the_final_weights_of_a_hugging_face_model_reload(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    for tied in (False, True):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=tied, **sizes))
        engine, _, _ = prepare(model, torch.optim.AdamW(model.parameters()), config=CONFIG)
        folder = engine.save_model(tmp_path / f"tied-{tied}", dtype=torch.bfloat16)
        again = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
        assert again.dtype == torch.bfloat16
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value.bfloat16()), name
        assert engine.state_dict().keys() == model.state_dict().keys()
        with pytest.raises(DataError, match="exists already"):
            engine.save_pretrained(folder)


def test_adamw_of_the_config_is_fused_and_sgd_takes_steps_that_leave_parameters_out() -> None:
    for kind, params, fused in (("AdamW", {"lr": 0.1}, True), ("SGD", {"lr": 0.1, "momentum": 0.9}, None)):
        torch.manual_seed(1)
        model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        model.forward = lambda x, which, model=model: model[which](x)  # type: ignore[method-assign, assignment]
        before = [p.clone() for p in model.parameters()]
        config = {**CONFIG, "gradient_accumulation_steps": 1, "optimizer": {"type": kind, "params": params}}
        engine, optimizer, _ = prepare(model, config=config)
        assert optimizer.param_groups[0]["fused"] is fused
        for which in (0, 1, 0):
            engine.backward(engine(torch.ones(4, 3), which).square().mean())
            engine.step()
        assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_bf16_computes_in_bf16_with_fp32_weights_gradients_and_states() -> None:
    model, _ = small()
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    section = {"type": "AdamW", "params": {"lr": 0.1}}
    engine, optimizer, _ = prepare(model, config={**CONFIG, "bf16": {"enabled": True}, "optimizer": section})
    micro_batch(engine)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    micro_batch(engine)
    engine.step()
    assert seen == [torch.bfloat16] * 2
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert {p.dtype for p in model.parameters()} | {value.dtype for value in states} == {torch.float32}


@pytest.mark.parametrize("shared", [False, True])
def test_code_for_transformers_4_is_saved_with_its_head(tmp_path: Path, shared: bool) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
    model = ListsItsTies(LlamaConfig(**sizes, vocab_size=32, tie_word_embeddings=False))
    if shared:
        model.lm_head.weight = model.model.embed_tokens.weight
    engine, _, _ = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), config=CONFIG)
    saved = load_file(Path(engine.save_model(tmp_path / "out")) / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(saved.pop(name), value)
    assert not saved


class ListsItsTies(LlamaForCausalLM):
    """As the code of models for transformers 4 does; 5 wants a dict."""

    _tied_weights_keys = ["lm_head.weight"]  # type: ignore[assignment]  # noqa: RUF012
