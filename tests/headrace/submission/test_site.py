"""`slurm/site.toml`: what a wrong key is answered with, and what a stage makes of the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.submission.environment import settings_of, venv_of
from headrace.submission.site import STAGES, SiteConfig, load_site
from tests.conftest import ROOT


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('partitoin = "gpu"', "did you mean 'partition'?"),
        ("[train]\ngpu = 8\n", "did you mean 'gpus'?"),
        ('[train]\ngpus = "8"\n', "site.toml.train.gpus = '8'"),
        ('extra = ["constraint=h100"]', "starts with '--'"),
        ('venv = "/nowhere"', "there is no virtual environment there"),
        ('mounts = ["scratch"]', "it is not an absolute path"),
        ('[container]\nruntime = "docker"\nimage = "x"\n', "site.toml.container.runtime = 'docker'"),
        ("partition = gpu", "Invalid value"),
        ('[train]\ndevice_memory = "80XB"\n', "not a positive number with a unit"),
        ('environment = { "A B" = "c" }\n', "'A B' cannot be the name of a variable"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_and_a_remedy(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_site(written(tmp_path, text))


def test_a_stage_has_the_values_of_its_table_and_else_those_of_the_top(tmp_path: Path) -> None:
    text = (
        'partition = "gpu"\ntime = "1:00:00"\nextra = ["--exclusive"]\n[data]\npartition = "cpu"\nextra = ["--nice"]\n'
    )
    site, _ = load_site(written(tmp_path, text))
    data, train = site.stage("data"), site.stage("train")
    assert (data.partition, data.time, data.extra) == ("cpu", "1:00:00", ["--exclusive", "--nice"])
    assert (train.partition, train.time, train.extra) == ("gpu", "1:00:00", ["--exclusive"])


def test_the_shipped_file_sets_nothing_and_shows_keys_that_exist() -> None:
    path = ROOT / "slurm" / "site.toml"
    assert load_site(path)[0] == SiteConfig()
    section, shown = "", []
    for line in path.read_text().splitlines():
        if found := re.match(r"(?:# )?\[(\w+)\]", line):
            section = found[1]
        elif found := re.match(r"# (\w+) = ", line):
            shown.append((section, found[1]))
    assert len(shown) > 15
    for name, key in shown:
        fields = SiteConfig.model_fields
        known = {"runtime", "image"} if name == "container" else fields
        assert key in known, (name, key)
        assert name in ("", "container", *STAGES)


def test_interface_mounts_modules_and_variables_reach_the_job(tmp_path: Path) -> None:
    text = 'interface = "ib0"\nmounts = ["/no such place"]\nmodules = ["cuda/12.8"]\nenvironment = { A = "b c" }\n'
    site, _ = load_site(written(tmp_path, text))
    lines = settings_of(site, root=Path("/code"), directory=tmp_path)
    assert "export NCCL_SOCKET_IFNAME==ib0" in lines
    assert "export A='b c'" in lines
    assert "module load cuda/12.8 || exit 2" in lines
    assert any("[ -d '/no such place' ] ||" in line for line in lines)
    assert venv_of(site) == ""  # the modules bring the python
