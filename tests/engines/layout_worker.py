"""Runs layouts of both engines and measures their differences from the one-process reference.

Every rank runs layout_worker.py CASES.json DIRECTORY, where `reference_worker.py` has saved the references; it resumes
from the layouts' states afterwards. A case is a dict of config keys, and `steps`. The micro-batches are synthetic, so
that only the engines are compared.
"""

from __future__ import annotations

import json
import logging
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from foundation.section import parse
from pipeline.checkpoint import named_state
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.rules.shares import share_rule
from pipeline.config.sections.evaluation import TaskSection
from pipeline.config.sections.run import Config
from pipeline.config.shares import Shares
from pipeline.config.topology import sequence_chunks
from pipeline.data.micro_batch import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import Objective
from pipeline.engines.build import build_engine
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.multi_token import training_loss
from pipeline.evaluation.tasks.encode import EncodedTask
from pipeline.evaluation.tasks.rows import GeneratedQuestion, RankedQuestion
from pipeline.models.attention import attention_of
from pipeline.models.construction.initial_values import InitByName, OwnBuffers, ParameterValues
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.rectangle import Rectangle
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.masks import positions_in_documents
from pipeline.run.task_evaluation import TaskEvaluation
from tests.parity.matrix import model_of

CPU = torch.device("cpu")
SAMPLES, LENGTH, VOCABULARY, SAVED, LAST = 8, 32, 64, 2, 4
MODEL = {**model_of({"tied": True}), "vocab_size": VOCABULARY}
WITHOUT_CACHE = frozenset(
    ("bamba", "falcon_h1", "jamba", "kimi_linear", "lfm2", "mamba2", "nemotron_h", "qwen3_next", "zaya")
)
"""Families of the cells for whose recurrent layers decoding makes no cache: prompts are not continued."""
SAME = (
    "attn_implementation",
    "bf16",
    "data",
    "fp16",
    "fp8",
    "loss",
    "model",
    "moe",
    "gradient_clipping",
    "optimizer",
    "train_micro_batch_size_per_gpu",
)
"""Keys that the reference shares with a layout; the last because fp16 may overflow only in a large micro-batch."""


def reference_case(case: dict[str, Any]) -> dict[str, Any]:
    shared = {key: case[key] for key in SAME if key in case}
    if "optimizer" in shared:  # so is the dtype of moments, which the reference has in fp32
        optimizer = shared["optimizer"]
        params = {key: value for key, value in optimizer["params"].items() if key != "moments_dtype"}
        shared["optimizer"] = {**optimizer, "params": params}
    if "fp8" in shared:  # how weights are gathered is a layout
        shared["fp8"] = {**shared["fp8"], "fsdp_all_gather": False}
    return shared


def reference_directory(case: dict[str, Any]) -> str:
    """Name of the directory in which the reference of a case saves its curve and its state."""
    shared = json.dumps([reference_case(case), case.get("steps", LAST)], sort_keys=True)
    return f"reference-{zlib.crc32(shared.encode())}"


def layout_directory(name: str) -> str:
    """Name of the directory in which a layout saves its state."""
    return f"own-{zlib.crc32(name.encode())}"


