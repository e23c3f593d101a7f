"""The commands of docs/tutorials/by-hand.md on two hosts, which are namespaces: the losses are those of one process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, launch, losses, tiny_config, write_config
from tests.runtime.launch.hosts import NAMES, Hosts
from tests.virtual_cluster.cluster import missing_requirements

PAGE = (ROOT / "docs/tutorials/by-hand.md").read_text()
STEPS = 6
ABSENT = [name for name in ("/usr/sbin/sshd", "ssh", "pdsh", "mpirun") if shutil.which(name) is None]
CANNOT = missing_requirements() or (f"needs {', '.join(ABSENT)}" if ABSENT else "")
pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(CANNOT), reason=CANNOT)]


def commands_of(launcher: str) -> str:
    """The block of the tutorial whose last command is this launcher's."""
    blocks = re.findall(r"^<!-- not run: needs two hosts[^>]*-->\n```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if block.splitlines()[-1].startswith(f"{launcher} "))
    return str(found)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts") / "state") as made:
        yield made


@pytest.fixture(scope="module")
def expected(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    work = tmp_path_factory.mktemp("alone")
    launch("train.py", make_config(tokens, work))
    return losses(work / "run")


def make_config(tokens: Path, work: Path) -> Path:
    run = {"dir": str(work / "run"), "steps": STEPS, "seed": 7}
    schedule = {"type": "WSD", "params": {"warmup_num_steps": 2, "decay_num_steps": 2}}
    return write_config(work / "train.json", tiny_config(tokens, work / "run", run=run, scheduler=schedule))


@pytest.mark.parametrize(
    ("launcher", "everywhere", "said"),
    [
        ("torchrun", True, "torchrun: 2 processes"),
        ("deepspeed", False, "deepspeed: 2 processes"),
        pytest.param("mpirun", False, "mpirun (Open MPI): 2 processes", marks=pytest.mark.sweep),
    ],
)
def test_the_printed_commands_train_over_two_hosts(
    hosts: Hosts, tokens: Path, tmp_path: Path, expected: dict[int, float], launcher: str, everywhere: bool, said: str
) -> None:
    make_config(tokens, tmp_path)
    # the user of the test is root, which Open MPI asks to confirm
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables = {"GPUS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **root}
    started = [
        hosts.start(name, commands_of(launcher), cwd=tmp_path, env=variables | {"NODE": str(number)})
        for number, name in enumerate(NAMES)
        if everywhere or number == 0
    ]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)[-5000:]
    assert said in "\n".join(outputs)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
