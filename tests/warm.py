"""Fork servers for tests: start ranks and commands quickly by forking a process that has imported their modules.

Imports take a rank 5 CPU seconds and torchrun 3 more, and a data-prep job 2 with those of its workers; the tests start
hundreds of ranks and jobs. A forked process has its own environment, arguments, output and exit code, and runs its
script from the first line. Tests of starting, signals, kills, resource limits and imports start real processes;
launchers themselves are tested in `launch/test_launchers.py`, `run/test_kill_resume.py`, `test_slurm.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    "pipeline.run.session",
    "pipeline.compress.quantization.run",
    "pipeline.compress.pruning.run",
    "pipeline.evaluation.heldout.command",
    "pipeline.own_loop.torch_engine",
    "pipeline.own_loop.deepspeed_engine",
    "pipeline.plan.proof.command",
)
"""In addition to the modules that `pipeline.run.preload` imports."""
DATA_PREP = (
    "data_prep.executors.choose",
    "data_prep.job.estimate",
    "data_prep.job.phases",
    "data_prep.job.prepare",
    "data_prep.job.stats",
    "data_prep.job.status",
    "data_prep.packing.pack",
    "data_prep.sources.parquet",
    "data_prep.tasks.map",
    "data_prep.tasks.reduce",
    "data_prep.tasks.tokenizer_sample",
    "data_prep.tokenizer.existing",
)
"""The modules that the commands of data prep import, without torch."""
EXIT_S, TERMINATE_S = 5.0, 5.0
"""Seconds that the other ranks have to exit after one has failed, by themselves and after SIGTERM: rank 0 may be about
to print the whole message."""


def run(
    *command: object,
    cwd: Path = ROOT,
    processes: int = 1,
    merged: bool = False,
    timeout_s: float = 300.0,
    imported: Literal["training", "data_prep"] = "training",
) -> subprocess.CompletedProcess[str]:
    """Runs `SCRIPT ARGUMENTS`, `-m MODULE ARGUMENTS` or `-c CODE ARGUMENTS` as python would, on `processes` ranks.

    Args:
        command: the arguments of `python`.
        cwd: working directory.
        processes: number of ranks; several ranks get a launcher's variables.
        merged: all output of all ranks is stdout; otherwise stdout is rank 0's, and all other output is stderr.
        timeout_s: seconds until all are killed.
        imported: the modules that are imported before the fork. All data-prep jobs share one fork server of workers:
            what a worker writes to stderr itself is not in the result.

    Raises:
        TimeoutExpired: they were killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "stdout"), Path(folder, "stdout" if merged else "stderr")]
        for file in files:
            file.touch()
        job = {
            "command": [str(word) for word in command],
            "cwd": str(cwd),
            "env": dict(os.environ),
            "processes": processes,
            "files": [str(file) for file in files],
            "timeout_s": timeout_s,
        }
        server = _server(imported)
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline() or '"the server is gone"')
        stdout, stderr = (file.read_text(errors="replace") for file in files)
    if not isinstance(answer, int):
        raise subprocess.TimeoutExpired(job["command"], timeout_s, output=f"{answer}\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(job["command"], answer, stdout=stdout, stderr="" if merged else stderr)


@cache
def _server(imported: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", "tests.warm", imported], subprocess.PIPE
    # after the usual CUDA check a process cannot be forked any more
    env = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env)
    atexit.register(server.kill)
    return server


@dataclass
class Job:
    """A running command.

    Attributes:
        running: rank -> process id of those that still run.
        deadline: when they are killed, on the monotonic clock.
    """

    running: dict[int, int]
    deadline: float

    def wait(self) -> int | str:
        """The exit code of the rank that failed first, or 0; a message after a timeout."""
        while self.running:
            for rank, child in list(self.running.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    del self.running[rank]
                    if code := os.waitstatus_to_exitcode(status):
                        self._end()
                        return code
            if time.monotonic() > self.deadline:
                late = sorted(self.running)
                self._end()
                return f"ranks {late} were still running"
            time.sleep(0.01)
        return 0

    def _end(self) -> None:
        for number, timeout_s in ((0, EXIT_S), (signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, 60.0)):
            for child in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, number)
            deadline = time.monotonic() + timeout_s
            while self.running and time.monotonic() < deadline:
                ended = {rank for rank, child in self.running.items() if os.waitpid(child, os.WNOHANG)[0]}
                self.running = {rank: child for rank, child in self.running.items() if rank not in ended}
                time.sleep(0.01)


def _start(job: dict[str, Any]) -> Job:
    ranks, shared = {}, {}
    if job["processes"] > 1:
        from pipeline.runtime.launch.group import free_port  # noqa: PLC0415

        shared = {"WORLD_SIZE": job["processes"], "LOCAL_WORLD_SIZE": job["processes"]}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for rank in range(job["processes"]):
        launcher = {"RANK": rank, "LOCAL_RANK": rank, **shared} if shared else {}
        more = {name: str(value) for name, value in launcher.items()}
        child = os.fork()
        if not child:
            stdout, stderr = job["files"]
            _become(job["command"], job["cwd"], [stdout if rank == 0 else stderr, stderr], {**job["env"], **more})
        ranks[rank] = child
    return Job(ranks, time.monotonic() + job["timeout_s"])


def _become(command: Sequence[str], cwd: str, files: Sequence[str], env: Mapping[str, str]) -> None:
    """Runs a command in this process as if python had been started for it; does not return."""
    code = 1
    try:
        for stream, path in enumerate((os.devnull, *files)):
            opened = os.open(path, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_APPEND)
            os.dup2(opened, stream)
            os.close(opened)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        option = command[0] if command[0] in ("-m", "-c") else ""
        target, *arguments = command[1:] if option else command
        sys.argv = [target if option != "-c" else "-c", *arguments]
        sys.path[0] = cwd if option else str(Path(target).resolve().parent)
        if option == "-m":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        elif option == "-c":
            exec(compile(target, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(target, run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _import_for_training() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    from pipeline.run.preload import preload  # noqa: PLC0415

    preload(["pipeline.plan.proof.rank"], ("torch", "deepspeed"), ("llama", "qwen3_moe"))


def _import_for_data_prep() -> None:
    """Imports, and starts the fork server of workers, which would take half of a job's CPU time.

    Forked processes share it. It is not their child, so they cannot check that it is alive.
    """
    for name in DATA_PREP:
        importlib.import_module(name)
    from multiprocessing import forkserver  # noqa: PLC0415

    from data_prep.executors.local import start_fork_server  # noqa: PLC0415

    start_fork_server()
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None


def main() -> None:
    """Serves until its input ends."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imports must not mix with the replies
    _import_for_data_prep() if sys.argv[1] == "data_prep" else _import_for_training()
    for line in sys.stdin:
        print(json.dumps(_start(json.loads(line)).wait()), file=reply, flush=True)


if __name__ == "__main__":
    main()
