"""The replica: values that several ranks hold, and that should be the same bits on all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Replica:
    """This rank's copy of something.

    Attributes:
        name: of the parameter, as Hugging Face has it.
        values: any shape and dtype; the same shape on all ranks of the group.
        group: the ranks that hold it.
    """

    name: str
    values: Tensor
    group: dist.ProcessGroup
