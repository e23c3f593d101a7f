"""The work directory of a calibration: finished layers, and the hidden states that go into the next one.

It lies beside the output, as `.NAME.work`, and its `work.json` has a fingerprint of config, model and data. A layer is
finished when its file has its name; the input of the next layer is written before that. So a killed calibration resumes
at its current layer, and a calibration with another fingerprint starts from an empty directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from foundation.directory import code_version, fingerprint_of, sha256_of_file, sync, write_json
from pipeline.checkpoint.export.write_safetensors import METADATA
from pipeline.compress.quantization.rules import LAYERS, QuantizationPlan, work_path
from pipeline.models import rounding

_ABOUT = "work.json"
_USED = ("scheme", "method", "smoothing", "rotation", "calibration", "group_size", "skip", "dtype", "head")
"""Keys of the config that determine the bytes of a layer, besides the data."""


@dataclass(frozen=True)
class CalibrationWork:
    """A work directory. Create it with `CalibrationWork.open`."""

    path: Path

    @classmethod
    def open(cls, plan: QuantizationPlan) -> CalibrationWork:
        """Opens the directory of a plan; empties it if config, model, dataset or version differ."""
        path, about = work_path(plan.output) / LAYERS, {"fingerprint": _fingerprint(plan)}
        try:
            same = json.loads((path / _ABOUT).read_text()) == about
        except (OSError, ValueError):
            same = False
        if not same:
            (path / _ABOUT).unlink(missing_ok=True)  # first: a half-emptied directory must match no plan
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / _ABOUT, about)
        return cls(path)

    @property
    def done(self) -> int:
        """Number of finished decoder layers from the first on, without a gap."""
        number = 0
        while self.layer(number).is_file():
            number += 1
        return number

    def layer(self, number: int) -> Path:
        """File of a layer's packed tensors."""
        return self.path / f"layer-{number:05d}.safetensors"

    def finish(self, number: int, tensors: Mapping[str, Tensor], hidden: Sequence[Tensor]) -> None:
        """Writes a layer's tensors, and the hidden states after it (none for the last layer)."""
        if hidden:
            _save({str(at): states for at, states in enumerate(hidden)}, self._hidden(number + 1))
        _save(tensors, self.layer(number))
        self._hidden(number).unlink(missing_ok=True)

    def hidden(self, number: int) -> list[Tensor]:
        """Reads the hidden states that go into a layer."""
        found = load_file(self._hidden(number))
        return [found[str(at)] for at in range(len(found))]

    def _hidden(self, number: int) -> Path:
        return self.path / f"hidden-{number:05d}.safetensors"


def sources() -> list[Path]:
    """Source files whose code determines the bytes of a layer."""
    return [*sorted(Path(__file__).parent.glob("*.py")), Path(rounding.__file__)]


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=METADATA)
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def _fingerprint(plan: QuantizationPlan) -> str:
    assert plan.calibration is not None
    config = plan.config.model_dump(mode="json")
    return fingerprint_of(
        {
            "config": {key: config[key] for key in _USED},
            "schemes": {name: [each.name, each.group] for name, each in plan.schemes.items()},
            "windows": [plan.config.data.sequence_length, plan.config.data.batch_size],
            "model": plan.source.fingerprint(),
            "data": plan.calibration.manifest.fingerprint,
            # version and commit do not show later edits
            "code": [code_version(), *map(sha256_of_file, sources())],
        }
    )
