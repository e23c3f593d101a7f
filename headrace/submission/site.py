"""A Slurm site's settings (`slurm/site.toml`): everything that differs between clusters, in one file.

The keys at the top apply to every stage; a table `[data]`, `[train]`, `[export]` or `[compress]` overrides them.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from foundation.errors import ConfigError
from foundation.memory_size import bytes_of
from foundation.paths import LocalPath
from foundation.section import Count, Section, parse
from foundation.shipped import find_shipped

FILE = Path("slurm/site.toml")
STAGES = ("data", "train", "export", "compress")
_NO_OPTION = "it has to be an option of sbatch, which starts with '--'"


def _an_option(text: str) -> str:
    text = text.removeprefix("#SBATCH").strip()
    if not text.startswith("--") or "\n" in text:
        raise ValueError(_NO_OPTION)
    return text


def _a_size(text: str) -> str:
    bytes_of(text)
    return text


def _variables(values: dict[str, str]) -> dict[str, str]:
    wrong = [name for name in values if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
    if wrong:
        raise ValueError(f"'{wrong[0]}' cannot be the name of a variable: letters, digits and _")
    return values


Option = Annotated[str, AfterValidator(_an_option)]
MemorySize = Annotated[str, AfterValidator(_a_size)]
Variables = Annotated[dict[str, str], AfterValidator(_variables)]


class StageSettings(Section):
    """Settings of one stage's jobs. A key that is absent here takes the value at the top of the file."""

    partition: str | None = Field(default=None, description="Partition of the jobs, e.g. gpu; null: Slurm's default")
    account: str | None = Field(default=None, description="Account that is charged, e.g. lab-llm")
    qos: str | None = Field(default=None, description="Quality of service, e.g. long")
    time: str | None = Field(
        default=None,
        description='Time limit as sbatch takes it, e.g. "24:00:00"; null: that of the script',
    )
    memory: str | None = Field(default=None, description='Memory of a job on each node, e.g. "200G", or "0": all')
    gpus: Count | None = Field(
        default=None, description="GPUs of a node, each with one process of training, e.g. 8; null: CPU"
    )
    cpus: Count | None = Field(default=None, description="Cores of each process (--cpus-per-task), e.g. 12")
    device_memory: MemorySize | None = Field(
        default=None,
        description='Memory of one GPU, e.g. "80GB": a config that needs more is not submitted',
    )
    extra: list[Option] = Field(
        default=[], description='Further options of sbatch, one each, e.g. ["--constraint=h100", "--exclusive"]'
    )


class Container(Section):
    """A container image in which the processes run. Only for --dry-run: no container was ever started by it."""

    runtime: Literal["apptainer", "pyxis"] = Field(description="What starts the image, e.g. apptainer")
    image: str = Field(description="The image, e.g. /images/headrace.sif")


class SiteConfig(StageSettings):
    """The settings of a site."""

    modules: list[str] = Field(
        default=[], description='Modules that every job loads, e.g. ["cuda/12.8", "python/3.12"]'
    )
    venv: LocalPath | None = Field(
        default=None,
        description="Virtual environment of the jobs, on a file system that all nodes see, e.g. /home/me/.venv;"
        " null: the one that headrace submit runs in, or with modules the python that they bring",
    )
    container: Container | None = Field(default=None, description="Container of the jobs; null: none")
    interface: str | None = Field(
        default=None,
        description="Network interface of gloo and of NCCL's bootstrap, e.g. ib0; null: that of the rendezvous",
    )
    mounts: list[LocalPath] = Field(
        default=[],
        description='Directories that jobs need, e.g. ["/scratch"]: a job ends at once where one is missing; a'
        " container gets them",
    )
    mail: str | None = Field(default=None, description="Address that Slurm writes to, e.g. me@lab.example")
    mail_events: list[str] = Field(
        default=["END", "FAIL"], description='What a mail is sent for, e.g. ["END", "FAIL", "REQUEUE"]'
    )
    environment: Variables = Field(
        default={}, description='Variables that every job exports, e.g. {"NCCL_IB_HCA": "mlx5"}'
    )
    data: StageSettings = Field(default=StageSettings(), description="Jobs of data prep, each of which has one task")
    train: StageSettings = Field(default=StageSettings(), description="Jobs that train")
    export: StageSettings = Field(default=StageSettings(), description="Jobs that export a run, one process each")
    compress: StageSettings = Field(default=StageSettings(), description="Jobs that prune, distil and quantize")

    def stage(self, name: str) -> StageSettings:
        """The settings of a stage; keys absent from its table take the values at the top of the file."""
        own: StageSettings = getattr(self, name)
        top = {key: getattr(self, key) for key in StageSettings.model_fields if key in self.model_fields_set}
        both = {**top, **own.model_dump(include=own.model_fields_set)}
        return StageSettings(**{**both, "extra": [*self.extra, *own.extra]})


def load_site(path: Path | None) -> tuple[SiteConfig, Path]:
    """Reads a site's settings.

    Args:
        path: the file; None for `slurm/site.toml` in the working directory, or else the shipped one, which is empty.

    Raises:
        ConfigError: the file does not exist, is not TOML, or has unknown keys or values of a wrong kind.
    """
    found = path or (FILE if FILE.is_file() else find_shipped(FILE))
    assert found is not None, "the shipped file"
    try:
        raw = tomllib.loads(found.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "name a file that is there, or leave the option out to use slurm/site.toml"
        raise ConfigError("--site", str(path), why="no such file", remedy=remedy) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("--site", str(found), why=str(error), remedy=f"mend {found}") from None
    site = parse(SiteConfig, raw, at=str(found))
    _check(site, found)
    return site, found


def _check(site: SiteConfig, path: Path) -> None:
    if site.venv is not None and site.container is not None:
        why = "a container has its own python"
        raise ConfigError(f"{path}.venv", site.venv, why=why, remedy="remove one of venv and container")
    if site.venv is not None and not (Path(site.venv) / "bin" / "activate").is_file():
        why = "there is no virtual environment there (no bin/activate)"
        raise ConfigError(f"{path}.venv", site.venv, why=why, remedy=f"python3 -m venv {site.venv}, or another path")
    for name in site.mounts:
        if not name.startswith("/"):
            raise ConfigError(f"{path}.mounts", name, why="it is not an absolute path", remedy=f"/{name}")
