"""Contracts of kernels (attention, matrix products, fused optimizers), and between the host and the streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.plan.fake_gpu.contracts import Call, contract, described

_HALF = (torch.float16, torch.bfloat16)
_ALIGNMENT = 16
"""Bytes that one load instruction of the kernels moves."""
_QKV = ("query", "key", "value")
ASKED = frozenset({"_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_grouped_mm"})
"""Operators whose contract is torch's own meta kernel: it raises before the kernel would run."""


def _unaligned(name: str, tensor: Tensor) -> Iterator[str]:
    size = tensor.element_size()
    rows = [stride for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if length > 1]
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        yield f"the last dim of {name} has stride {tensor.stride(-1)}, not 1"
    elif any(each * size % _ALIGNMENT for each in (tensor.storage_offset(), *rows)):
        yield f"rows of {name} do not begin at multiples of {_ALIGNMENT} bytes"


def _attention(call: Call, *, dtypes: tuple[torch.dtype, ...], widest: int | None) -> Iterator[str]:
    found = dict(call.tensors(*_QKV))
    if len({each.dtype for each in found.values()}) > 1 or found["query"].dtype not in dtypes:
        yield f"the dtypes are {[str(each.dtype) for each in found.values()]}"
    for name, tensor in found.items():
        size = tensor.shape[-1]
        if widest is not None and (size % 8 or size > widest):
            yield f"the head size of {name} is {size}: not a multiple of 8 up to {widest}"
        yield from _unaligned(name, tensor)


def _gradients(call: Call, query: Tensor) -> Iterator[str]:
    for name, tensor in call.tensors("grad_out", "grad_out_", "out"):
        if tensor.dtype != query.dtype:
            yield f"{name} has another dtype than query"


def _read_by_pointer(call: Call) -> Iterator[str]:
    for name, tensor in call.tensors("logsumexp"):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            yield f"{name} is {described(tensor)}, and the kernel reads it as contiguous fp32"


@contract("_scaled_dot_product_flash_attention", "_flash_attention_forward")
def flash_attention(call: Call) -> Iterator[str]:
    """Query, key and value are fp16 or bf16, all the same; their last dim has stride 1; the head size is the same for
    all, a multiple of 8, at most 256; rows begin at multiples of 16 bytes; kv heads divide query heads.

    Source: torch 2.13 flash_attn/flash_api.cpp, mha_fwd ("must have contiguous last dimension")
    """
    yield from _attention(call, dtypes=_HALF, widest=256)
    query, key, value = (call.values[name] for name in _QKV)
    if len({each.shape[-1] for each in (query, key, value)}) > 1:
        yield "the head sizes differ"
    heads = 1 if call.operator.startswith("_scaled") else 2
    if query.shape[heads] % key.shape[heads]:
        yield f"{key.shape[heads]} key heads do not divide {query.shape[heads]} query heads"


@contract("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward")
def flash_attention_backward(call: Call) -> Iterator[str]:
    """As flash attention; the log-sum-exp is contiguous fp32 [B, H, T], because the kernel reads it by pointer and
    ignores strides; the gradient has the dtype of query (torch itself makes it contiguous).

    Source: torch 2.13 flash_attn/flash_api.cpp, mha_bwd (softmax_lse.data_ptr()); attention_backward.cu
    (contiguous_grad_out)
    """
    yield from _attention(call, dtypes=_HALF, widest=256)
    yield from _gradients(call, call.values["query"])
    yield from _read_by_pointer(call)


@contract("_scaled_dot_product_efficient_attention", "_efficient_attention_forward")
def efficient_attention(call: Call) -> Iterator[str]:
    """Query, key and value are fp32, fp16 or bf16, all the same; their last dim has stride 1; their rows, and those of
    the bias, begin at multiples of 16 bytes.

    Source: torch 2.13 mem_eff_attention/kernel_forward.h, check_supported ("is not correctly aligned")
    """
    yield from _attention(call, dtypes=(torch.float32, *_HALF), widest=None)
    for name, tensor in call.tensors("attn_bias", "bias"):
        yield from _unaligned(name, tensor)


