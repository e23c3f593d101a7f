"""Builds the C++ device guard once per torch version, and loads it. No torch: it must be loaded before torch is."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("cuda_guard.cpp")


def missing() -> str | None:
    """The reason why this machine cannot have the fake device; None if it can."""
    if shutil.which("g++") is None:
        return "g++ is missing, which builds the fake device's guard (apt-get install g++)"
    if not (_torch_folder() / "include/ATen").is_dir():
        return "this torch has no C++ headers"
    if "cpu" not in _torch_version():
        build = "pip install torch --index-url https://download.pytorch.org/whl/cpu, in an environment of its own"
        return f"torch {_torch_version()} is not a CPU build: it has a device guard of its own ({build})"
    return None


def load() -> None:
    """Loads the guard into this process; builds it if no earlier process did."""
    assert "torch" not in sys.modules, "the guard must be loaded before torch is imported"
    ctypes.CDLL(str(_library()))


def _library() -> Path:
    text = f"{_torch_folder()} {_torch_version()} ".encode() + _SOURCE.read_bytes()
    name = f"cuda_guard_{hashlib.sha256(text).hexdigest()[:16]}.so"
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    library = cache_dir / name
    if not library.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        _build(library)
    return library


def _build(library: Path) -> None:
    torch, made = _torch_folder(), library.with_suffix(f".{os.getpid()}")
    paths = [f"-I{torch}/include", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", str(_SOURCE), "-o", str(made), *paths]
    subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True, capture_output=True, text=True)
    made.rename(library)  # processes may build it at the same time: the last one replaces an equal library


@cache
def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _torch_version() -> str:
    line = next(t for t in (_torch_folder() / "version.py").read_text().splitlines() if t.startswith("__version__"))
    return line.split("=")[1].strip().strip("'\"")