@dataclass(frozen=True)
class Curve:
    """Losses and gradient norms of a run's steps, loss sum of an evaluation, gradients of the first step by name,
    of experts the auxiliary loss and the largest violation of balance per step, with expert parallelism the most rows
    of a rank, with QK-Clip the largest attention logit per step and how many heads were clipped in all; and of a task
    -log p of every request, and the continuations of its prompts where the layout can."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    nats: float
    gradients: dict[str, Tensor]
    balance: list[float]
    rows: float = 0.0
    logits: tuple[float, ...] = ()
    clipped: float = 0.0
    requests: tuple[float, ...] = ()
    continued: tuple[int, ...] = ()


def resolved(case: dict[str, Any], *, processes: int) -> ResolvedRun:
    sizes = {key: value for key, value in {**MODEL, **case.get("model", {})}.items() if value is not None}
    config = {
        "engine": "reference" if processes == 1 else "torch",
        "data": {"sources": [{"path": "none"}], "sequence_length": LENGTH},
        "train_batch_size": SAMPLES,
        "optimizer": {"params": {"lr": 3e-3, "betas": [0.0, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": 0,
        "run": {"dir": "none", "steps": 20},
        **{key: value for key, value in case.items() if key != "attn_implementation"},
        "model": {
            "config": sizes,
            "attn_implementation": case.get("attn_implementation", "sdpa"),
        },
    }
    return resolve(parse(Config, config), world_size=processes)


def make_engine(run: ResolvedRun, objective: Objective | None = None, *, device: torch.device = CPU) -> Any:
    """The engine of a run, with the run's own objective unless another is given."""
    hf = resolve_hf_config(run.config.model, tokenizer={"vocab_size": VOCABULARY}, sequence_length=LENGTH)
    how: dict[str, Any] = {"attn_implementation": attention_of(run), "ahead": run.config.loss.ahead}
    model = build_meta(hf, dtype=model_dtype(run.config), **how)
    objective = objective or training_loss(run.config.loss)
    values = RecordedValues(InitByName(model, seed=3))
    engine: Any = build_engine(run, model, values, objective, device=device)
    if not run.alone and run.config.engine == "torch":
        own = Counter[str]()
        for shard in [*engine._shards, *(copy for _, copy in engine._copies)]:
            own[shard.name] += shard.master.numel()
        assert values.asked == own
    zero = run.config.zero_optimization
    if run.config.engine == "deepspeed" and zero.stage < 3:
        parameters = engine._local_model.decoder.parameters_by_name()
        assert values.asked == {name: parameter.numel() for name, parameter in parameters.items()}
    if run.config.engine == "deepspeed" and zero.stage == 3 and not zero.zero_hpz_partition_size:
        assert_only_partitions(values.asked, engine._local_model.decoder.parameters_by_name())
    return engine


class RecordedValues(OwnBuffers):
    """Counts the elements that a rank asks for: name -> number."""

    def __init__(self, values: ParameterValues) -> None:
        self._values, self.asked = values, dict[str, int]()

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        value = self._values.value(name, box=box, device=device)
        self.asked[name] = self.asked.get(name, 0) + value.numel()
        return value


def assert_only_partitions(asked: dict[str, int], parameters: dict[str, Any]) -> None:
    """A rank with ZeRO-3 has asked for no more than its partition of each parameter, and the rows at its ends."""
    for name, parameter in parameters.items():
        row = parameter.ds_numel // max(1, parameter.ds_shape[0])
        assert asked.get(name, 0) <= min(parameter.ds_numel, parameter.ds_tensor.ds_numel + 2 * row), name


def shares_of(run: ResolvedRun, step: int) -> Shares | None:
    """The shares of a step: with "auto" another rank has the larger share in every step."""
    if run.config.parallel.shares != "auto":
        return run.batch.shares
    dp = run.topology.dp
    weights = [3.0 if (rank + step) % dp == 0 else 1.0 for rank in range(dp)]
    return share_rule(run.config, run.topology, run.batch).divide(weights)


