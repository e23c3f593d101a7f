"""One of two ranks that train a family's tiny model in the columns of the sweep, and compare it with one process.

layout_rank.py CASES.json DIRECTORY. The ranks divide the checks and references, and then run the layouts together. Each
appends its outcomes to outcomes-RANK.jsonl. One that takes too long prints its stack and exits.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import zlib
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.topology import sequence_chunks
from pipeline.data.documents import DocumentBoundaries
from pipeline.data.micro_batch import IGNORE, MicroBatch, StepBatch, make_batch
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.models.attention import attention_of
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import one_line, resolve_hf_config
from tests.engines.comparison import FP32
from tests.engines.layout_cells import Keys
from tests.engines.layout_worker import (
    LENGTH,
    VOCABULARY,
    first_states,
    gradient_difference,
    largest_difference_over_ranks,
    make_engine,
    reference_case,
    resolved,
)

STEPS, SAMPLES = 3, 4
NORM, NEGLIGIBLE = 1e-4, 1e-3
"""Published tolerance of the gradient norm, and here of each tensor's gradient: some are small sums of large terms.
Share of the average gradient below which a tensor's is but rounding."""
STARTED, ENDED = "started", "ended"
AT = ((11, 27), (5,), (16, 22), (9, 19))
"""Positions at which documents of each sample begin: within, at and across the chunks of recurrent layers."""
USED = (33, 29, 33, 25)
"""Tokens of each packed sample that are not padding."""


@dataclass(frozen=True)
class Trained:
    """Losses and gradient norms of the steps, and the gradients of the first step by name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]


def step_batch(run: ResolvedRun, step: int, data: Keys) -> StepBatch:
    """This rank's part of a step of data with document masks or packing; one process has every document by itself."""
    tokens = torch.randint(0, 5, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step)).cumsum(1)
    rows, size, found = (tokens % VOCABULARY).numpy(), run.batch.micro, []
    where = run.topology.coordinates(0 if run.alone else dist.get_rank())
    numbers = np.repeat(np.arange(SAMPLES), [len(each) for each in AT])
    starts, used = np.array([at for each in AT for at in each]), np.array(USED) if "packing" in data else None
    boundaries = DocumentBoundaries(numbers, starts, used) if "mask_documents" in data else None
    chunks = sequence_chunks(LENGTH, cp=run.topology.cp, cp_rank=where["cp"], zigzag=run.zigzag)
    for number in range(run.batch.accumulation):
        own = np.arange(size) + (number * run.batch.dp + where["dp"]) * size
        some = None if boundaries is None else boundaries.of(own)
        batch = make_batch(rows[own], some, chunks=chunks)
        found += [batch] if not (run.alone and batch.documents is not None) else documents_of(batch)
    whole = make_batch(rows, boundaries)
    return StepBatch(step, found, int((whole.labels != IGNORE).sum()))


def documents_of(batch: MicroBatch) -> list[MicroBatch]:
    """Every document of a batch alone; padding is left out."""
    assert batch.documents is not None
    rows = zip(batch.input_ids, batch.labels, batch.documents, strict=True)
    every = ((ids, labels, documents == each) for ids, labels, documents in rows for each in documents.unique())
    return [
        MicroBatch(ids[own][None], labels[own][None]) for ids, labels, own in every if (labels[own] != IGNORE).any()
    ]


def trained(run: ResolvedRun, data: Keys) -> Trained:
    engine, gradients, results = make_engine(run), {}, []
    for step in range(1, STEPS + 1):
        results.append(engine.train_step(step_batch(run, step, data), lr=run.config.optimizer.params.lr / 10 * step))
        if step == 1:
            gradients = {name: state.clone() for name, state in first_states(engine)}
    return Trained([each.loss for each in results], [each.grad_norm for each in results], gradients)


def difference(found: Trained, expected: Trained) -> str:
    """The first quantity that differs by more than its published tolerance, with the difference; "" if none does."""
    squares = sum(float(each.double().square().sum()) for each in expected.gradients.values())
    average = (squares / sum(each.numel() for each in expected.gradients.values())) ** 0.5
    worst = max(
        (gradient_difference(found.gradients.get(name), full, least=NEGLIGIBLE * average * full.numel() ** 0.5), name)
        for name, full in expected.gradients.items()
    )
    for what, value, tolerance in (
        ("loss", largest_difference_over_ranks(found.losses, expected.losses), FP32),
        ("gradient norm", largest_difference_over_ranks(found.norms, expected.norms), NORM),
        (f"gradient of {worst[1]}", worst[0], NORM),
    ):
        if not value <= tolerance:
            return f"differs: {what} by {value:.1e}"
    return ""


