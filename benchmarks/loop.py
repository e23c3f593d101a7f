"""Benchmark of the training loop: against a bare PyTorch loop and the Hugging Face Trainer with the same config.

    python -m benchmarks.loop [--restarts 6] [--rounds 8] [--steps 4] [--threads 2] [--only deepspeed,trainer]

One model, one dataset, and every loop in a process of its own, so that none inherits another's memory or threads. All
are set up first; then they run alternately, some steps each per round, so that drifts of the machine's speed affect all
alike. The first round is a warmup, in which layers are compiled. Memory placement makes 2 % for the life of a process,
so all are restarted several times. Printed are tokens/s (median over the rounds) and the median of the rounds' ratios,
with quartiles, of wall-clock time and of CPU time.
Headrace's is the whole loop: loader, learning-rate schedule, journal on disk.

The Trainer needs `pip install accelerate`; without it, it is skipped with a message.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from headrace.base.cli import leave
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.data.dataset import TokenDataset
from pipeline.data.loader import StepLoader
from pipeline.data.micro_batch import StepBatch
from pipeline.data.skips import NO_SKIPS
from pipeline.engines.build import build_engine, pick_device
from pipeline.engines.objective import CrossEntropy
from pipeline.models.hf_config import resolve_hf_config
from pipeline.run.assembly import make_stepper, make_trainer
from pipeline.run.attempts import Attempt
from pipeline.run.batches import RankBatches
from pipeline.run.manifest import RunManifest
from pipeline.run.prepare import PreparedRun, prepare
from pipeline.run.rank_of_run import RankOfRun
from pipeline.run.uploads.uploads import Uploads
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import StopSignals
from pipeline.runtime.faults.watchdog import Watchdog
from pipeline.runtime.launch import detect, process_group
from pipeline.runtime.metrics.console import TrainingDisplay
from pipeline.runtime.metrics.journal import Journal
from pipeline.runtime.metrics.sinks import Sinks

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
MANY = 1_000_000
"""Steps of a run: more than are executed."""


class Rounds:
    """A loop's end of the pipe that starts its rounds: it brackets every step by `begin` and `end`, and is timed."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._left = pipe, 0
        self._wall = self._cpu = 0.0

    def begin(self) -> None:
        """Waits for the next round, unless this one has steps left."""
        if self._left == 0:
            self._left = self._pipe.recv()
            self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """After the last step of a round, sends its wall-clock and CPU seconds."""
        self._left -= 1
        if self._left == 0:
            self._pipe.send((time.perf_counter() - self._wall, time.process_time() - self._cpu))

    def steps(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Passes batches on, each as a step of a round; loading it is part of the step."""
        while True:
            self.begin()
            yield next(batches)
            self.end()


Loop = Callable[[PreparedRun, Rounds], None]
"""A training loop without end, its steps bracketed by rounds. The process group is open."""


@dataclass(frozen=True)
class Entry:
    """A line of the table.

    Attributes:
        title: name in the table.
        loop: the training loop.
        fields: fields of its config besides `RUN`.
    """

    title: str
    loop: Loop
    fields: dict[str, Any]


def entries(zero: int) -> dict[str, Entry]:
    """The loops by their names for `--only`."""
    stage, compiled = {"zero_optimization": {"stage": zero}}, {"compile": {"enabled": True}}
    known = {
        "bare": Entry("bare PyTorch loop", bare, {"engine": "torch"}),
        "torch": Entry("ours, engine torch", ours, {"engine": "torch"}),
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
    ("torch-compiled", "torch"),
    ("deepspeed", "bare-deepspeed"),
    ("deepspeed-compiled", "deepspeed"),
    ("deepspeed", "trainer"),
    ("trainer", "bare-deepspeed"),
)
"""Pairs of loops to compare, besides all against the first."""


def main() -> None:
    """Prints the tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=6, help="restarts of all processes")
    parser.add_argument("--rounds", type=int, default=8, help="rounds per start")
    parser.add_argument("--steps", type=int, default=4, help="steps per loop and round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage of the DeepSpeed loops")
    parser.add_argument("--only", help="run these loops only, e.g. deepspeed,trainer")
    arguments = parser.parse_args()
    known = entries(arguments.zero)
    chosen = arguments.only.split(",") if arguments.only else list(known)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as work:
        tokens = make_tokens(Path(work))
        for number in range(arguments.restarts):
            race(arguments, chosen, tokens, Path(work, f"start-{number}"), took)
    table(arguments, {name: known[name].title for name in chosen}, took)


def race(
    arguments: argparse.Namespace,
    chosen: list[str],
    tokens: Path,
    work: Path,
    took: dict[str, list[tuple[float, float]]],
) -> None:
    """Starts every loop, runs its rounds alternately, and ends it. Adds the seconds of every round to `took`."""
    work.mkdir()
    pipes = {}
    processes = multiprocessing.get_context("spawn")
    for name in chosen:
        pipes[name], theirs = processes.Pipe()
        given = (name, arguments.zero, arguments.threads, tokens, work / name, theirs)
        processes.Process(target=compete, args=given, daemon=True).start()
        theirs.close()
    for number in range(arguments.rounds + 1):
        first = number % len(chosen)  # rotated, so that no loop always follows the same one
        for name in chosen[first:] + chosen[:first]:
            pipes[name].send(arguments.steps)
            seconds = pipes[name].recv()
            if number > 0:  # the first round is a warmup
                took[name].append(seconds)
    for pipe in pipes.values():
        pipe.close()
    for process in multiprocessing.active_children():
        process.join()


