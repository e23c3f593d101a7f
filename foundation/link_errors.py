"""Errors of a broken link to another rank, told by their types and by the source path that gloo puts before its own.

Never by words such as "peer" or "broken pipe", which other errors have too ("CUDA error: peer access ..."). Seen with
torch 2.13 when a rank is killed: the store raises `DistNetworkError` or `DistStoreError`, NCCL `DistBackendError`, all
of them `torch.distributed.DistError`; gloo raises a plain RuntimeError that begins with the place in gloo's source:

    [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:61343. ...

The names of the types are compared, so that nothing here imports torch.
"""

from __future__ import annotations

import re

from foundation.errors import LostError

_GLOO = re.compile(
    r"^(Gloo connectFullMesh failed with )?\[[^\]\n]*/gloo/(transport|rendezvous)/[^\]\n]+\.(cc|h):\d+\] ", re.MULTILINE
)
"""Pattern of a line that begins with a source file of gloo's transports. Errors about an argument begin with `[enforce
fail at`; `monitored_barrier` puts a line of its own before it."""


def is_link_error(error: BaseException) -> bool:
    """Whether an error is the consequence of another rank's failure or of the network between them."""
    if isinstance(error, LostError):
        return True
    kinds = type(error).__mro__
    if any(kind.__name__ == "DistError" and kind.__module__.startswith("torch") for kind in kinds):
        return True
    return type(error) is RuntimeError and _GLOO.search(str(error)) is not None
