"""Pre-flight check of DeepSpeed features this machine lacks. DeepSpeed is imported only if a check needs it."""

from __future__ import annotations

import torch

from foundation.errors import ConfigError
from pipeline.config.sections.deepspeed import Fp16Section, ZeroSection


def check_machine(zero: ZeroSection, fp16: Fp16Section) -> None:
    """Refuses configs that DeepSpeed would fail at on this machine later, with a less helpful error.

    Raises:
        ConfigError: libaio, or on a GPU the CUDA toolkit, is missing for offload to NVMe; or DeepSpeed does not run
            fp16 with ZeRO on this processor.
    """
    for name in ("offload_optimizer", "offload_param"):
        if getattr(zero, name).device == "nvme":
            _check_async_io(f"zero_optimization.{name}.device")
    if fp16.enabled and zero.stage > 0 and not _runs_fp16():
        why = f"DeepSpeed does not run fp16 with ZeRO-{zero.stage} on this machine's processor"
        raise ConfigError("fp16.enabled", True, why=why, remedy="use bf16, zero_optimization.stage 0, or a GPU")


def _check_async_io(field: str) -> None:
    if not _has_libaio():
        why = "DeepSpeed reads and writes the disk through libaio, which is not installed"
        remedy = "install libaio-dev and g++ (Debian) or libaio-devel and gcc-c++"
    elif _lacks_cuda_toolkit():
        why = "DeepSpeed compiles its AIO operator with the CUDA toolkit, which is not found"
        remedy = f"install the CUDA toolkit {torch.version.cuda}, and set CUDA_HOME to its directory"
    else:
        return
    raise ConfigError(field, "nvme", why=why, remedy=f"{remedy}, or use device cpu")


def _lacks_cuda_toolkit() -> bool:
    """Whether DeepSpeed would compile its AIO operator for a GPU without the toolkit, which ends in a TypeError.

    The operator is not compiled if it was built when DeepSpeed was installed (DS_BUILD_AIO).
    """
    from deepspeed.git_version_info import installed_ops  # noqa: PLC0415
    from torch.utils.cpp_extension import CUDA_HOME  # noqa: PLC0415

    compiles_for_cuda = torch.cuda.is_available() and torch.version.hip is None
    return compiles_for_cuda and CUDA_HOME is None and not installed_ops.get("async_io", False)


def _has_libaio() -> bool:
    """Compiles and links a few lines against libaio, as DeepSpeed does before it builds its AIO operator."""
    from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: PLC0415  imports for seconds

    return bool(AsyncIOBuilder().is_compatible())


def _runs_fp16() -> bool:
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415

    return bool(get_accelerator().is_fp16_supported())
