"""A fake `cuda` device: an H200 for fake tensors. Import it before torch, in a process of its own.

Fake tensors have shapes, dtypes and devices, and no numbers. On this device they run through forward, backward, fused
optimizers, FSDP2 and a fake process group, on a CPU build of torch; nothing is computed.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.plan.fake_gpu import guard

guard.load()

import torch  # noqa: E402  the guard must be there first
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

from pipeline.plan.fake_gpu import streams  # noqa: E402
from pipeline.plan.fake_gpu.accesses import ACCESSES  # noqa: E402

MEMORY_BYTES = 140 * 2**30
"""Total memory of an H200 as `torch.cuda.get_device_properties` reports it: 141 GB less the driver's share."""

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=MEMORY_BYTES,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
    pci_domain_id=0xFFFF,  # an id that no device has: a process is bound to no cores
    pci_bus_id=0xFF,
    pci_device_id=0x1F,
)


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: answer


def _answer_for_cuda() -> None:
    """Replaces the functions of `torch.cuda` that query the device."""
    generator_state = torch.zeros(16, dtype=torch.uint8)
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "empty_cache": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0),
        "get_device_name": PROPERTIES.name,
        "is_bf16_supported": True,
        "manual_seed": None,
        "get_rng_state": generator_state,
        "set_rng_state": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "memory_stats": {},
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.synchronize = lambda *_device: streams.ORDER.synchronize()
    torch.cuda.current_stream = streams.current_stream  # type: ignore[assignment]
    # another function, since Dynamo knows both by their identity
    torch.accelerator.current_stream = lambda *_device: streams.current_stream()  # type: ignore[assignment]
    torch.cuda.default_stream = _always(streams.FakeStream(number=0))
    torch.cuda.stream, torch.cuda.set_stream = streams.within_stream, streams.set_stream  # type: ignore[assignment]
    torch.cuda.Stream, torch.cuda.Event = streams.FakeStream, streams.FakeEvent  # type: ignore[assignment, misc]
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _always(None))
    torch.version.cuda = "13.0"


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    ACCESSES.record_stream(tensor, stream)


def _patch_torch() -> None:
    """Replaces the other functions of torch that need a real device."""
    torch.random.fork_rng = _always(contextlib.nullcontext())
    torch.Tensor.record_stream = _record_stream  # type: ignore[assignment, method-assign]
    fake_tensor.init_gpu_context = _always(None)  # type: ignore[assignment]
    fake_tensor.FakeTensorMode.avoid_device_init = property(_always(True))  # type: ignore[assignment]


def _not_for_a_fake_tensor(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("the kernel of a device that is not there")


def _name_cuda_kernels() -> torch.library.Library:
    """Registers CUDA kernels of operators that a build of torch without CUDA composes from others.

    Autograd would take the composition, which allocates six buffers of an MLP's width where the kernel has one. The
    registered kernels are never called: fake tensors take the operator's shapes.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu_backward", _not_for_a_fake_tensor, "CUDA")
    return library


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Makes all tensors that are created within the block fake, whatever their device."""
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
        yield mode


_answer_for_cuda()
_patch_torch()
_KERNELS = _name_cuda_kernels()
"""The registered kernels, which last as long as this object."""
