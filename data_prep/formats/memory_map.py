"""Files mapped into memory without a file descriptor for each, and hints on what of them will be read.

Python's `mmap` keeps a descriptor open per map, and a process commonly may have 1,024: ten thousand shards need the
system call itself. Maps are read-only and shared; an array made from one keeps it, and the last one gone unmaps it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class MemoryMap:
    """The bytes of one file; `np.asarray` of it copies nothing."""

    def __init__(self, path: Path) -> None:
        """Maps a file.

        Raises:
            OSError: it is not there, or there are too many maps (vm.max_map_count).
        """
        self.address: int | None = None
        handle = os.open(path, os.O_RDONLY)
        try:
            self.size = os.fstat(handle).st_size
            if self.size:
                found = _libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
                if found == _FAILED:
                    error = ctypes.get_errno()
                    raise OSError(error, f"cannot be mapped: {os.strerror(error)}", str(path))
                self.address = found
        finally:
            os.close(handle)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.address, True)}

    def __del__(self) -> None:
        if self.address is not None:
            _libc.munmap(self.address, self.size)


def map_file(path: Path, *, at_random: bool = False) -> npt.NDArray[np.uint8]:
    """uint8 [bytes of the file], read-only; see `MemoryMap` for what it raises.

    Args:
        path: of the file.
        at_random: it is read in small pieces from anywhere: the system then reads no more than is asked for. Left to
            itself it reads a device's read_ahead_kb around each: 128 KiB as a rule, 8 MiB on some machines.
    """
    mapping = MemoryMap(path)
    if not mapping.size:
        return np.empty(0, dtype=np.uint8)
    if at_random:
        _libc.madvise(mapping.address, mapping.size, mmap.MADV_RANDOM)
    return np.asarray(mapping)


def will_need(address: int, size: int) -> None:
    """Has the kernel begin to read a piece of a mapped file, without waiting. It may pass over it; nothing fails.

    Args:
        address: of the first byte, within a map.
        size: bytes.
    """
    over = address % mmap.PAGESIZE
    if size:
        _libc.madvise(address - over, size + over, mmap.MADV_WILLNEED)