def compete(name: str, zero: int, threads: int, tokens: Path, run_dir: Path, pipe: Connection) -> None:
    """The process of one loop."""
    torch.set_num_threads(threads)
    entry = entries(zero)[name]
    config = {
        **RUN,
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": 256},
        "run": {"dir": str(run_dir), "steps": MANY},
        **entry.fields,
    }
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps(config))
    prepared = prepare(resolve(load_config(path), world_size=1))
    with process_group(detect(), gpu=pick_device(detect()).index):
        try:
            entry.loop(prepared, Rounds(pipe))
        except EOFError:  # no more rounds
            leave(0)


def table(arguments: argparse.Namespace, titles: dict[str, str], took: dict[str, list[tuple[float, float]]]) -> None:
    """Prints the results."""
    tokens = RUN["train_batch_size"] * 256 * arguments.steps  # type: ignore[operator]
    base = next(iter(titles))
    print(f"| loop | tokens/s, median | time against the {titles[base]} |\n|---|---|---|")
    for name, title in titles.items():
        rate = tokens / statistics.median(wall for wall, _ in took[name])
        print(f"| {title} | {rate:,.0f} | {ratio(took[name], took[base], 0)} |")
    print("\n| time of | against | wall-clock ratio | CPU time ratio |\n|---|---|---|---|")
    for name, other in PAIRS:
        if name in titles and other in titles:
            wall, cpu = (ratio(took[name], took[other], kind) for kind in (0, 1))
            print(f"| {titles[name]} | {titles[other]} | {wall} | {cpu} |")


def ratio(times: list[tuple[float, float]], others: list[tuple[float, float]], kind: int) -> str:
    """Median and quartiles of the ratios of the rounds."""
    ratios = [a[kind] / b[kind] for a, b in zip(times, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} - {high:.3f})"


def bare(prepared: PreparedRun, rounds: Rounds) -> None:
    """A minimal training loop: no learning-rate schedule, no log, no checkpoint."""
    config, params = prepared.run.config, prepared.run.config.optimizer.params
    model: Any = AutoModelForCausalLM.from_config(hf_config_of(prepared), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.lr, betas=params.betas, weight_decay=0.1)
    for batch in rounds.steps(iter(loader(prepared))):
        for micro in batch.micro_batches:
            logits = model(input_ids=micro.input_ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="sum")
            (loss / batch.targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()


def bare_deepspeed(prepared: PreparedRun, rounds: Rounds) -> None:
    """DeepSpeed's own three calls and nothing else: what its engine costs without our loop."""
    import deepspeed  # noqa: PLC0415  imports for seconds

    model = AutoModelForCausalLM.from_config(hf_config_of(prepared), attn_implementation="sdpa")
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_file(prepared.run))
    for batch in rounds.steps(iter(loader(prepared))):
        for micro in batch.micro_batches:
            logits = engine(input_ids=micro.input_ids, use_cache=False).logits
            engine.backward(F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten()))
            engine.step()


def ours(prepared: PreparedRun, rounds: Rounds) -> None:
    """The trainer's loop, as `pipeline/train.py` runs it."""
    run, device = prepared.run, pick_device(detect())
    engine = build_engine(run, prepared.model, prepared.values, CrossEntropy(), device=device)
    prepared.run_dir.mkdir(parents=True)
    signals = StopSignals(announce=False)
    with ExitStack() as stack:
        here = RankOfRun(
            prepared=prepared,
            rank=0,
            engine=engine,
            agreement=Agreement(device),
            signals=signals,
            watchdog=Watchdog(),
            attempt=Attempt(None),
            sinks=Sinks([Journal(prepared.run_dir, from_step=0)]),
            display=TrainingDisplay(first=0, total=run.steps, shown=False),
            checkpoint=None,
            stack=stack,
        )
        trainer = make_trainer(
            here,
            stepper=make_stepper(here, skips=NO_SKIPS, after=None),
            batches=RankBatches(prepared, 0),
            group=None,
            copies=None,
            manifest=RunManifest(prepared, 0),
            uploads=Uploads(run.config, first=False, signals=signals),
        )
        replace(trainer, steps=rounds.steps(iter(loader(prepared)))).train()


def loader(prepared: PreparedRun) -> StepLoader:
    """All batches."""
    return StepLoader(prepared.mixture, prepared.run.batch, dp_rank=0, steps=(1, MANY))


def hf_trainer(prepared: PreparedRun, rounds: Rounds) -> None:
    """`transformers.Trainer` with the same DeepSpeed config."""
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415  needs accelerate

    class InRounds(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            rounds.begin()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            rounds.end()

    model = AutoModelForCausalLM.from_config(hf_config_of(prepared), attn_implementation="sdpa")
    arguments = TrainingArguments(
        output_dir=str(prepared.run_dir),
        max_steps=MANY,
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
    data = Windows(prepared.mixture.sources[0])
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[InRounds()]).train()


def hf_config_of(prepared: PreparedRun) -> Any:
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
