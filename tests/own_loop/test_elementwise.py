"""Which of a user's optimizers may be sharded: only those whose update of an element depends on no other element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foundation.errors import ConfigError
from pipeline.engines.optim.lion import Lion
from pipeline.own_loop import elementwise, prepare
from pipeline.own_loop.elementwise import ELEMENTWISE, largest_difference, why_not_elementwise


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]


class SignDescent(torch.optim.Optimizer):
    """Element-wise, of a class that nobody knows. Counts its steps in an attribute of the object."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.counts: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self.counts.append(1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = len(self.counts)
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class TrustRatio(torch.optim.Optimizer):
    """Scales an update by the norm of the parameter, as LAMB and LARS do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / parameter.grad.norm()
                parameter.sub_(parameter.grad * ratio, alpha=group["lr"])


class OneRateForAll(SignDescent):
    """Estimates one step size from all gradients, as Prodigy and D-Adaptation do: a scalar beside element-wise work."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        everything = [p.grad.abs().mean() for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign() * sum(everything), alpha=group["lr"])


class AdamWOfWholeTensors(torch.optim.AdamW):
    """Derived from an element-wise class: the class alone proves nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class RefreshesEveryTwenty(SignDescent):
    """Looks at whole tensors now and then, as Shampoo and SOAP do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if len(self.counts) % 20 == 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.mean(), alpha=group["lr"])


class Idle(SignDescent):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


@pytest.mark.parametrize("kind", sorted({*ELEMENTWISE, Lion}, key=str))
def test_the_classes_that_need_no_trial_pass_it(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = kind(parameters(), lr=0.1)
    with monkeypatch.context() as patched:
        patched.delattr(elementwise, "largest_difference")
        assert why_not_elementwise(optimizer) is None
    found = largest_difference(optimizer, optimizer.param_groups[0])
    assert found < 1e-5


@pytest.mark.parametrize("kind", [SignDescent, torch.optim.Rprop, torch.optim.Adadelta, torch.optim.ASGD])
def test_an_unknown_optimizer_that_is_element_wise_is_allowed(kind: Any) -> None:
    assert why_not_elementwise(kind(parameters())) is None


@pytest.mark.parametrize("kind", [TrustRatio, OneRateForAll, AdamWOfWholeTensors, RefreshesEveryTwenty])
def test_an_optimizer_that_looks_at_whole_tensors_is_found(kind: Any) -> None:
    assert "looks at whole tensors" in str(why_not_elementwise(kind(parameters(), lr=0.1)))


def test_adafactor_is_found_and_a_learning_rate_of_zero_hides_nothing() -> None:
    for rate in (1e-2, 0.0):
        assert "Adafactor looks at whole tensors" in str(
            why_not_elementwise(torch.optim.Adafactor(parameters(), lr=rate))
        )


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda: torch.optim.Muon(parameters()[:1]), "trial of Muon .* failed"),
        (lambda: torch.optim.LBFGS(parameters()), "closure"),
        (lambda: Idle(parameters()), "changed no weight"),
    ],
)
def test_what_cannot_be_tried_is_not_allowed(optimizer: Any, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(why_not_elementwise(optimizer()))


class ByGroup(torch.optim.SGD):
    """Divides by the gradient's norm in the groups that ask for it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"] if group.get("whole") else ():
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


def test_every_parameter_group_is_tried() -> None:
    matrix, vector = parameters()
    groups = [{"params": [vector], "whole": False}, {"params": [matrix], "whole": True}]
    assert "looks at whole tensors" in str(why_not_elementwise(ByGroup(groups, lr=0.1)))
    assert why_not_elementwise(ByGroup(groups[:1], lr=0.1)) is None


def test_a_trial_leaves_the_optimizer_and_its_parameters_alone() -> None:
    own = parameters()
    optimizer = SignDescent(own)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    hooked: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
    assert why_not_elementwise(optimizer) is None
    assert (optimizer.counts, hooked, dict(optimizer.state)) == ([], [], {})
    assert all(bool((p == 1).all()) and p.grad is None for p in own)
    assert optimizer.param_groups[0]["params"] == own
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"zero_optimization": {"stage": 1}}, "use zero_optimization.stage 0, where"),
        ({"zero_optimization": {"stage": 3}}, "use zero_optimization.stage 0, where"),
        ({"bf16": {"enabled": True}}, "use zero_optimization.stage 0 with engine torch"),
    ],
)
def test_prepare_refuses_a_sharded_adafactor_before_any_work(config: dict[str, Any], remedy: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="Adafactor looks at whole tensors") as refused:
        prepare(model, torch.optim.Adafactor(model.parameters()), config={**config, "train_batch_size": 4})
    assert remedy in str(refused.value)
    assert not torch.distributed.is_initialized()


def test_prepare_refuses_muon_by_name_since_hidden_matrices_are_those_of_hugging_face_models() -> None:
    section = {"type": "Muon", "params": {"lr": 1e-3}}
    with pytest.raises(ConfigError, match="hidden matrices are known only in"):
        prepare(nn.Linear(4, 4), config={"optimizer": section, "train_batch_size": 4})


def test_fsdp2_refuses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensors do not help: torch 2.13's Adafactor raises on them, and Muon's update differs by 1 %."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    model = nn.Linear(4, 4)
    config = {"engine": "torch", "zero_optimization": {"stage": 2}, "train_batch_size": 4}
    with pytest.raises(ConfigError, match="looks at whole tensors"):
        prepare(model, torch.optim.Adafactor(model.parameters()), config=config)
