"""An installed wheel has what a checkout has: the command, the configs, the job scripts, the demo."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import output_of, refusal_of

PACKED = (
    "headrace",
    "foundation",
    "data_prep",
    "pipeline",
    "ds_configs",
    "slurm",
    "demo",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, unpacked: what pip would put on the path."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index"]
    # the compiled extension is optional, and has tests of its own
    env = {**os.environ, "CC": "false"}
    command = [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    output_of(subprocess.run(command, capture_output=True, text=True, check=False, env=env))
    site = out / "site"
    zipfile.ZipFile(next(out.glob("*.whl"))).extractall(site)
    return site


def run(installed: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command of the wheel, far from the checkout."""
    code = (
        f"import sys; sys.path[:] = [{str(installed)!r}, *(p for p in sys.path if p != {str(ROOT)!r})];"
        "import headrace.commands.app as app; assert 'site' in app.__file__, app.__file__; app.main()"
    )
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_wheel_has_the_configs_the_job_scripts_and_the_demo(installed: Path) -> None:
    share = installed / "headrace" / "share"
    for folder in ("ds_configs", "slurm", "demo"):
        here = sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file())
        assert sorted(path.name for path in (share / folder).iterdir()) == here
        assert all((share / folder / name).read_bytes() == (ROOT / folder / name).read_bytes() for name in here)
    assert (installed / "pipeline/evaluation/report/page.css").is_file()
    assert (installed / "pipeline/plan/fake_gpu/cuda_guard.cpp").is_file()
    assert not list(installed.glob("tests*"))


def test_the_wheel_has_the_console_script(installed: Path) -> None:
    points = next(installed.glob("*.dist-info")) / "entry_points.txt"
    assert "headrace = headrace.commands.app:main" in points.read_text()


def test_every_shipped_config_loads_by_its_name_from_anywhere(installed: Path, tmp_path: Path) -> None:
    said = output_of(run(installed, "check", "--config", "ds_configs/zero3.json", "--rules-only", cwd=tmp_path))
    assert "ZeRO-3" in said
    output = refusal_of(run(installed, "check", "--config", "ds_configs/zero33.json", "--rules-only", cwd=tmp_path))
    assert "no such file" in output