def step_batch(run: ResolvedRun, step: int) -> StepBatch:
    """This rank's part of a step of learnable tokens, a tenth of which are not targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 5, (SAMPLES, LENGTH + 1), generator=generator).cumsum(1) % VOCABULARY
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.1] = IGNORE
    coordinates = run.topology.coordinates(0 if run.alone else dist.get_rank())
    chunks = sequence_chunks(LENGTH, cp=run.topology.cp, cp_rank=coordinates["cp"], zigzag=run.zigzag)
    shard = torch.tensor([position for chunk in chunks for position in chunk])
    micros = []
    begins = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.1
    documents = begins.cumsum(1, dtype=torch.int32) if run.config.data.mask_documents else None
    shares, dp_rank = shares_of(run, step), coordinates["dp"]
    for number in range(run.batch.accumulation if shares is None else len(shares.sizes[dp_rank])):
        first, size = (number * run.batch.dp + dp_rank) * run.batch.micro, run.batch.micro
        if shares is not None:
            before, size = sum(shares.sizes[dp_rank][:number]), shares.sizes[dp_rank][number]
            first = shares.samples(dp_rank).start + before
        rows = torch.arange(first, first + size)
        padding, rows = rows >= SAMPLES, rows.clamp(max=SAMPLES - 1)
        own_labels = labels[rows][:, shard].masked_fill(padding[:, None], IGNORE)
        masks: list[Tensor] = []
        if documents is not None:
            masks = [positions_in_documents(documents[rows])[:, shard], documents[rows]]
        micros.append(MicroBatch(tokens[rows, :-1][:, shard].contiguous(), own_labels, *masks))
    return StepBatch(step, micros, int((labels != IGNORE).sum()))


def train(run: ResolvedRun, engine: Any, *, first: int, last: int, save: Path | None = None) -> Curve:
    """Trains from step `first` to `last`; evaluates at the end, and when saving, where it must not change the state."""
    results, gradients = [], {}
    for step in range(first, last + 1):
        results.append(engine.train_step(step_batch(run, step), lr=run.config.optimizer.params.lr / 10 * step))
        if step == 1:
            gradients = dict(first_states(engine))
        if step == SAVED and save is not None:
            engine.evaluate(iter(step_batch(run, 98).micro_batches))
            save.mkdir(exist_ok=True)
            named_state.write(engine.state(), save)
    nats = engine.evaluate(iter(step_batch(run, 99).micro_batches)).nats
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    names = ("load_balance_loss", "expert_max_violation")
    balance = [r.parts[name] for r in results for name in names if name in r.parts]
    rows = max(r.parts.get("largest_expert_rows", 0.0) for r in results)
    logits = tuple(r.parts["largest_attention_logit"] for r in results if "largest_attention_logit" in r.parts)
    clipped = sum(r.parts.get("clipped_heads", 0.0) for r in results)
    tasks = task_results(run, engine) if first == 1 and not run.config.fp8.enabled else ((), ())
    return Curve(losses, norms, [r.skipped for r in results], nats, gradients, balance, rows, logits, clipped, *tasks)


def task_results(run: ResolvedRun, engine: Any) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Results of tasks of random tokens: -log p of requests of several lengths, continuations of prompts of one length.

    Some ranks have no request in the last forward pass.
    """
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 9, 16, 17, 18, 26, 32, 33, 33)
    ranked = [torch.randint(VOCABULARY, (length,), generator=generator).numpy() for length in lengths]
    prompts = [torch.randint(VOCABULARY, (12,), generator=generator).numpy() for _ in range(3)]
    targets = np.array([1 + length % 2 for length in map(len, ranked)])
    questions = (RankedQuestion((("", " "),), 0),), (GeneratedQuestion(" ", (" ",)),)
    section = TaskSection(name="synthetic", new_tokens=4)
    rank = 0 if run.alone else dist.get_rank()
    tasks = TaskEvaluation(run, (), engine, rank, engine._device)
    nats = tasks.nats(EncodedTask(section, questions[0], tuple(ranked), targets, 0, None))
    half, continues = run.config.bf16.enabled or run.config.fp16.enabled, run.topology.pp * run.topology.cp == 1
    continues = continues and run.config.model.config["model_type"] not in WITHOUT_CACHE
    if half or not continues:  # in half precision a likeliest token is sometimes another one's equal
        return tuple(nats), ()
    task = EncodedTask(section, questions[1], tuple(prompts), np.zeros(3, dtype=np.int64), 0, None)
    return tuple(nats), tuple(tasks.continued(task).flatten().tolist())


