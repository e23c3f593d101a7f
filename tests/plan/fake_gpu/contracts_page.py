"""Makes `docs/reference/contracts.md` from the table of contracts: `python -m tests.plan.fake_gpu.contracts_page`."""

from __future__ import annotations

from pipeline.plan.fake_gpu.contracts import Contract, table
from tests.conftest import ROOT

PAGE = ROOT / "docs/reference/contracts.md"
HEAD = """# Contracts of CUDA

What operators demand on a GPU and forgive on a CPU. A fake step (`headrace check --exact`, `make sweep-gpu`) checks
every call: kernels, collectives, copies, and the order of streams and events. A call that breaks a contract ends the
step with the contract's name, the operator, the shapes and the source.

```console
$ headrace check --config ds_configs/fsdp.json --processes 2 --exact
```

Values are not checked: fake tensors have none. Sources without a version are of torch 2.13: `torch/cuda/_sanitizer.py`
and other files of the package, `c10d/` in `torch/csrc/distributed`, the rest in `aten/src/ATen/native`. The page is
made by `python -m tests.plan.fake_gpu.contracts_page`.
"""


def page() -> str:
    rows = "\n".join(_row(each) for each in table())
    return f"{HEAD}\n| operators | demand | source |\n|---|---|---|\n{rows}\n"


def _row(contract: Contract) -> str:
    operators = ", ".join(f"`{each}`" if "_" in each else each for each in contract.operators)
    return f"| {operators} | {contract.demand} | {contract.source.removeprefix('torch 2.13 ')} |"


if __name__ == "__main__":
    PAGE.write_text(page())
