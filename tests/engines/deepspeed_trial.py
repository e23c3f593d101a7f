"""Runs layouts of the DeepSpeed engine beside the one-process reference and tells how far apart they are.

Started by torchrun: deepspeed_trial.py CASES.json RESULTS.json; see `torch_trial`, whose cases and batches these are.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline.config.rules import ResolvedRun
from pipeline.engines.build import build_engine
from pipeline.engines.common import model_dtype
from pipeline.engines.objective import CrossEntropy
from pipeline.models.attention import NAME
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.meta import build_meta
from pipeline.models.values import InitByName, ParameterValues
from tests.engines import torch_trial
from tests.engines.torch_trial import LENGTH, SAME, SAVED, VOCABULARY, apart, follow, held_apart, resolved


def make(run: ResolvedRun) -> Any:
    """A DeepSpeed engine of the run, whose values are let go one by one where parameters are cut up."""
    hf = resolve_hf_config(run.config.model, tokenizer={"vocab_size": VOCABULARY}, sequence_length=LENGTH)
    model = build_meta(hf, dtype=model_dtype(run.config), attn_implementation=NAME)
    plain = InitByName(model, seed=3)
    values = LetGo(plain) if run.config.zero_optimization.stage == 3 else plain
    objective = CrossEntropy(z_loss=run.config.loss.z_loss)
    return build_engine(run, model, values, objective, device=torch.device("cpu"))


class LetGo:
    """Values of parameters that must be let go. One may live on for a moment, in a message that is under way."""

    def __init__(self, values: ParameterValues) -> None:
        self._values, self._given = values, list[StorageWeakRef]()

    def value(self, name: str) -> Tensor:
        """The full value."""
        held = sum(not given.expired() for given in self._given)
        assert held <= 1, f"{held} parameters before {name} are still held whole"
        value = self._values.value(name)
        self._given.append(StorageWeakRef(value.untyped_storage()))
        return value


def compare(case: dict[str, Any], work: Path) -> dict[str, float]:
    """Relative differences of a layout from the reference, the largest over steps, names and ranks."""
    steps = case.pop("steps", 4)
    kept = {key: case[key] for key in (*SAME, "train_micro_batch_size_per_gpu") if key in case}
    shared = json.dumps(kept, sort_keys=True)
    saved = work / f"reference-{zlib.crc32(shared.encode())}"
    expected = torch_trial.reference(shared, steps=steps, directory=saved)
    run = resolved({"engine": "deepspeed", **case}, processes=dist.get_world_size())
    plain = resolved(json.loads(shared), processes=1)
    found = follow(run, make(run), first=1, last=steps, save=work / "own")
    resumed, back = make(run), torch_trial.make(plain)
    resumed.load(saved)
    back.load(work / "own")
    there, here = (follow(r, e, first=SAVED + 1, last=4) for r, e in ((run, resumed), (plain, back)))
    assert found.skipped == expected.skipped, (found.skipped, expected.skipped)
    return {
        "gradient": max(held_apart(found.gradients.get(name), full) for name, full in expected.gradients.items()),
        "loss": apart(found.losses, expected.losses),
        "norm": apart(found.norms, expected.norms),
        "evaluation": apart([found.nats], [expected.nats]),
        "resumed": apart(there.losses, expected.losses[SAVED:4]),
        "resumed by the reference": apart(here.losses, found.losses[SAVED:4]),
        "skipped": sum(found.skipped),
    }


def main() -> None:
    """Runs all cases; rank 0 writes what it found."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    import deepspeed  # noqa: F401, PLC0415  it sets its logger's level when it is imported

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    results = {}
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        try:
            results[name] = compare(case, Path(where[0]))
        except Exception as error:
            error.add_note(f"in the layout: {name}")
            raise
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
