"""Pre-flight check of DeepSpeed features this machine lacks. DeepSpeed is imported only if a check needs it."""

from __future__ import annotations

from headrace.base.errors import ConfigError
from pipeline.config.sections.deepspeed import Fp16Section, ZeroSection


def check_machine(zero: ZeroSection, fp16: Fp16Section) -> None:
    """Refuses configs that DeepSpeed would fail at on this machine later, with a less helpful error.

    Raises:
        ConfigError: offload to NVMe without libaio; fp16 with ZeRO on a processor that DeepSpeed does not run it on.
    """
    for name in ("offload_optimizer", "offload_param"):
        if getattr(zero, name).device == "nvme" and not _has_libaio():
            why = "DeepSpeed reads and writes the disk through libaio, which is not installed"
            remedy = "install libaio-dev and g++ (Debian) or libaio-devel and gcc-c++, or use device cpu"
            raise ConfigError(f"zero_optimization.{name}.device", "nvme", why=why, remedy=remedy)
    if fp16.enabled and zero.stage > 0 and not _runs_fp16():
        why = f"DeepSpeed does not run fp16 with ZeRO-{zero.stage} on this machine's processor"
        raise ConfigError("fp16.enabled", True, why=why, remedy="use bf16, zero_optimization.stage 0, or a GPU")


def _has_libaio() -> bool:
    """Compiles and links a few lines against libaio, as DeepSpeed does before it builds its AIO operator."""
    from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: PLC0415  imports for seconds

    return bool(AsyncIOBuilder().is_compatible())


def _runs_fp16() -> bool:
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415

    return bool(get_accelerator().is_fp16_supported())