@contract("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
def efficient_attention_backward(call: Call) -> Iterator[str]:
    """As efficient attention; the log-sum-exp is contiguous fp32 with rows of a multiple of 8; the gradient has the
    dtype of query.

    Source: torch 2.13 mem_eff_attention/kernel_backward.h, check_supported ("LSE is not correctly aligned")
    """
    yield from _attention(call, dtypes=(torch.float32, *_HALF), widest=None)
    yield from _gradients(call, call.values["query"])
    yield from _read_by_pointer(call)
    for name, tensor in call.tensors("logsumexp"):
        if tensor.shape[-1] % 8:
            yield f"the rows of {name} have {tensor.shape[-1]} elements, not a multiple of 8"


@contract("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
def cudnn_attention(call: Call) -> Iterator[str]:
    """Query, key and value are fp16 or bf16, all the same; their last dim, and that of output and gradient, has stride
    1; the head size is a multiple of 8, at most 256 on Hopper; the log-sum-exp is contiguous fp32.

    Source: torch 2.13 sdp_utils.cpp, check_cudnn_tensor_shapes; cudnn/MHA.cpp, run_cudnn_SDP_bprop
    """
    yield from _attention(call, dtypes=_HALF, widest=256)
    yield from _gradients(call, call.values["query"])
    yield from _read_by_pointer(call)
    for name, tensor in call.tensors("grad_out", "out"):
        yield from _unaligned(name, tensor)


@contract(*sorted(ASKED))
def layouts_of_products(call: Call) -> Iterator[str]:
    """The first factor of an fp8 product is row-major and the second column-major, and the summed dim is a multiple of
    16; the rows or columns of grouped products begin at multiples of 16 bytes; plain ones are bf16, scaled ones fp8.

    Source: torch 2.13 torch/_meta_registrations.py:6988 and :8611, which are called; cuda/CUDABlas.cpp, scaled_gemm
    """
    for name, tensor in call.tensors("self", "mat2"):
        if tensor.storage_offset() * tensor.element_size() % _ALIGNMENT:
            yield f"{name} does not begin at a multiple of {_ALIGNMENT} bytes"


@contract("_fused_adamw_", "_fused_adam_", "_fused_sgd_")
def fused_optimizers(call: Call) -> Iterator[str]:
    """Parameters, gradients and moments are in lists of equal length, and each parameter's have its shape, strides,
    dtype and device; the counts of steps (fp32), learning rate, grad_scale and found_inf are on the same device.

    Source: torch 2.13 cuda/FusedAdamWKernel.cu ("must have same dtype, device, and layout"); torch/optim/adam.py:168
    """
    parameters: list[Tensor] = call.values["self"]
    for name in ("grads", "exp_avgs", "exp_avg_sqs", "momentum_buffer_list"):
        tensors: list[Tensor] = call.values.get(name) or []
        if tensors and len(tensors) != len(parameters):
            yield f"{len(tensors)} {name} of {len(parameters)} parameters"
        for parameter, tensor in zip(parameters, tensors, strict=False):
            if _form(tensor) != _form(parameter):
                yield f"one of {name} is {described(tensor)}, its parameter {described(parameter)}"
    for name, tensor in call.tensors("state_steps", "lr", "grad_scale", "found_inf"):
        if tensor.device != parameters[0].device or (name == "state_steps" and tensor.dtype != torch.float32):
            yield f"{name} is {described(tensor)}, the parameters are on {parameters[0].device.type}"


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride() if tensor.numel() > 1 else ()


KERNELS = (
    flash_attention,
    flash_attention_backward,
    efficient_attention,
    efficient_attention_backward,
    cudnn_attention,
    layouts_of_products,
    fused_optimizers,
)


def _conflict(call: Call) -> str:
    """Describes two accesses that no event orders."""
    now, before = call.values["now"], call.values["before"]
    verbs = {True: "writes", False: "reads"}
    return (
        f"on stream {now.moment.stream} it {verbs[now.writes]} {described(call.values['tensor'])}, which on stream"
        f" {before.moment.stream} {before.operator} {verbs[before.writes]}, with no event or wait between them"
    )


@contract("any operator", of_streams=True)
def order_of_streams(call: Call) -> Iterator[str]:
    """A stream that uses what another stream writes (or writes what it uses) waits for it: by an event, wait_stream,
    the wait of an asynchronous collective, or a synchronization of the host. Stream -1 is the host.

    Source: torch 2.13 torch/cuda/_sanitizer.py:226, whose clocks are used; c10d/ProcessGroupNCCL.hpp:252
    """
    yield _conflict(call)


@contract("any operator", "record_stream", of_streams=True)
def memory_of_another_stream(call: Call) -> Iterator[str]:
    """Memory that a stream allocated is freed only when that stream comes after all that other streams do with it, or
    these are named by record_stream: the allocator gives it to the stream's next tensor and waits for nothing.

    Source: torch 2.13 torch/_tensor_docs.py:3977 (record_stream);
    DeepSpeed 0.19.8 deepspeed/runtime/zero/stage3.py:1639
    """
    yield _conflict(call) + " (it is the memory of a tensor freed since)"


@contract("copy_", "_to_copy", of_streams=True)
def waits_of_the_host(call: Call) -> Iterator[str]:
    """Page-locked memory is neither written after a non_blocking copy from it began, nor read after one into it, before
    the host has waited for an event after the copy. It may be freed: torch's allocator waits for the copy.

    Source: torch 2.13 cuda/Copy.cu, copy_kernel_cuda; ATen/core/CachingHostAllocator.h:180
    """
    yield _conflict(call)


@contract("copy_", "_to_copy", of_streams=True)
def copies_from_pageable_memory(call: Call) -> Iterator[str]:
    """A copy between host and device with non_blocking has page-locked memory on the host: from other memory the host
    waits for it all the same.

    Source: torch 2.13 cuda/Copy.cu, copy_kernel_cuda; CUDA runtime API, "API synchronization behavior"
    """
    if call.values["non_blocking"] and not call.values["pinned"]:
        yield "the memory on the host is pageable"


@contract("_local_scalar_dense", "nonzero", "masked_select", "_to_copy", "copy_", of_streams=True)
def host_reads(call: Call) -> Iterator[str]:
    """No step of engine torch after the first reads the device before the next step has begun (item, bool, tolist, cpu,
    nonzero, masks): the queue of kernels would run dry. The sizes of an exchange of experts are the exception.

    Source: torch 2.13 cuda/CUDAScalar.cu, _local_scalar_dense_cuda
    """
    if not call.values["where"].endswith("(host_sizes)"):
        yield f"the host waits in {call.values['where']}"


STREAMS = (order_of_streams, memory_of_another_stream, waits_of_the_host, copies_from_pageable_memory, host_reads)
