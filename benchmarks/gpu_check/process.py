"""Processes with a time limit, and the packages that they can import. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_IMPORTED_AS = {"PyYAML": "yaml", "protobuf": "google.protobuf"}
_NEEDED_FOR = {
    "torch": "everything",
    "deepspeed": "rows and tests of engine deepspeed",
    "accelerate": "rows of the Hugging Face Trainer",
    "pytest": "the GPU tests",
    "hypothesis": "the GPU tests",
    "transformers": "all rows, and the GPU tests",
    "numpy": "rows of both engines, and the GPU tests",
    "pydantic": "rows of both engines, and the GPU tests",
    "orjson": "rows of both engines, and the GPU tests",
    "xxhash": "rows of both engines, and the GPU tests",
    "zstandard": "rows of both engines, and the GPU tests",
    "safetensors": "rows of both engines, and the GPU tests",
    "regex": "GPU tests that prepare data",
    "fastokens": "nothing: tokenizers is used",
    "tokenizers": "all rows, and the GPU tests",
}
_ADDED = ("accelerate", "pytest", "hypothesis")


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: exit code; None if the time limit ended the process.
        log: output of the process.
    """

    code: int | None
    log: Path

    @property
    def last_line(self) -> str:
        """The last line that it printed."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"


def run(words: list[str], *, log: Path, limit_s: float, env: dict[str, str]) -> Ended:
    """Runs a command from the repository's root in its own session; after the limit the whole session is killed."""
    with log.open("w") as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return Ended(process.wait(timeout=max(1.0, limit_s)), log)
        except subprocess.TimeoutExpired:
            return Ended(None, log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def environment(site: Path | None, *, tiny: bool) -> dict[str, str]:
    """The variables of all processes: no network, no GPU if tiny, an allocator with expandable segments."""
    paths = [str(ROOT), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_VISIBLE_DEVICES": ""} if tiny else {}),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HEADRACE_GPU_TESTS_ON": "cpu" if tiny else "cuda",
    }


def on_one_gpu(env: dict[str, str]) -> dict[str, str]:
    """The same variables for a process that sees only the first GPU."""
    return {**env, "CUDA_VISIBLE_DEVICES": env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def install_wheels(folder: Path, site: Path, *, log: Path, env: dict[str, str]) -> str:
    """Installs all wheels of a folder into a local folder, without a network; returns what it did, or why it could not.

    Dependencies are left out: the machine's own torch must stay the measured one.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        return f"{folder} has no wheels"
    where = ["--no-index", "--find-links", str(folder), "--target", str(site)]
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--no-compile", *where]
    ended = run([*words, *map(str, wheels)], log=log, limit_s=180, env=env)
    if ended.code == 0:
        return f"{len(wheels)} wheels of {folder} installed into {site}"
    return f"the wheels of {folder} were not installed: {ended.last_line}"


def missing_packages(site: Path | None) -> dict[str, str]:
    """Package that this Python lacks -> what is skipped because of that."""
    if site is not None and str(site) not in sys.path:
        sys.path.insert(0, str(site))
        importlib.invalidate_caches()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=\[; ]", text, maxsplit=1)[0] for text in project["dependencies"]]
    found = {name: _installed(_IMPORTED_AS.get(name, name.replace("-", "_"))) for name in [*names, *_ADDED]}
    return {name: _NEEDED_FOR.get(name, "GPU tests that use it") for name, there in found.items() if not there}


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
