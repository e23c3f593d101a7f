"""Our loop against a bare PyTorch loop and against the Hugging Face Trainer with the same DeepSpeed config.

    python benchmarks/loop.py [--rounds 40] [--steps 4] [--threads 2]

One process, one model, one dataset. Every contestant is set up first; then they take turns, so many steps each per
round, so that a machine whose speed drifts drifts for all. Printed are tokens per second (median over the rounds) and
the median of the rounds' ratios, with their quartiles. Ours is the whole loop: loader, schedule, journal on disk.

The Trainer needs `pip install accelerate`; it is left out, and said to be, where that is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from pipeline.config.load import load_config
from pipeline.config.rules import ResolvedRun, resolve
from pipeline.data.dataset import TokenDataset
from pipeline.data.loader import StepLoader
from pipeline.engines.build import build_engine, pick_device
from pipeline.engines.objective import CrossEntropy
from pipeline.launch import detect, process_group
from pipeline.metrics.console import TrainingDisplay
from pipeline.metrics.journal import Journal
from pipeline.models.hf_config import resolve_hf_config
from pipeline.prepare import Prepared, prepare
from pipeline.trainer import Training

Round = Callable[[int], float]
"""Does so many steps and returns the seconds they took."""

RUN = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 4096,
        }
    },
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
}


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4, help="steps per contestant and round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage of the DeepSpeed contestants")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as work, process_group(detect(), gpu=pick_device(detect()).index):
        table(arguments, set_up(Path(work), arguments))
    sys.stdout.flush()
    os._exit(0)  # the Trainer's thread still waits for its next turn


def set_up(work: Path, arguments: argparse.Namespace) -> dict[str, Round]:
    """The contestants, ready to run."""
    tokens = make_tokens(work)
    total = (arguments.rounds + 1) * arguments.steps

    def prepared(name: str, **fields: Any) -> Prepared:
        config = {
            **RUN,
            "data": {"sources": [{"path": str(tokens)}], "sequence_length": 256},
            "run": {"dir": str(work / name), "steps": total + 1},
            **fields,
        }
        path = work / f"{name}.json"
        path.write_text(json.dumps(config))
        return prepare(resolve(load_config(path), world_size=1))

    stage = {"stage": arguments.zero}
    contestants = {"bare PyTorch loop": bare(prepared("bare", engine="torch"))}
    contestants["ours, engine torch"] = ours(prepared("torch", engine="torch"))
    given = prepared("bare-deepspeed", zero_optimization=stage)
    contestants[f"bare loop around deepspeed.initialize, ZeRO-{arguments.zero}"] = bare_deepspeed(given)
    contestants[f"ours, engine deepspeed, ZeRO-{arguments.zero}"] = ours(prepared("deepspeed", zero_optimization=stage))
    if importlib.util.find_spec("accelerate"):
        given = prepared("trainer", zero_optimization=stage)
        contestants[f"Hugging Face Trainer, deepspeed, ZeRO-{arguments.zero}"] = hf_trainer(given, total, work)
    else:
        print("the Hugging Face Trainer is left out: pip install accelerate\n")
    return contestants


def table(arguments: argparse.Namespace, contestants: dict[str, Round]) -> None:
    """Runs the rounds and prints the figures."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    # the Trainer needs a thread of its own, where memory is not got as in the first one: so all have one
    threads = {name: ThreadPoolExecutor(1) for name in names}
    for number in range(arguments.rounds + 1):
        first = number % len(names)  # nobody always comes after the same one
        for name in names[first:] + names[:first]:
            took = threads[name].submit(contestants[name], arguments.steps).result()
            if number > 0:  # the first round warms up
                seconds[name].append(took)
    tokens = RUN["train_batch_size"] * 256 * arguments.steps  # type: ignore[operator]
    print("| loop | tokens/s, median | time against the bare PyTorch loop |\n|---|---|---|")
    for name, times in seconds.items():
        print(f"| {name} | {tokens / statistics.median(times):,.0f} | {ratio(times, seconds[names[0]])} |")
    print("\n| time of | against | ratio |\n|---|---|---|")
    for ours_, other in ((1, 0), (3, 2), (3, 4)):
        if other < len(names):
            print(f"| {names[ours_]} | {names[other]} | {ratio(seconds[names[ours_]], seconds[names[other]])} |")


