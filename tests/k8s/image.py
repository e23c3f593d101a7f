"""Builds a stage of the Dockerfile in a directory, by debootstrap and chroot: no container runtime is needed.

Reads the instructions that the Dockerfile uses, and refuses others. Layers, caches and metadata do not exist here: what
is tested is that each line does what it should in a bare Debian.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import ROOT

MIRROR = "http://deb.debian.org/debian"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_CERTIFICATES = "/run/pip-certificates.crt"


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str


@dataclass
class Stage:
    """A stage: the image that it starts from, and its instructions."""

    base: str
    instructions: list[Instruction] = field(default_factory=list)


def stages(dockerfile: Path = ROOT / "Dockerfile") -> dict[str, Stage]:
    """The stages of a Dockerfile by name; ValueError where one has no name, or an instruction is not known."""
    found: dict[str, Stage] = {}
    for instruction in _instructions(dockerfile.read_text()):
        if instruction.name == "FROM":
            base, how, name = instruction.text.split()
            if how != "AS":
                raise ValueError(f"not understood: FROM {instruction.text}")
            current = found[name] = Stage(base)
        elif instruction.name in ("RUN", "ENV", "ARG", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"):
            current.instructions.append(instruction)
        else:
            raise ValueError(f"not understood: {instruction}")
    return found


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


def lines_of(name: str, *, kinds: Sequence[str] = ("RUN",)) -> list[Instruction]:
    """The instructions of a stage and of those below it, in order."""
    found, order = stages(), []
    while name in found:
        order.insert(0, name)
        name = found[name].base
    return [each for stage in order for each in found[stage].instructions if each.name in kinds or not kinds]


@dataclass
class Image:
    """A root directory that is being built.

    Attributes:
        root: it.
        given: values of ARG in place of the Dockerfile's.
        binds: directories of this machine to be seen in it at build time under the same path, such as a package index;
            read-only, since what runs here is root's, and packages write where they like.
    """

    root: Path
    given: Mapping[str, str]
    binds: Sequence[Path] = ()
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    arguments: dict[str, str] = field(default_factory=dict)
    work: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)

    def bootstrap(self) -> None:
        command = ["debootstrap", "--variant=minbase", "bookworm", str(self.root), MIRROR]
        _run(command, timeout_s=900)
        shutil.copy("/etc/resolv.conf", self.root / "etc/resolv.conf")

    def apply(self, instruction: Instruction) -> None:
        getattr(self, f"_{instruction.name.lower()}")(instruction.text)

    def run(self, *command: str, mounts: Mapping[Path, str] = {}, timeout_s: float = 300, **env: str) -> str:
        """Runs the finished image as k8s/ does: with its user and entry point, a read-only root and an empty /tmp.

        Args:
            command: command that replaces the image's CMD.
            mounts: directory of this machine -> `PATH` or `PATH:ro` in the container.
        """
        lines = [self._bind(self.root, "", "ro"), f"mount -t tmpfs tmpfs {self.root}/tmp", *self._system()]
        for source, target in mounts.items():
            path, _, mode = target.partition(":")
            (self.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
            lines.append(self._bind(source, path, mode or "rw"))
        user = f"--userspec={self.user}"
        return self._chroot(lines, [user], f"exec {shlex.join([*self.entrypoint, *command])}", env, timeout_s)

    def _run(self, text: str) -> None:
        lines = [*self._system(), *(self._bind(path, str(path), "ro") for path in self.binds)]
        for path in self.binds:
            (self.root / str(path).lstrip("/")).mkdir(parents=True, exist_ok=True)
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        if "PIP_CERT" in pip:
            shutil.copy(pip["PIP_CERT"], self.root / _CERTIFICATES.lstrip("/"))
            pip["PIP_CERT"] = _CERTIFICATES
        self._chroot(lines, [f"--userspec={self.user}"], text, {**self.arguments, **pip}, 1800)

    def _env(self, text: str) -> None:
        self.env |= dict(word.split("=", 1) for word in shlex.split(text))

    def _arg(self, text: str) -> None:
        name, _, default = text.partition("=")
        self.arguments[name] = self.given.get(name, default)

    def _workdir(self, text: str) -> None:
        self.work = text
        (self.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        *sources, _here = text.split()
        for source in sources:
            for path in context() if source == "." else [Path(source)]:
                target = self.root / self.work.lstrip("/") / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, target, follow_symlinks=False)

    def _user(self, text: str) -> None:
        self.user = text

    def _entrypoint(self, text: str) -> None:
        self.entrypoint = json.loads(text)

    def _cmd(self, text: str) -> None:
        json.loads(text)

    def _system(self) -> list[str]:
        """Mounts of /proc and of a /dev with the usual devices and nothing else of this machine."""
        dev = f"{self.root}/dev"
        lines = [f"mount -t proc proc {self.root}/proc", f"mount -t tmpfs tmpfs {dev}", f"mkdir {dev}/shm"]
        lines += [f"touch {dev}/{name} && mount --bind /dev/{name} {dev}/{name}" for name in _DEVICES]
        return [*lines, f"ln -s /proc/self/fd {dev}/fd", f"chmod 1777 {dev}/shm"]

    def _bind(self, source: Path, target: str, mode: str) -> str:
        at = f"{self.root}{target}"
        return f"mount --bind {source} {at} && mount -o remount,{mode},bind {at}"

    def _chroot(self, mounts: list[str], options: list[str], command: str, env: Mapping[str, str], limit: float) -> str:
        settings = shlex.join(f"{name}={value}" for name, value in {**self.env, **env}.items())
        inner = shlex.quote(f"cd {self.work} && {command}")
        enter = f"exec env -i {settings} {shutil.which('chroot')} {shlex.join(options)} {self.root} /bin/sh -c {inner}"
        script = "\n".join(["set -e", *mounts, enter])
        return _run(
            ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "bash", "-c", script], timeout_s=limit
        )


def context() -> list[Path]:
    """The files that .dockerignore lets through, relative to the repository."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    kept = [line[1:] for line in lines if line.startswith("!")]
    dropped = [line.removeprefix("**/") for line in lines[1:] if not line.startswith("!")]
    found: list[Path] = []
    for name in kept:
        path = ROOT / name
        inside = [Path(folder) / file for folder, names, files in os.walk(path) for file in (*files, *names)]
        found += [each for each in inside if each.is_symlink() or each.is_file()] if path.is_dir() else [path]
    relative = [path.relative_to(ROOT) for path in found]
    return [path for path in relative if not any(fnmatch.fnmatch(part, no) for part in path.parts for no in dropped)]


def _run(command: Sequence[str], *, timeout_s: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr
