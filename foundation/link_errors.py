"""Errors of a broken link to another rank, recognized by type and by the source path at the start of gloo's messages.

Words such as "peer" or "broken pipe" are not used: other errors have them too ("CUDA error: peer access ..."). Seen
with torch 2.13 when a rank is killed: the store raises `DistNetworkError` or `DistStoreError`, NCCL `DistBackendError`,
all of them `torch.distributed.DistError`; gloo raises a plain RuntimeError that begins with the place in gloo's source:

    [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:61343. ...

Types are compared by name: this module does not import torch.
"""

from __future__ import annotations

import re

from foundation.errors import LostError

_GLOO = re.compile(
    r"^(Gloo connectFullMesh failed with )?\[[^\]\n]*/gloo/(transport|rendezvous)/[^\]\n]+\.(cc|h):\d+\] ", re.MULTILINE
)
"""Pattern of a line that begins with a source file of gloo's transports. Errors about an argument begin with `[enforce
fail at`; `monitored_barrier` puts another line before it."""


def is_link_error(error: BaseException) -> bool:
    """Whether an error follows from another rank's failure or from the network between the ranks."""
    if isinstance(error, LostError):
        return True
    kinds = type(error).__mro__
    if any(kind.__name__ == "DistError" and kind.__module__.startswith("torch") for kind in kinds):
        return True
    return type(error) is RuntimeError and _GLOO.search(str(error)) is not None
