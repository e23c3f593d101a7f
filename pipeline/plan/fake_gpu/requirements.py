"""Whether a step can be executed on the fake device. Imports no torch."""

from __future__ import annotations

import importlib.util

from foundation.errors import ConfigError
from pipeline.plan.fake_gpu import guard


def check_exact(engine: str, *, distils: bool, matrices: bool, exchange: str = "all_to_all") -> None:
    """Refuses a step that the fake device cannot execute, before data and model are read.

    Args:
        engine: engine of the config.
        distils: whether the run is a distillation.
        matrices: whether the optimizer exchanges whole matrices.
        exchange: exchange of experts (`parallel.ep_exchange`) of a run with expert parallelism.

    Raises:
        ConfigError: this machine cannot have the fake device, the engine's package is missing, or the config is one of
            the plain reference, a distillation, or one with Muon or kernels of another package.
    """
    why = _missing(engine, distils=distils, matrices=matrices, exchange=exchange)
    if why is not None:
        remedy = "leave it out: the closed formulas need nothing"
        raise ConfigError("--exact", True, why=why, remedy=remedy)


def _missing(engine: str, *, distils: bool, matrices: bool, exchange: str) -> str | None:
    if engine == "reference":
        return "the plain reference is not executed on the fake device, only the engines torch and deepspeed"
    if distils:
        return "the step of a distillation, with its teacher, is not executed on the fake device"
    if matrices:
        return "Muon's exchange of matrices needs other ranks' shards, and the fake device runs one rank alone"
    if exchange != "all_to_all":
        return f"{exchange}'s kernels run on GPUs alone (parallel.ep_exchange)"
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed, the config's engine, is not installed (pip install deepspeed)"
    return guard.missing()
