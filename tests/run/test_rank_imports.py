"""What a rank imports beyond torch, the model's class and its engine's library: lists of modules, since times vary."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MODEL = "transformers.models.llama.modeling_llama"
IMPORTS = """
import contextlib, importlib, json, sys
base, engine = sys.argv[1].split(","), sys.argv[2]
from foundation.quick_imports import quick_imports
with contextlib.redirect_stdout(sys.stderr):
    with quick_imports():
        for name in base:
            importlib.import_module(name)
    before = {*sys.modules}
    from pipeline.run import session
    from pipeline.run.preload import preload
    preload([], [engine], ["llama"])
print(json.dumps(sorted({*sys.modules} - before)))
"""
UNUSED = ("pipeline.run.groups.islands", "pipeline.run.groups.replicas", "pipeline.run.distillation.")
OURS = {"headrace", "foundation", "data_prep", "pipeline"}
SMALL = {"annotated_types", "numpy", "orjson", "pydantic", "pydantic_core", "rich", "typing_inspection", "xxhash"}
"""Packages of a tenth of a second together; not among them: pyarrow, datasets, matplotlib, wandb."""
BUILDS = {
    "_distutils_hack",
    "_distutils_system_mod",
    "backports",
    "jaraco",
    "more_itertools",
    "packaging",
    "setuptools",
}
"""What `torch.utils.cpp_extension` imports, which builds deepspeed's operators at the first start.

`_distutils_system_mod` is a module of Debian's Python.
"""
COUNTERS = ("torch.utils.flop_counter", "torch.utils.module_tracker")
STAGES = ("torch.distributed.pipelining", "torch.distributed._composable.replicate_with_fsdp")
BUILDERS = (
    "torch._appdirs",
    "torch.utils._cpp_extension_versioner",
    "torch.utils.cpp_extension",
    "torch.utils.file_baton",
)
LIBRARIES = {"torch", "transformers", "deepspeed", "accelerate"}
# deepspeed imports the last two itself when it wraps a model; the first of them brings torch's compiler
DEEPSPEED = "deepspeed,deepspeed.runtime.zero.muon.muon_optimizer,deepspeed.module_inject.auto_ep_layer"


@pytest.mark.parametrize(
    ("engine", "base", "packages", "parts"),
    [
        ("torch", f"torch,{MODEL}", SMALL, COUNTERS + STAGES),
        ("deepspeed", f"torch,{MODEL},{DEEPSPEED}", SMALL | BUILDS, (*COUNTERS, *BUILDERS, "deepspeed.ops.op_builder")),
    ],
)
def test_a_plain_rank_imports_little_else(engine: str, base: str, packages: set[str], parts: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", IMPORTS, base, engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    beyond = [name for name in json.loads(done.stdout) if name.partition(".")[0] not in sys.stdlib_module_names]
    assert "pipeline.run.session" in beyond  # the list is what we think it is
    found = {name.partition(".")[0] for name in beyond}
    assert found - LIBRARIES - OURS <= packages
    # what a plain run does not use
    assert [name for name in beyond if name.startswith(UNUSED)] == []
    of_libraries = [name for name in beyond if name.partition(".")[0] in LIBRARIES]
    assert [name for name in of_libraries if not name.startswith(parts)] == []