def refusal(case: Keys) -> str:
    """Why `headrace check` refuses a layout; "" if it does not."""
    try:
        run = resolved(case, processes=2)
        hf = resolve_hf_config(run.config.model, tokenizer={"vocab_size": VOCABULARY}, sequence_length=LENGTH)
        model = build_meta(hf, dtype=model_dtype(run.config), attn_implementation=attention_of(run))
        check_layout(run, model)
    except ConfigError as error:
        return f"{error.field}: {error.why} (try: {error.remedy})"
    return ""


def checked(case: Keys) -> tuple[str, str]:
    """The attention with which a layout is accepted, and "refused" with its reason if none is."""
    why = refusal(case)
    if not why or "eager" not in why:
        return "sdpa", why and f"refused: {why}"
    again = refusal({**case, "attn_implementation": "eager"})
    return "eager", again and f"refused: {why}"


def reference_name(case: Keys) -> str:
    """Name of the file of a case's reference."""
    shared = json.dumps([reference_case(case) | {"attn_implementation": "eager"}, case.get("data")], sort_keys=True)
    return f"{zlib.crc32(shared.encode())}.pt"


def save_reference(case: Keys, file: Path) -> None:
    """Trains a case in one process with transformers' own eager attention."""
    alone = {**reference_case(case), "attn_implementation": "eager", "train_batch_size": SAMPLES}
    alone.pop("data", None)  # every document is a sample by itself
    torch.save(trained(resolved(alone, processes=1), case.get("data", {})), file)


def compared(case: Keys, expected: Trained) -> str:
    """Trains a layout on both ranks, and returns "equal", with the attention, or what differs from one process."""
    found = trained(resolved(case, processes=2), case.get("data", {}))
    return difference(found, expected) or f"equal, {case['attn_implementation']}"


class Outcomes:
    """Appends a rank's outcomes to its file; an exception is an outcome."""

    def __init__(self, file: Path, *, seconds: int) -> None:
        self._file, self._seconds = file, seconds

    def add(self, column: str, outcome: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([column, outcome]) + "\n")

    def of(self, column: str, function: Any) -> Any:
        """A function's result, or "failed" with its exception; the process is killed where it takes too long."""
        self.add(column, STARTED)
        faulthandler.dump_traceback_later(self._seconds, exit=True)
        try:
            return function()
        except Exception as error:  # every architecture fails in its own way
            return f"failed: {type(error).__name__}: {one_line(error)}"
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.add(column, ENDED)


def prepared(cases: dict[str, Keys], work: Path, outcomes: Outcomes, *, rank: int) -> None:
    """Checks this rank's half of the cases and saves their references, before there is a group that they would use."""
    accepted, names = {}, [reference_name(case) for case in cases.values()]
    share = [*dict.fromkeys(names)][rank::2]
    for column in (column for column, name in zip(cases, names, strict=True) if name in share):
        result = outcomes.of(column, partial(checked, cases[column]))
        attention, why = ("", result) if isinstance(result, str) else result
        if why:
            outcomes.add(column, why)
            continue
        accepted[column] = {**cases[column], "attn_implementation": attention}
        file = work / reference_name(cases[column])
        if not file.exists() and (failed := outcomes.of(column, partial(save_reference, cases[column], file))):
            outcomes.add(column, f"{failed} (one process)")
            del accepted[column]
    (work / f"accepted-{rank}.json").write_text(json.dumps(accepted))


def main() -> None:
    """Checks, references, and layouts of the columns in the file of cases."""
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    cases, work, rank = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(os.environ["RANK"])
    outcomes = Outcomes(work / f"outcomes-{rank}.jsonl", seconds=cases.pop("seconds"))
    prepared(cases, work, outcomes, rank=rank)
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    dist.barrier()
    accepted = [json.loads((work / f"accepted-{each}.json").read_text()) for each in range(2)]
    for column, case in (accepted[0] | accepted[1]).items():
        expected = torch.load(work / reference_name(case), weights_only=False)
        outcome = outcomes.of(column, partial(compared, case, expected))
        outcomes.add(column, outcome)
        if outcome.startswith("failed: "):
            sys.exit(1)  # the other rank may wait for this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
