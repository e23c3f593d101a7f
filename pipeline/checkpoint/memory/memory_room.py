"""Bytes that copies in host memory may take: of the tmpfs, of the host, and of the cgroup that is charged for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headrace.base.meminfo import available_memory

MARGIN = 0.1
"""Fraction of the tmpfs, host memory and cgroup limit that stays free: NCCL and gloo use them, too."""
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def room(directory: Path) -> int:
    """Bytes that may be written into a directory of a tmpfs; negative where less than the margin is free."""
    disk = os.statvfs(directory)
    found = [disk.f_bavail * disk.f_frsize - int(MARGIN * disk.f_blocks * disk.f_frsize)]
    with suppress(OSError, AssertionError):
        meminfo = Path("/proc/meminfo").read_text()
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found.append(available_memory(meminfo) - int(MARGIN * total))
    with suppress(OSError, ValueError):
        found += _of_cgroups(Path("/proc/self/cgroup").read_text(), _CGROUPS)
    return min(found)


def _of_cgroups(own: str, mounted: Path) -> Iterator[int]:
    """Free bytes, less the margin, of each limited cgroup that this process is in.

    Args:
        own: the contents of /proc/self/cgroup.
        mounted: directory where cgroups are mounted.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = mounted, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = mounted / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = root / path.lstrip("/")
        # in a container, the path is the host's, and the cgroup of this process is the root of the mount
        for folder in [inside, *inside.parents] if inside.is_dir() else [root]:
            if folder != root and root not in folder.parents:
                break
            with suppress(OSError, ValueError):
                limit, usage = (int((folder / name).read_text()) for name in names)  # "max": no limit
                if limit < _UNLIMITED:
                    yield limit - usage + _reclaimable(folder) - int(MARGIN * limit)


def _reclaimable(folder: Path) -> int:
    """Bytes of files that the kernel drops when memory is short."""
    rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
