"""Benchmark of the training loop: against a bare PyTorch loop and the Hugging Face Trainer with the same config.

    python -m benchmarks.loop [--restarts 6] [--rounds 8] [--steps 4] [--threads 2] [--only deepspeed,trainer]

One model, one dataset, and a separate process for every loop: none inherits another's memory or threads. All are set up
first; then they alternate, some steps each per round. The first round is a warmup, in which layers are compiled. Memory
placement changes a process's speed by 2 % for its whole life, so all are restarted several times. The tables show
tokens/s and ratios of wall-clock time and of CPU time, as medians over the rounds. Headrace's loop is the whole
`session.train`, with loader, learning-rate schedule and journal on disk.

The Trainer needs `pip install accelerate`; without it, it is skipped with a message.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from benchmarks.harness import Seconds, alternate, llama, make_parser, print_head, print_row, ratio, work_folder
from foundation.cli import leave
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.data.dataset import TokenDataset
from pipeline.data.loader import StepLoader
from pipeline.data.micro_batch import StepBatch
from pipeline.engines.build import pick_device
from pipeline.engines.objective import CrossEntropy
from pipeline.models.hf_config import resolve_hf_config
from pipeline.run.prepare import PreparedRun, prepare
from pipeline.run.session import train
from pipeline.runtime.faults.stop_signals import StopSignals
from pipeline.runtime.launch import detect, process_group

RUN: dict[str, Any] = {
    "model": llama(hidden=256, layers=4, vocab_size=4096),
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
    "evaluation": {"samples": 0},
    "watchdog": {"enabled": False},  # it would report the end as a crash
}
MANY = 1_000_000
"""Number of steps of a run, more than are executed."""
STAGES = [
    {"name": "stable", "until": {"steps": MANY // 2}},
    {"name": "anneal", "until": "rest", "data": {"sequence_length": 512}},
]
"""Stages of the staged loop. Its border is not reached: a border is a resume, and not a part of a step."""


class Rounds:
    """A loop's end of the pipe that starts its rounds; `begin` and `end` bracket and time every step."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._left = pipe, 0
        self._began = Seconds.now()

    def begin(self) -> None:
        """Waits for the next round, unless this one has steps left; ends the process after the last round."""
        if self._left == 0:
            try:
                self._left = self._pipe.recv()
            except EOFError:
                leave(0)
            self._began = Seconds.now()

    def end(self) -> None:
        """After the last step of a round, sends its wall-clock and CPU seconds."""
        self._left -= 1
        if self._left == 0:
            self._pipe.send(Seconds.since(self._began))

    def steps(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Passes batches on, each as one step of a round; the step includes loading its batch."""
        while True:
            self.begin()
            yield next(batches)
            self.end()


class Entry(NamedTuple):
    """A line of the table: its title, its infinite loop, and fields of its config besides `RUN`."""

    title: str
    loop: Callable[[ResolvedRun, Rounds], None]
    fields: dict[str, Any]


def entries(zero: int) -> dict[str, Entry]:
    """The loops by name, as in `--only`."""
    stage, compiled = {"zero_optimization": {"stage": zero}}, {"compile": {"enabled": True}}
    known = {
        "bare": Entry("bare PyTorch loop", bare, {"engine": "torch"}),
        "torch": Entry("ours, engine torch", ours, {"engine": "torch"}),
        "torch-staged": Entry("ours, engine torch, in stages", ours, {"engine": "torch", "stages": STAGES}),
        "torch-compiled": Entry("ours, engine torch, compiled", ours, {"engine": "torch", **compiled}),
        "bare-deepspeed": Entry(f"bare loop around deepspeed.initialize, ZeRO-{zero}", bare_deepspeed, stage),
        "deepspeed": Entry(f"ours, engine deepspeed, ZeRO-{zero}", ours, stage),
        "deepspeed-compiled": Entry(f"ours, engine deepspeed, ZeRO-{zero}, compiled", ours, {**stage, **compiled}),
        "trainer": Entry(f"Hugging Face Trainer, deepspeed, ZeRO-{zero}", hf_trainer, stage),
    }
    if not importlib.util.find_spec("accelerate"):
        print("the Hugging Face Trainer is skipped: pip install accelerate\n")
        del known["trainer"]
    return known


PAIRS = (
    ("torch", "bare"),
    ("torch-staged", "torch"),
    ("torch-compiled", "torch"),
    ("deepspeed", "bare-deepspeed"),
    ("deepspeed-compiled", "deepspeed"),
    ("deepspeed", "trainer"),
    ("trainer", "bare-deepspeed"),
)
"""Pairs of loops to compare, besides the comparison of all with the first."""


def main() -> None:
    """Prints the tables in Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("--restarts", type=int, default=6, help="restarts of all processes")
    parser.add_argument("--rounds", type=int, default=8, help="rounds per start")
    parser.add_argument("--steps", type=int, default=4, help="steps per loop and round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage of the DeepSpeed loops")
    parser.add_argument("--only", help="run these loops only, e.g. deepspeed,trainer")
    arguments = parser.parse_args()
    known = entries(arguments.zero)
    chosen = arguments.only.split(",") if arguments.only else list(known)
    took: dict[str, list[Seconds]] = {name: [] for name in chosen}
    with work_folder() as work:
        tokens = make_tokens(work)
        for number in range(arguments.restarts):
            for name, found in race(arguments, chosen, tokens, work / f"start-{number}").items():
                took[name] += found
    table(arguments, {name: known[name].title for name in chosen}, took)


def race(arguments: argparse.Namespace, chosen: list[str], tokens: Path, work: Path) -> dict[str, list[Seconds]]:
    """Starts every loop, runs its rounds alternately with the others', and ends it."""
    work.mkdir()
    pipes: dict[str, Connection] = {}
    processes = multiprocessing.get_context("spawn")
    for name in chosen:
        pipes[name], theirs = processes.Pipe()
        given = (name, arguments.zero, arguments.threads, tokens, work / name, theirs)
        processes.Process(target=compete, args=given, daemon=True).start()
        theirs.close()

    def steps(pipe: Connection) -> Seconds:
        pipe.send(arguments.steps)
        return pipe.recv()

    found = alternate({name: partial(steps, pipe) for name, pipe in pipes.items()}, arguments.rounds)
    for pipe in pipes.values():
        pipe.close()
    for process in multiprocessing.active_children():
        process.join()
    return found


def compete(name: str, zero: int, threads: int, tokens: Path, run_dir: Path, pipe: Connection) -> None:
    """Runs one loop in its process."""
    torch.set_num_threads(threads)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    entry = entries(zero)[name]
    data = {"sources": [{"path": str(tokens)}], "sequence_length": 256}
    run = {"dir": str(run_dir), "steps": MANY, "checkpoint_minutes": 0}
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps({**RUN, "data": data, "run": run, **entry.fields}))
    resolved = resolve(load_config(path), world_size=1)
    with nullcontext() if entry.loop is ours else process_group(detect(), gpu=pick_device(detect()).index):
        entry.loop(resolved, Rounds(pipe))


def table(arguments: argparse.Namespace, titles: dict[str, str], took: dict[str, list[Seconds]]) -> None:
    """Prints the results."""
    tokens = RUN["train_batch_size"] * 256 * arguments.steps
    wall, cpu = ({name: [each[kind] for each in found] for name, found in took.items()} for kind in (0, 1))
    base = next(iter(titles))
    print_head("loop", "tokens/s, median", f"time against the {titles[base]}")
    for name, title in titles.items():
        print_row(title, f"{tokens / statistics.median(wall[name]):,.0f}", ratio(wall[name], wall[base]))
    print()
    print_head("time of", "against", "wall-clock ratio", "CPU time ratio")
    for name, other in PAIRS:
        if name in titles and other in titles:
            print_row(titles[name], titles[other], ratio(wall[name], wall[other]), ratio(cpu[name], cpu[other]))


def bare(run: ResolvedRun, rounds: Rounds) -> None:
    """Runs a minimal training loop: no learning-rate schedule, no log, no checkpoint."""
    prepared, params = prepare(run), run.config.optimizer.params
    model: Any = plain_model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.lr, betas=params.betas, weight_decay=0.1)
    for batch in rounds.steps(iter(loader(prepared))):
        for micro in batch.micro_batches:
            logits = model(input_ids=micro.input_ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="sum")
            (loss / batch.targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.config.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()


def bare_deepspeed(run: ResolvedRun, rounds: Rounds) -> None:
    """Runs only DeepSpeed's own three calls, to show its engine's cost without our loop."""
    import deepspeed  # noqa: PLC0415  imports for seconds

    engine, *_ = deepspeed.initialize(model=plain_model(run), config=deepspeed_file(run))
    for batch in rounds.steps(iter(loader(prepare(run)))):
        for micro in batch.micro_batches:
            logits = engine(input_ids=micro.input_ids, use_cache=False).logits
            engine.backward(F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten()))
            engine.step()


def ours(run: ResolvedRun, rounds: Rounds) -> None:
    """Runs the whole training as `pipeline/train.py` does; each batch from the loader begins a step."""
    batches = StepLoader.__iter__
    StepLoader.__iter__ = lambda loader: rounds.steps(batches(loader))  # type: ignore[method-assign]
    with StopSignals(announce=False) as signals:
        train(run, lambda *_rank: CrossEntropy(), signals=signals)


def loader(prepared: PreparedRun) -> StepLoader:
    """Makes the loader of all batches."""
    return StepLoader(prepared.mixture, prepared.run.batch, dp_rank=0, steps=(1, MANY))


def hf_trainer(run: ResolvedRun, rounds: Rounds) -> None:
    """Runs `transformers.Trainer` with the same DeepSpeed config."""
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415  needs accelerate

    class InRounds(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            rounds.begin()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            rounds.end()

    arguments = TrainingArguments(
        output_dir=run.config.run.dir,
        max_steps=MANY,
        per_device_train_batch_size=run.batch.micro,
        gradient_accumulation_steps=run.batch.accumulation,
        deepspeed=deepspeed_file(run),
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
    data = Windows(prepare(run).mixture.sources[0])
    Trainer(model=plain_model(run), args=arguments, train_dataset=data, callbacks=[InRounds()]).train()


def plain_model(run: ResolvedRun) -> Any:
    """The measured model, built by transformers."""
    config = resolve_hf_config(run.config.model, tokenizer={"vocab_size": 4096}, sequence_length=256)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


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
    """Samples in the Trainer's form."""

    def __init__(self, source: TokenDataset) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.windows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self._source.read([index])[0, :-1])
        return {"input_ids": ids, "labels": ids}


def make_tokens(work: Path) -> Path:
    """Makes a tokens directory from some of Python's standard library."""
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
