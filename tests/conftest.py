"""A real tokens directory and a tiny training config, for every test that trains."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import warm, warm_python
from tests.budget import CpuSeconds, budget_of
from tests.support import output_of

ROOT = warm.ROOT

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("WANDB_API_KEY", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of commands are started: each would compile all modules anew
sys.dont_write_bytecode = False  # nor are the assertions of all tests rewritten anew in every session, by every worker
settings.register_profile("busy machine", deadline=None)  # an example may take a second there, and 200 ms is the limit
settings.load_profile("busy machine")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under a script's "&": Ctrl-C would reach no child
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Limits the size of every file this process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of the standard library's json and email packages, by a byte-level BPE of 512 ids."""
    return make_tokens(tmp_path_factory.mktemp("tokens"), text_folders())


@pytest.fixture(scope="session", autouse=True)
def trials_run() -> Iterator[None]:
    """Trials of layouts run in this process, whose code tests break on purpose; commands may read an earlier result."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipeline.engines.parallel.trial_cache.trials_folder", lambda: Path(os.devnull) / "none")
        yield


@pytest.fixture(scope="session")
def llama_cpp() -> None:
    """Skips a test where llama.cpp's library is missing."""
    if find_spec("xllamacpp") is None:
        pytest.skip("needs llama.cpp's library (pip install xllamacpp)")


def text_folders() -> list[Path]:
    """Text that every machine has."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    return [stdlib / "json", stdlib / "email"]


def make_tokens(work: Path, folders: list[Path], **fields: Any) -> Path:
    """Runs data prep over folders of source text; keyword arguments replace fields of its config."""
    config = {
        "output": str(work / "tokens"),
        "sources": [{"type": "text", "path": str(folder)} for folder in folders],
        "tokenizer": {"train": "bpe", "vocab_size": 512},
        "heldout_fraction": 0.15,
        "seed": 3,
        **fields,
    }
    path = work / "corpus.json"
    path.write_text(json.dumps(config))
    warm.run("-m", "data_prep", "--config", path, imported="data_prep").check_returncode()
    return work / "tokens"


def tiny_config(tokens: Path, run_dir: Path, **fields: Any) -> dict[str, Any]:
    """A run of a 100k-parameter llama in fp32 that takes seconds; keyword arguments replace top-level keys."""
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            }
        },
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": 32},
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 3, "decay_num_steps": 5}},
        "gradient_clipping": 1.0,
        "run": {"dir": str(run_dir), "steps": 20, "seed": 7, "checkpoint_every": 5},
        "evaluation": {"samples": 16},
        **fields,
    }


def write_config(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


def losses(run_dir: Path, *, written: bool = True) -> dict[int, float]:
    """Step -> loss, from a run's journal; a journal that is not `written` to its end may have a torn last line."""
    text = (run_dir / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in (text if written else text.rpartition("\n")[0]).splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def launch(script: str, config: Path, *sets: str, processes: int = 1, timeout: float = 300) -> str:
    """Runs an entry point to its end on so many ranks and returns what it said; fails where it does."""
    return output_of(start(script, config, *sets, processes=processes, timeout=timeout))


def start(
    script: str, config: Path, *sets: str, processes: int = 1, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """As `launch`, without looking at the exit code; stdout and stderr come as one text."""
    words = entry_point(script, config, *sets)
    done = warm.run(*words, cwd=config.parent, processes=processes, merged=True, timeout_s=timeout)
    return subprocess.CompletedProcess(words, done.returncode, done.stdout)


def entry_point(script: str, config: Path, *sets: str) -> list[str]:
    """An entry point and its arguments, as they follow `python` or a launcher."""
    overrides = [word for text in sets for word in ("--set", text)]
    return [str(ROOT / "pipeline" / script), "--config", str(config), *overrides]


def command_line(script: str, config: Path, *sets: str, processes: int) -> list[str]:
    """The command that starts an entry point on so many processes of this machine."""
    return _command_line(sys.executable, script, config, *sets, processes=processes)


def warm_command(script: str, config: Path, *sets: str, processes: int) -> list[str]:
    """As `command_line`, by the warm Python."""
    return _command_line(warm_python.python(), script, config, *sets, processes=processes)


def _command_line(python: str, script: str, config: Path, *sets: str, processes: int) -> list[str]:
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    starter = torchrun if processes > 1 else [python]
    return [*starter, *entry_point(script, config, *sets)]


def selected(session: pytest.Session, test: Any, parameter: str) -> list[str]:
    """The values of a parametrized test that this session runs, so that a fixture need not make the others."""
    items = [item for item in session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return [
        item.callspec.params[parameter]
        for item in items
        if item.originalname == test.__name__
        and item.path == Path(test.__code__.co_filename)
        and item.get_closest_marker("skip") is None
    ]


_LONGEST_FIRST = (
    "engines/test_layouts.py",
    "parity/test_matrix.py",
    "benchmarks/test_gpu_check.py",
    "recipe/test_recipe.py",
    "docs/test_tutorials.py",
    "run/test_elastic.py",
    "tests/test_slurm.py",
    "islands/test_islands.py",
    "elastic/test_agents.py",
    "consumers/test_gate.py",
    "consumers/test_cells.py",
    "k8s/test_pods.py",
    "cluster/test_node_loss.py",
    "distillation/test_on_policy_layouts.py",
    "pruning/test_prune.py",
    "proof/test_prove.py",
    "run/test_kill_resume.py",
    "parity/test_shipped.py",
    "importing/test_import.py",
    # these wait for most of their time
    "faults/test_lost_runs.py",
    "faults/test_campaign.py",
    "virtual_cluster/test_submit.py",
)
"""Files that take minutes, by the CPU time of `make test TESTS='not sweep'`, measured on 2026-11-25 and 28."""
_INTEGRATION = (
    # heavy services: Slurm, Ray, Spark, S3, GCS, the real launchers
    "tests/test_slurm.py",
    "cluster/test_cluster.py",
    "executors/test_ray.py",
    "executors/test_spark.py",
    "sources/test_remote.py",
    "launch/test_launchers.py",
    # many starts, kills and restarts of whole runs and jobs
    "run/test_elastic.py",
    "run/test_kill_resume.py",
    "faults/test_lost_runs.py",
    "faults/test_campaign.py",
    "data_prep/test_dedup_job.py",
    "tasks/test_merge.py",
    "distillation/test_distillation.py",
    # half a minute of CPU: steps of several layouts
    "run/anomalies/test_deferred_steps.py",
)
"""Files whose tests are `make test-integration`'s; single tests elsewhere carry the marker `integration` themselves."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds(budget_of(config)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks integration tests; puts files that take minutes first, or one worker would run them alone at the end."""
    for item in items:
        if item.path.as_posix().endswith(_INTEGRATION):
            item.add_marker(pytest.mark.integration)
    items.sort(key=lambda item: _place(item.path.as_posix()))


def _place(path: str) -> int:
    return next((n for n, end in enumerate(_LONGEST_FIRST) if path.endswith(end)), len(_LONGEST_FIRST))
