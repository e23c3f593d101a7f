"""`-m headrace.doctor.checks.endless_operator FOLDER ARGUMENTS`: pipeline/train.py, whose ranks can be made to hang.

Every rank writes its process id into the folder. After SIGURG the next layer of its model calls an operator that does
not end: on a GPU kernels that only wait, on a CPU a call of C without Python's lock. SIGWINCH: a call that holds it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from foundation.cli import guarded, leave
from pipeline.train import main as train


def _on_signal(number: int, _frame: object) -> None:
    from torch.nn.modules.module import register_module_forward_pre_hook  # noqa: PLC0415

    # in an operator, as a wrong kernel would: not inside a collective, where this process may be just now
    register_module_forward_pre_hook(lambda module, _: None if [*module.children()] else _hang(number))


def _hang(number: int) -> None:
    import torch  # noqa: PLC0415

    if number == signal.SIGURG and torch.cuda.is_available():
        for _ in range(1000):
            torch.cuda._sleep(10**11)  # type: ignore[no-untyped-call]  # a minute each
        return
    while True:
        (ctypes.CDLL if number == signal.SIGURG else ctypes.PyDLL)(None).sleep(1_000_000)


def main() -> int:
    """Trains."""
    folder = Path(sys.argv.pop(1))
    if "RANK" in os.environ:
        for number in (signal.SIGURG, signal.SIGWINCH):
            signal.signal(number, _on_signal)
        (folder / f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    return train()


if __name__ == "__main__":
    leave(guarded(main))
