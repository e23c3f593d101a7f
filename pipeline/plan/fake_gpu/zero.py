"""Patches that DeepSpeed needs on the fake device, beside torch's. Import it before deepspeed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import nn


@contextlib.contextmanager
def deepspeed_on_fake_device(*, rank: int, processes: int) -> Iterator[None]:
    """Makes DeepSpeed take the fake device for CUDA within the block, in a process that runs one layout only.

    Replaced are: moving a model to the device where it already is, which cannot replace fake parameters in place; and
    comparisons of numbers between ranks, since there are no other ranks.
    """
    launcher = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ.update({"DS_ACCELERATOR": "cuda", **{key: str(value) for key, value in launcher.items()}})
    import deepspeed.runtime.zero.parameter_offload as offload  # noqa: PLC0415  it looks for the device at import
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator  # noqa: PLC0415
    from deepspeed.runtime.zero import utils  # noqa: PLC0415

    compared = ("assert_lst_len_same_as_other_ranks", "assert_ints_same_as_other_ranks")
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "to", _already_there))
        for module in (utils, coordinator, offload):
            for name in compared:
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda *_args, **_kwargs: None))
        yield


def _already_there(module: nn.Module, *_args: Any, **_kwargs: Any) -> nn.Module:
    return module