def ratio(times: list[float], others: list[float]) -> str:
    """Median and quartiles of the ratios of the rounds."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times, others, strict=True)], n=4)
    return f"{middle:.3f} ({low:.3f} - {high:.3f})"


def bare(prepared: Prepared) -> Round:
    """What one writes in ten lines, and nothing else: no schedule, no log, no checkpoint."""
    run = prepared.run
    config, params = run.config, run.config.optimizer.params
    model: Any = AutoModelForCausalLM.from_config(hf_config_of(prepared), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.lr, betas=params.betas, weight_decay=0.1)
    batches = iter(loader(prepared, 1, 1 << 40))

    def go(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            batch = next(batches)
            for micro in batch.micro_batches:
                logits = model(input_ids=micro.input_ids, use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="sum")
                (loss / batch.targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clipping)
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - started

    return go


def bare_deepspeed(prepared: Prepared) -> Round:
    """DeepSpeed's own three calls and nothing else: what its engine costs without our loop."""
    import deepspeed  # noqa: PLC0415  imports for seconds

    model = AutoModelForCausalLM.from_config(hf_config_of(prepared), attn_implementation="sdpa")
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_file(prepared.run))
    batches = iter(loader(prepared, 1, 1 << 40))

    def go(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            for micro in next(batches).micro_batches:
                logits = engine(input_ids=micro.input_ids, use_cache=False).logits
                engine.backward(F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten()))
                engine.step()
        return time.perf_counter() - started

    return go


def ours(prepared: Prepared) -> Round:
    """The trainer's loop, as `pipeline/train.py` runs it."""
    engine = build_engine(prepared.run, prepared.model, prepared.values, CrossEntropy(), device=pick_device(detect()))
    prepared.run_dir.mkdir(parents=True)
    journal = Journal(prepared.run_dir, from_step=0)
    done = 0
    training = Training(
        run=prepared.run,
        engine=engine,
        steps=(),
        heldout=[],
        heldout_batches=lambda _dataset: iter(()),
        save=no_save,
        sinks=[journal],
        display=TrainingDisplay(first=0, total=prepared.run.steps, shown=False),
        flops_per_token=prepared.size.flops_per_token,
        peak_flops=None,
    )

    def go(steps: int) -> float:
        nonlocal done
        feed = loader(prepared, done + 1, done + steps)
        started = time.perf_counter()
        replace(training, steps=feed).go()
        done += steps
        return time.perf_counter() - started

    return go


def no_save(_step: int) -> Any:
    """No round reaches the run's last step."""
    raise AssertionError("no checkpoint is due")


def loader(prepared: Prepared, first: int, last: int) -> StepLoader:
    """This process's batches of some steps."""
    return StepLoader(prepared.blend, prepared.run.batch, dp_rank=0, steps=(first, last))


def hf_trainer(prepared: Prepared, total: int, work: Path) -> Round:
    """`transformers.Trainer` with the same DeepSpeed config, stopped and let go by a callback between its steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415  needs accelerate

    turn, done = threading.Semaphore(0), threading.Semaphore(0)
    quota = [0]

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            if quota[0] == 0:
                turn.acquire()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            quota[0] -= 1
            if quota[0] == 0:
                done.release()

    model = AutoModelForCausalLM.from_config(hf_config_of(prepared), attn_implementation="sdpa")
    arguments = TrainingArguments(
        output_dir=str(work / "trainer-out"),
        max_steps=total + 1,
        per_device_train_batch_size=prepared.run.batch.micro,
        gradient_accumulation_steps=prepared.run.batch.accumulation,
        deepspeed=deepspeed_file(prepared.run),
        learning_rate=1e-3,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    data = Windows(prepared.blend.sources[0])
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Turns()])
    threading.Thread(target=trainer.train, daemon=True).start()

    def go(steps: int) -> float:
        quota[0] = steps
        started = time.perf_counter()
        turn.release()
        done.acquire()
        return time.perf_counter() - started

    return go


def hf_config_of(prepared: Prepared) -> Any:
    """The Hugging Face config of the model under test."""
    return resolve_hf_config(prepared.run.config.model, tokenizer={"vocab_size": 4096}, sequence_length=256)


def deepspeed_file(run: ResolvedRun) -> dict[str, Any]:
    """The DeepSpeed keys of our config, as a user of the Trainer would write them."""
    return {
        "train_batch_size": run.batch.samples,
        "train_micro_batch_size_per_gpu": run.batch.micro,
        "gradient_accumulation_steps": run.batch.accumulation,
        "gradient_clipping": run.config.gradient_clipping,
        "zero_optimization": {"stage": run.config.zero_optimization.stage},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
    }


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Samples the way the Trainer wants them."""

    def __init__(self, source: TokenDataset) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.windows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self._source.read([index])[0, :-1])
        return {"input_ids": ids, "labels": ids}


def make_tokens(work: Path) -> Path:
    """A tokens directory of some of Python's standard library."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    folders = [stdlib / name for name in ("email", "asyncio", "unittest", "json")]
    config = {
        "output": str(work / "tokens"),
        "sources": [{"type": "text", "path": str(folder)} for folder in folders],
        "tokenizer": {"train": "bpe", "vocab_size": 2048},
        "heldout_fraction": 0.1,
    }
    path = work / "corpus.json"
    path.write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "data_prep", "--config", str(path)], check=True, capture_output=True)
    return work / "tokens"


if __name__ == "__main__":
    main()
