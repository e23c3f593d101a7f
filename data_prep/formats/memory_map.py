"""Read-only memory maps that keep no file descriptor open, and read-ahead hints (madvise).

Python's `mmap` keeps a descriptor open per map, and a process may usually have 1,024: ten thousand shards need the
system call itself. Maps are shared. An array made from a map keeps it alive, and freeing the last of these arrays
unmaps the file.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memcpy.restype = ctypes.c_void_p
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_SCRATCH = 1 << 14
_HEADER_BYTES = 1 << 12
"""Largest header of `np.save`, in bytes; arrays without fields have 128."""
_FAILED = ctypes.c_void_p(-1).value


class MemoryMap:
    """The memory-mapped bytes of one file. `np.asarray` makes an array of it without a copy."""

    def __init__(self, path: Path) -> None:
        """Maps a file.

        Raises:
            OSError: the file does not exist, or the process has too many maps (vm.max_map_count).
        """
        self.address: int | None = None
        handle = os.open(path, os.O_RDONLY)
        try:
            self.size = os.fstat(handle).st_size
            if self.size:
                address = _libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
                if address == _FAILED:
                    error = ctypes.get_errno()
                    raise OSError(error, f"memory map failed: {os.strerror(error)}", str(path))
                self.address = address
        finally:
            os.close(handle)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.address, True)}

    def __del__(self) -> None:
        if self.address is not None:
            _libc.munmap(self.address, self.size)


def map_file(path: Path, *, random_access: bool = False) -> npt.NDArray[np.uint8]:
    """Memory-maps a file.

    Args:
        path: path of the file.
        random_access: whether to disable read-ahead (MADV_RANDOM), for small reads at random offsets. With read-ahead,
            the kernel reads the device's read_ahead_kb around each read: usually 128 KiB, 8 MiB on some machines.

    Returns:
        uint8 [bytes of the file], read-only.

    Raises:
        OSError: the file does not exist, or the process has too many maps (vm.max_map_count).
    """
    mapping = MemoryMap(path)
    if not mapping.size:
        return np.empty(0, dtype=np.uint8)
    if random_access:
        _libc.madvise(mapping.address, mapping.size, mmap.MADV_RANDOM)
    return np.asarray(mapping)


def map_array(path: Path) -> npt.NDArray[Any]:
    """Memory-maps an array that `np.save` has written, with a single file-system operation.

    `np.load(mmap_mode="r")` opens the file twice and resolves the links in its path: some ten operations for each file
    of 10,000 tasks.

    Raises:
        OSError: the file does not exist, or the process has too many maps (vm.max_map_count).
        ValueError: the file was not written by `np.save`, or ends early.
    """
    data = map_file(path)
    head = io.BytesIO(data[:_HEADER_BYTES].tobytes())
    version = np.lib.format.read_magic(head)
    if version != (1, 0):
        raise ValueError(f"{path} has a header of version {version}, not of (1, 0)")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(head)
    size = math.prod(shape) * dtype.itemsize
    values = data[head.tell() : head.tell() + size]
    if dtype.hasobject or len(values) < size:
        raise ValueError(f"{path} ends early, or has objects: {len(values)} bytes of {size}")
    return values.view(dtype).reshape(shape, order="F" if fortran else "C")


def fault_in(parts: Iterable[tuple[int, int]]) -> None:
    """Reads parts of memory maps from disk without holding Python's global lock.

    numpy holds the lock while it copies: a page fault on a slow disk would stop all threads of the process. A data
    loader would stop the training beside it, and the wait would appear as a slow step instead of data wait.

    Args:
        parts: (address, bytes) of each part; the part's map has to exist until the next part is requested.
    """
    scratch = ctypes.create_string_buffer(_SCRATCH)
    for address, size in parts:
        for at in range(0, size, _SCRATCH):
            _libc.memcpy(scratch, address + at, min(_SCRATCH, size - at))  # ctypes releases the lock


def will_need(address: int, size: int) -> None:
    """Hints that part of a mapped file will be read soon (MADV_WILLNEED): the kernel starts to prefetch it.

    Returns without waiting. The kernel may ignore the hint, and errors are ignored.

    Args:
        address: address of the first byte, within a map.
        size: number of bytes.
    """
    offset = address % mmap.PAGESIZE
    if size:
        _libc.madvise(address - offset, size + offset, mmap.MADV_WILLNEED)
