"""The Python API: prepare a corpus, train a model, load it. `headrace` re-exports it:

    import headrace

    tokens = headrace.prepare_corpus("corpus.json")
    run = headrace.train("run.json", nproc=8, data={"sources": [{"path": str(tokens)}]}, run={"steps": 1000})
    model, tokenizer = headrace.load(run.dir)
    ids = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=20)

The work runs in separate processes: a script needs no `if __name__ == "__main__"`, and a notebook keeps its memory. The
processes' output appears on `sys.stdout` and `sys.stderr`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from foundation import configfile
from foundation.errors import ConfigError, DataError, HeadraceError, TrainingError
from foundation.paths import is_store_url, refuse_url
from foundation.remote_run import local_run
from foundation.user_function import spelled

if TYPE_CHECKING:
    from pipeline.cluster.status.run import RunStatus

_TAIL_LINES = 100
"""Number of last lines of a failed process's stderr in which its error is searched."""


def prepare_corpus(
    config: str | Path | Mapping[str, Any], *, workers: int | None = None, executor: str = "local", **overrides: Any
) -> Path:
    """Turns a corpus into a tokens directory, as `headrace prep` does; resumes a job that was stopped.

    Args:
        config: a config file, or its content.
        workers: number of tasks at once; None for the cores that this process may use.
        executor: local, ray or spark.
        overrides: top-level keys of the config; objects are merged key by key. A dotted key sets one field:
            `**{"tokenizer.vocab_size": 8192}`.

    Returns:
        The tokens directory. If it exists and was made by the same job, nothing is done.

    Raises:
        ConfigError: the config file cannot be read.
        DataError: the job was refused or has failed; the message has the reason and the remedy.
    """
    raw = _merged(config, overrides)
    options = ["--executor", executor, *([] if workers is None else ["--workers", str(workers)])]
    _run("data_prep", raw, options, error=DataError)
    return Path(raw["output"])


def train(config: str | Path | Mapping[str, Any], *, nproc: int = 1, **overrides: Any) -> RunStatus:
    """Trains a model, as `headrace train` does, or distils one if the config has the section `distill`.

    A run that was stopped resumes from its newest checkpoint; a finished run is not repeated.

    Args:
        config: a config file, or its content.
        nproc: processes on this machine, one per GPU.
        overrides: top-level keys of the config; objects are merged key by key. A dotted key sets one field:
            `**{"run.steps": 100}`.

    Returns:
        The state of the run: its directory, step, loss, newest checkpoint.

    Raises:
        ConfigError: the config file cannot be read, or an override is no JSON value, such as a function.
        TrainingError: the run was refused, has failed, or was asked to stop; the message has the reason and the remedy.
    """
    from pipeline.cluster.status.run import read_status  # noqa: PLC0415

    raw = _merged(config, overrides)
    module = "pipeline.distill" if raw.get("distill") else "pipeline.train"
    _run(module, raw, ["--nproc", str(nproc)], error=TrainingError)
    return read_status(local_run(raw["run"]["dir"]))


def load(path: str | Path, *, device: str | None = None) -> tuple[Any, Any]:
    """Loads a trained model with its tokenizer.

    Args:
        path: a Hugging Face model folder (quantized or not), a run's directory, or one of its checkpoints; a run's
            newest complete checkpoint is loaded.
        device: device for the model; None for the first GPU, or the CPU if there is none.

    Returns:
        (model, tokenizer) of transformers; the model is in evaluation mode and has `generate`.

    Raises:
        ConfigError: the path is a URL.
        CheckpointError: the run has no readable checkpoint.
        DataError: there is no model, or the model has no tokenizer.
    """
    if is_store_url(str(path)):
        path = local_run(str(path))
    refuse_url(path, field="path")
    path = Path(path)
    if (path / "config.json").is_file():
        return _load_folder(path, device)
    from pipeline.checkpoint.export.export import export  # noqa: PLC0415
    from pipeline.checkpoint.export.find import find_checkpoint  # noqa: PLC0415

    if not path.is_dir():
        raise DataError(f"{path}: no such directory\n  try: a model folder, a run's directory or a checkpoint")
    with tempfile.TemporaryDirectory(prefix="headrace-load-") as work:
        export(find_checkpoint(path), Path(work) / "model")
        return _load_folder(Path(work) / "model", device)


