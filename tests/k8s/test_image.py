"""The Dockerfile: each RUN line of the CPU image in a bare Debian, and the image at work as k8s/ starts it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.k8s.image import Image, context, lines_of, stages
from tests.k8s.manifests import document

PACKAGES = [Path(path) for path in ("/opt/pypi", "/opt/pypi-more", "/opt/wheels") if Path(path).is_dir()]
"""Local package indexes that pip's settings may name."""
CANNOT = "needs root and debootstrap" if os.geteuid() != 0 or shutil.which("debootstrap") is None else ""


def test_both_images_run_without_root_and_by_the_constraints() -> None:
    assert set(stages()) == {"system", "cpu", "cuda"}
    for name in ("cpu", "cuda"):
        lines = lines_of(name, kinds=())
        users = [each.text for each in lines if each.name == "USER"]
        assert users == ["1000:1000"]
        pips = [each.text for each in lines if each.name == "RUN" and "pip install" in each.text]
        assert pips
        assert all("--constraint constraints.txt" in text for text in pips)
        assert lines[-2:] == lines_of("cpu", kinds=())[-2:]  # the same entry point and command


def test_the_context_has_what_is_installed_and_no_run_or_environment() -> None:
    names = {str(path) for path in context()}
    assert {"pyproject.toml", "constraints.txt", "headrace/api.py", "data_prep/sources/_jsonl.c"} <= names
    assert "ds_configs/zero3.json" in names
    assert not any(name.startswith(("out/", ".venv", "tests/", ".git/")) or "__pycache__" in name for name in names)


def test_the_lines_of_the_cuda_image_that_no_test_runs_are_listed() -> None:
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    only = [each.text for each in lines_of("cuda") if each not in lines_of("cpu")]
    assert only
    assert [text for text in only if f"`RUN {text}`" not in page] == []


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    root = Path(tempfile.mkdtemp(prefix="headrace-image-", dir="/var/tmp"))
    root.chmod(0o755)  # its user is another one
    index = os.environ.get("HEADRACE_TORCH_INDEX", "https://pypi.org/simple")
    built = Image(root, {"TORCH_INDEX": index}, PACKAGES)
    try:
        built.bootstrap()
        for instruction in lines_of("cpu", kinds=()):
            built.apply(instruction)
        yield built
    finally:
        shutil.rmtree(root)  # what was mounted in it has ended with the processes that did


@pytest.mark.sweep
@pytest.mark.skipif(bool(CANNOT), reason=CANNOT)
def test_the_cpu_image_prepares_data_and_trains_as_the_manifests_start_it(image: Image, tmp_path: Path) -> None:
    assert "1000 1000" in image.run("sh", "-c", "echo $(id -u) $(id -g)")
    config, corpus, tokens, runs = (tmp_path / name for name in ("config", "corpus", "tokens", "runs"))
    for folder in (config, corpus, tokens, runs):
        folder.mkdir()
        os.chown(folder, 1000, 1000)
    tmp_path.chmod(0o755)
    for folder in ("data-prep", "train"):
        for name, text in document(f"overlays/cpu-small/{folder}", "ConfigMap")["data"].items():
            (config / name).write_text(text)
    pages = sorted((ROOT / "docs/how-to").glob("*.md"))
    texts = [text for page in pages for text in page.read_text().split("\n\n")]
    (corpus / "pages.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    mounts = {config: "/etc/headrace:ro", corpus: "/corpus:ro", tokens: "/tokens", runs: "/runs"}
    job = document("overlays/cpu-small/data-prep", "Job")["spec"]["template"]["spec"]["containers"][0]["args"]
    alone = [*job[: job.index("--of")], "--of", "1"]
    assert "fingerprint" in image.run(*alone, mounts=mounts, JOB_COMPLETION_INDEX="0")
    args = document("overlays/cpu-small/train", "TrainJob")["spec"]["trainer"]["args"]
    pod = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1"}
    mounts[tokens] = "/tokens:ro"
    small = shlex.split(
        "--set run.steps=3 --set scheduler.params.decay_num_steps=1 --set scheduler.params.warmup_num_steps=1"
    )
    said = image.run(*args, *small, mounts=mounts, PET_MASTER_PORT="29467", **pod)
    assert "pods: 2 processes" in said
    assert "finished: 3 steps" in said
    assert {path.stat().st_uid for path in runs.rglob("*")} == {1000}
