"""Refuses a run before a proof starts any rank, by the checks of `headrace check` on the real config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pipeline.config.load import changed
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.deepspeed import Fp16Section
from pipeline.engines.common import model_dtype
from pipeline.engines.deepspeed.machine import check_machine
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.models.attention import attention_of
from pipeline.models.construction.meta import build_meta
from pipeline.plan.proof.shrunk_run import TRACED, proven_attention, real_model
from pipeline.plan.proof.worker import use_cpu
from pipeline.run.prepare import check_fallbacks, first_values


def check_run(run: ResolvedRun) -> None:
    """Builds the real model on meta and checks the real layout; data, directories and GPUs are not checked.

    Args:
        run: the user's run, resolved for its own number of processes.

    Raises:
        ConfigError, DataError: the model cannot be built, or the run cannot have its layout or settings.
    """
    use_cpu()
    torch.set_num_threads(1)  # ranks are forked from this process
    config = run.config
    here = {"model.attn_implementation": proven_attention(config.model)}
    if config.compile.backend == "inductor":  # a proof does without inductor's compilers
        here["compile.backend"] = TRACED
    run = replace(run, config=changed(config, here))
    how: dict[str, Any] = {"attn_implementation": attention_of(run), "ahead": config.loss.ahead}
    model = build_meta(real_model(run), dtype=model_dtype(config), **how)
    check_layout(run, model, packages=False)
    check_fallbacks(run, model, packages=False)
    first_values(config.model, model, seed=config.run.seed)
    if config.engine == "deepspeed":
        check_machine(config.zero_optimization, Fp16Section())  # fp16 is proven in fp32 where the processor lacks it
