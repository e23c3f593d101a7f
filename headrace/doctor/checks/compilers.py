"""Check of a node: C compiler and Python.h, and a kernel that Inductor writes, compiles and runs (Triton on a GPU)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from foundation.errors import ConfigError
from headrace.doctor.check import Context, Finding

_FIRST_STEP = "a compiled run stops in its first step, on this node, while the others wait for it"


def run(context: Context) -> Iterator[Finding]:
    """Looks for the tools that Inductor needs, and compiles with them."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(context.work / f"inductor-{context.node}")  # nothing is compiled yet
    import torch  # noqa: PLC0415  only in the check's process

    from pipeline.config.sections.run import CompileSection  # noqa: PLC0415
    from pipeline.engines.parallel.compilation import check_compile  # noqa: PLC0415

    try:
        check_compile(CompileSection(enabled=True))
    except ConfigError as error:
        yield Finding(False, error.why, _FIRST_STEP, error.remedy)
        return
    yield Finding(True, "there are a compiler and Python.h")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel = "Triton" if device == "cuda" else "C++"
    if device == "cpu":
        yield Finding(None, "a Triton kernel needs a GPU")

    def double(values: torch.Tensor) -> torch.Tensor:
        return 2 * values + 1

    values, began = torch.arange(4096.0, device=device), time.monotonic()
    try:
        found = torch.compile(double, fullgraph=True)(values)
    except Exception as error:  # whatever a compiler does
        cause = " ".join(str(error).split())[:300]
        remedy = "mend the compiler; or --set compile.enabled=false, which is slower on a GPU"
        yield Finding(False, f"Inductor cannot compile a {kernel} kernel: {cause}", _FIRST_STEP, remedy)
        return
    if not torch.equal(found, double(values)):
        remedy = "install another version of torch or of the compiler"
        yield Finding(False, f"a {kernel} kernel of Inductor computes wrong numbers", "so would a training", remedy)
        return
    seconds = round(time.monotonic() - began, 2)
    yield Finding(True, f"Inductor's {kernel} kernel runs", figures={"compile_s": seconds})