def _load_folder(path: Path, device: str | None) -> tuple[Any, Any]:
    from pipeline.models.folder.loading import load_model, pick_device  # noqa: PLC0415
    from pipeline.models.tokenizer_files import load_tokenizer  # noqa: PLC0415

    if not (path / "tokenizer_config.json").is_file():
        raise DataError(f"{path} has no tokenizer_config.json\n  try: export the model again, with its tokenizer")
    return load_model(path, device=device or pick_device()), load_tokenizer(path)


def _merged(config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    raw = configfile.load(config) if isinstance(config, str | Path) else _plain(config)
    for key, value in _plain(overrides).items():
        if "." in key:
            configfile.set_value(raw, key, value)
        else:
            raw = configfile.merge(raw, {key: value})
    return raw


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a config; paths become strings.

    Raises:
        ConfigError: it has a function, or another object that no config file can hold.
    """

    def convert(value: object) -> object:
        if isinstance(value, Path):
            return str(value)
        key = next((name for name, each in _leaves(given) if each is value), "config")
        if callable(value):
            name = spelled(value) or f"my_parts:{getattr(value, '__name__', 'loss')}".replace("<lambda>", "loss")
            text = json.dumps({"function": name} if key == "loss" else name)  # the section `loss` has other keys, too
            remedy = f"write {text}" if spelled(value) else f"move it into a file, e.g. my_parts.py, and write {text}"
            why = "ranks are other processes, which import a function by its module and name"
            raise ConfigError(key, value, why=why, remedy=remedy)
        why = f"an object of type {type(value).__name__} cannot be written as JSON"
        raise ConfigError(key, value, why=why, remedy="give a number, a string, true, false, null, a list or an object")

    copied: dict[str, Any] = json.loads(json.dumps(given, default=convert))
    return copied


def _leaves(given: object, at: str = "") -> Iterator[tuple[str, object]]:
    """Yields the dotted key and the value of everything in a config."""
    items = given.items() if isinstance(given, Mapping) else enumerate(given) if isinstance(given, list | tuple) else ()
    for key, value in items:
        path = f"{at}.{key}" if at else str(key)
        yield path, value
        yield from _leaves(value, path)


def _run(module: str, raw: dict[str, Any], options: Sequence[str], *, error: type[HeadraceError]) -> None:
    """Runs an entry point on a config until it ends.

    Raises:
        HeadraceError: the process failed; an instance of the given class with its message and exit code.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as work:
        path = Path(work) / "config.json"
        path.write_text(json.dumps(raw))
        command = [sys.executable, "-m", module, "--config", str(path), *options]
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            threads = [
                _forward(process.stdout, sys.stdout, deque(maxlen=0)),
                _forward(process.stderr, sys.stderr, tail),
            ]
            try:
                code = process.wait()
            except KeyboardInterrupt:  # the process has received it, too, and saves its work before it ends
                process.wait()
                raise
            finally:
                for thread in threads:
                    thread.join()
    if code:
        failed = error(_message(list(tail)) or f"{module} ended with exit code {code}")
        failed.exit_code = code
        raise failed


def _forward(source: IO[str], target: TextIO, kept: deque[str]) -> threading.Thread:
    """Copies lines as they arrive: a notebook shows writes to `sys.stdout`, but not a child process's output."""

    def copy() -> None:
        for line in source:
            kept.append(line.rstrip("\n"))
            target.write(line)
            target.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _message(lines: Sequence[str]) -> str:
    """The last error message in a process's output, without its prefix."""
    starts = [number for number, line in enumerate(lines) if line.startswith("error")]
    return "\n".join(lines[starts[-1] :]).removeprefix("error: ") if starts else "\n".join(lines[-3:])
