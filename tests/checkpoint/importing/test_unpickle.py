"""Members of enums as Python 3.11.0 to 3.11.3 pickles them, by `getattr`; and nothing else by that way."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.metadata import TORCH_METADATA
from pipeline.checkpoint.importing.dcp import _metadata
from pipeline.checkpoint.importing.unpickle import open_saved


class Attribute:
    """Is pickled as an attribute of an object."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self._owner, self._name)


def test_a_stage_of_deepspeed_is_read_in_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "optim_states.pt"
    for stage in (ZeroStageEnum.gradients, Attribute(ZeroStageEnum, "gradients")):
        torch.save({"zero_stage": stage}, path)
        assert int(open_saved(path)["zero_stage"]) == 2


def test_no_other_attribute_is_read_of_a_file_of_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "optim_states.pt"
    for name in ("__subclasses__", "mro", "no_member"):
        torch.save({"zero_stage": Attribute(ZeroStageEnum, name)}, path)
        with pytest.raises(CheckpointError, match=r"is damaged, or no file of torch\.save"):
            open_saved(path)


def test_metadata_of_torch_is_read_in_both_ways_and_no_other_attribute(tmp_path: Path) -> None:
    path = tmp_path / TORCH_METADATA
    for format_ in (
        _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
        Attribute(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT"),
    ):
        path.write_bytes(pickle.dumps(format_))
        assert isinstance(_metadata(tmp_path), _MEM_FORMAT_ENCODING)
    for owner, name in ((_MEM_FORMAT_ENCODING, "mro"), (TensorProperties, "create_from_tensor")):
        path.write_bytes(pickle.dumps(Attribute(owner, name)))
        with pytest.raises(CheckpointError, match=f"attribute '{name}' of .*, which is no member of an enum"):
            _metadata(tmp_path)