def first_states(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Name -> first optimizer state, as a full tensor with zeros for other ranks' shards.

    Of AdamW with beta1 0 it is the gradient. Of an optimizer without states it is the weight.
    """
    state, prefix = engine.state(), f"{[*engine._kind.states, 'weight'][0]}/"
    for key, shard in state.items():
        if key.startswith(prefix):
            full = torch.zeros(shard.shape)
            for offsets, part in shard.parts.items():
                full[tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))] = part
            yield key.removeprefix(prefix), full


def compare(run: ResolvedRun, expected: Curve, saved: Path, own: Path) -> dict[str, Any]:
    """Relative differences of a layout from the reference, the largest over steps, names and ranks; and its losses."""
    steps = len(expected.losses)
    torch._dynamo.reset()
    counters["stats"].clear()
    found = train(run, make_engine(run), first=1, last=steps, save=own)
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    resumed = make_engine(run)
    resumed.load(saved)
    resumed_curve = train(run, resumed, first=SAVED + 1, last=LAST)
    assert found.skipped == expected.skipped, (found.skipped, expected.skipped)
    return {
        "gradient": max(
            gradient_difference(found.gradients.get(name), full) for name, full in expected.gradients.items()
        ),
        "loss": largest_difference_over_ranks(found.losses, expected.losses),
        "norm": largest_difference_over_ranks(found.norms, expected.norms),
        "balance": largest_difference_over_ranks(found.balance, expected.balance),
        "logits": largest_difference_over_ranks([*found.logits], [*expected.logits]),
        "evaluation": largest_difference_over_ranks([found.nats], [expected.nats]),
        "resumed": largest_difference_over_ranks(resumed_curve.losses, expected.losses[SAVED:LAST]),
        "requests": requests_difference(found.requests, expected.requests),
        "continued": float(found.continued != expected.continued) if found.continued else 0.0,
        "skipped": sum(found.skipped),
        "share": weight_share(resumed, expected),
        "losses": found.losses,
        "graphs": graphs,
        "rows": found.rows,
        "clipped": found.clipped,
    }


def weight_share(engine: Any, expected: Curve) -> float:
    """This rank's share of the weights; NaN for DeepSpeed's engine."""
    if not hasattr(engine, "_shards"):
        return float("nan")
    return float(sum(s.master.numel() for s in engine._shards) / sum(g.numel() for g in expected.gradients.values()))


def gradient_difference(parts: Tensor | None, full: Tensor, *, least: float = 1e-30) -> float:
    """Combines a tensor's shards over the ranks; returns its difference from the full one, relative to the norm.

    A norm below `least` counts as that.
    """
    parts = torch.zeros_like(full) if parts is None else parts
    copies = (parts != 0).float()
    for tensor in (parts, copies):
        dist.all_reduce(tensor)
    return float((parts / copies.clamp(min=1) - full).norm() / full.norm().clamp(min=least))


def requests_difference(found: tuple[float, ...], expected: tuple[float, ...]) -> float:
    """Largest difference of a request over all ranks, relative to the mean."""
    pairs = zip(found, expected, strict=True)
    worst = max((abs(f - e) for f, e in pairs), default=0.0) / (sum(expected) / len(expected) if expected else 1.0)
    return largest_difference_over_ranks([1.0 + worst], [1.0])


def largest_difference_over_ranks(found: list[float], expected: list[float]) -> float:
    """Largest relative difference over all ranks; skipped steps have no finite norm and are left out."""
    worst = torch.tensor(largest_difference(found, expected), dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def largest_difference(found: list[float], expected: list[float]) -> float:
    pairs = [(f, e) for f, e in zip(found, expected, strict=True) if torch.tensor([f, e]).isfinite().all()]
    return max((abs(f - e) / abs(e) for f, e in pairs), default=0.0)


def main() -> None:
    """Runs all cases and compares them with the saved references; rank 0 adds each result to results.jsonl."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    work = Path(sys.argv[2])
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        print(name, flush=True)  # the last one is the layout that fails or hangs
        saved = work / reference_directory(case)
        expected = torch.load(saved / "curve.pt", weights_only=False)
        layout = {key: value for key, value in case.items() if key != "steps"}
        run = resolved(layout, processes=dist.get_world_size())
        result = compare(run, expected, saved, work / layout_directory(name))
        if dist.get_rank() == 0:
            with (work / "results.jsonl").open("a") as results:
                results.write(json.dumps({name: result}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
