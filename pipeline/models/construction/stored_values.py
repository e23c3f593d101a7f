"""Reads parameter values from a Hugging Face folder's safetensors files: only the requested part of one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from foundation.errors import DataError
from foundation.foreign_json import read_json
from foundation.remote_folder import local_folder
from pipeline.models.construction.buffers import buffer_shapes
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.extra_tensors import (
    SCALE,
    block_size,
    extra_of,
    is_ignored,
    scaled,
    stored_extras,
    whole,
)
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.meta import parameter_shapes
from pipeline.models.construction.rectangle import Rectangle, part
from pipeline.models.construction.stored_names import TensorGroup, groups_of_files
from pipeline.models.folder.extra_weights import extra_names, layer_number
from pipeline.models.folder.multi_token_names import MODULES, module_names, renamed_stored
from pipeline.models.folder.text_part import TextPart, text_is_nested, text_part
from pipeline.models.folder.weight_files import INDEX, HfFields, stored_tensors
from pipeline.models.multi_token import modules_of

_WRAPPERS = ("_orig_mod", "module", "base_model.model", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Prefixes that torch.compile, DDP, DeepSpeed, peft and FSDP add to the names in modules that they wrap."""


class FromSafetensors:
    """Values read from the safetensors files of a Hugging Face folder.

    Tensors that transformers renames, fuses or splits while it loads a folder are converted in the same way. Weights in
    fp8 with a scale per block are multiplied by their scales.

    For a tensor that is only renamed, only the bytes of the requested box are read. Tensors that are fused or split
    (stacked experts) and fp8 weights are read whole, one at a time.

    Args:
        folder: path or URL of a folder with model.safetensors, or model.safetensors.index.json and its shards.
        model: model on any device; the files must contain all its parameters with their shapes, and no others. The
            model's code computes persistent buffers that the files lack, as in exports of older versions.
        rename: function from a name in the model to the original's, if `model` keeps only some of its layers.
        partial: whether the files may contain other tensors (a model that keeps only some layers).
        initial: values of modules for multi-token prediction that the files lack; None if no values are read.
        modules: whether such modules are read from the files, if these have them.

    Attributes:
        folder: the folder on this host.
        left_out: names in the files of tensors that the architecture does not use: layers that predict more tokens,
            and what reads images in a multimodal model.
        part: the tensors of a multimodal model, if `model` is its decoder; else None.
        fresh: prefixes of the names of modules for multi-token prediction that have their values from `initial`.

    Raises:
        DataError: tensors are missing or unexpected, shapes are wrong, a tied weight has other values, or
            `stored_tensors` refuses the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        rename: Callable[[str], str] = lambda name: name,
        partial: bool = False,
        initial: ParameterValues | None = None,
        modules: bool = True,
    ) -> None:
        self.folder, self._model, self._rename = local_folder(folder), model, rename
        self._stored = self._files = stored_tensors(self.folder)
        self._config = _fields(self.folder)
        self.part: TextPart | None = None
        if text_is_nested(self.folder, str(getattr(model.config, "model_type", ""))):
            self.part = text_part(self.folder, self._stored)
            self._stored = self.part.inside
        self._initial, self._of_kind = initial, module_names(str(getattr(model.config, "model_type", "")))
        depth = len(modules_of(model))
        if depth and modules:
            self._stored = renamed_stored(self._stored, self._of_kind, layers=self._layers, depth=depth)
        prefixes = (f"{MODULES}.{k}." for k in range(depth))
        self.fresh = tuple(p for p in prefixes if not any(name.startswith(p) for name in self._stored))
        self._block = block_size(self.folder)
        self.left_out: list[str] = []
        self._last: tuple[TensorGroup, dict[str, Tensor]] | None = None
        parameters, buffers = parameter_shapes(model), buffer_shapes(model)
        parameters = {name: shape for name, shape in parameters.items() if not name.startswith(self.fresh)}
        known = {rename(name) for name in (*parameters, *buffers)}
        scales = {name for name in self._stored if name.removesuffix(SCALE) in self._stored.keys() - {name}}
        groups = groups_of_files(model, self._stored.keys() - scales, known)
        self._group_of, shapes = self._results(groups, known)
        self._check_names(parameters, groups, known, partial=partial)
        self._buffers = {name for name in buffers if rename(name) in self._group_of}
        for name, shape in parameters.items() | {(name, buffers[name]) for name in self._buffers}:
            found = tuple(shapes[rename(name)])
            if found != tuple(shape):
                raise DataError(f"{folder}: {rename(name)} has shape {found}, but config.json makes it {tuple(shape)}")

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Reads the values of a parameter; see `ParameterValues.value`."""
        if name.startswith(self.fresh):
            assert self._initial is not None, name
            return self._initial.value(name, box=box, device=device)
        return self._read(name, box).to(device).to(torch.float32)

    def buffer(self, name: str) -> Tensor | None:
        """Reads a persistent buffer, in the dtype of the files; see `ParameterValues.buffer`."""
        return self._read(name) if name in self._buffers else None

    def extras(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Reads the tensors of `left_out` one at a time; see `stored_extras`."""
        return stored_extras(self.folder, self._files, self.left_out, dtype=dtype)

    @property
    def unread_modules(self) -> list[str]:
        """Names in the files of tensors of modules for multi-token prediction, of a form that is not known."""
        return sorted(extra_names(self._config, self.left_out)) if self.fresh else []

    @property
    def _layers(self) -> int:
        """Number of decoder layers in the files."""
        config: Any = self._model.config
        text = {**self._config, **(self._config.get("text_config") or {})}
        return int(text.get("num_hidden_layers") or config.num_hidden_layers)

    def _read(self, name: str, box: Rectangle | None = None) -> Tensor:
        group = self._group_of[self._rename(name)]
        if box is not None and group.converter is None and group.key + SCALE not in self._stored:
            return self._slice(group.names[0], box)
        return part(self._full(name, group), box)

    def _slice(self, name: str, box: Rectangle) -> Tensor:
        stored = self._stored[name]
        with safe_open(stored.file, framework="pt") as file:
            mapped: Tensor = file.get_slice(stored.name)[box.slices] if box.sizes else file.get_tensor(stored.name)
            return mapped.clone(memory_format=torch.contiguous_format)  # reads only the pages of the box

    def _full(self, name: str, group: TensorGroup) -> Tensor:
        if self._last is None or self._last[0] is not group:
            self._last = None
            made = group.convert({each: self._tensor(each) for each in group.names}, self._model)
            self._last = (group, made) if len(made) > 1 else None  # reads a tensor that is split only once
            return made[self._rename(name)]
        return self._last[1][self._rename(name)]

    def _tensor(self, name: str) -> Tensor:
        tensor = whole(self._stored[name])
        if name + SCALE not in self._stored:
            return tensor
        return scaled(tensor, whole(self._stored[name + SCALE]), self._block)

    def _results(
        self, groups: list[TensorGroup], known: Collection[str]
    ) -> tuple[dict[str, TensorGroup], dict[str, torch.Size]]:
        """Returns conversions and shapes of the model's tensors, each by its name in the model."""
        of: dict[str, TensorGroup] = {}
        shapes: dict[str, torch.Size] = {}
        for group in groups:
            if group.converter is None and group.key not in known:
                continue
            tensors = {name: torch.empty(self._stored[name].shape, device="meta") for name in group.names}
            try:
                made = group.convert(tensors, self._model)
            except (RuntimeError, ValueError, IndexError) as error:
                why = f"{group.names[0]} and {len(tensors) - 1} more do not make {group.key}: {error}"
                raise DataError(f"{self.folder}: {why}\n  try: download or export the folder again") from None
            of |= dict.fromkeys(made, group)
            shapes |= {name: value.shape for name, value in made.items()}
        return of, shapes

    def _check_names(
        self, parameters: Mapping[str, Any], groups: list[TensorGroup], known: Collection[str], *, partial: bool
    ) -> None:
        missing = sorted(name for name in parameters if self._rename(name) not in self._group_of)
        used = {name for group in self._group_of.values() for name in group.names if group.key in known}
        extra = sorted({name for group in groups for name in group.names} - used)
        self._check_tied({group.key: group.names[0] for group in groups if group.converter is None})
        left_out, beyond = extra_of(self._model, extra, self._config), extra_names(self._config, extra)
        # patterns of transformers match numbers of layers, also of those that are not kept
        left_out = [n for n in left_out if not partial or n in beyond or layer_number(n) < 0]
        unexpected = set(extra) - set(left_out)
        self.left_out = [self._stored[n].name for n in left_out] + list(self.part.beside if self.part else ())
        extra = [] if partial else [n for n in sorted(unexpected) if not _ignorable(n, self._model, parameters)]
        if missing or extra:
            raise DataError(
                f"{self.folder}: the files do not contain the model that config.json describes\n"
                f"  missing ({len(missing)}): {', '.join(missing[:5]) or '-'}\n"
                f"  unexpected ({len(extra)}): {', '.join(extra[:5]) or '-'}\n"
                f"  try: {self._remedy(missing, extra)}"
            )

    def _remedy(self, missing: list[str], extra: list[str]) -> str:
        """Returns a remedy that makes the names match; loading by transformers is none: it draws missing tensors."""
        wrappers = _wrappers(self._stored)
        if wrappers:
            return _without_wrappers(self.folder, wrappers)
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        heads = {name for name, module in self._model.named_modules() if module is head and head is not None}
        if not extra and {name.rpartition(".")[0] for name in missing} <= heads:
            tied = '"tie_word_embeddings": true in config.json, if the head is the embedding'
            return f"{tied}; else add {', '.join(missing)} to the files"
        layers, depth = [layer_number(name) for name in extra], self._config.get("num_hidden_layers")
        if not missing and isinstance(depth, int) and min(layers, default=-1) >= depth:
            total = max(layers) + 1
            return (
                f'"num_hidden_layers": {total} in config.json, as the files have it; a run trains the first layers with'
                f" model.keep_layers {list(range(depth)) if depth < 9 else f'[0, ..., {depth - 1}]'}"
            )
        return (
            "download or export config.json and the weights again, both of one model (transformers would load the"
            " folder, and draw missing tensors at random)"
        )

    def _check_tied(self, names: Mapping[str, str]) -> None:
        """Refuses a stored copy of a tied weight with other values: transformers would untie it with a warning.

        Args:
            names: name in the model -> name in the files.
        """
        for target, source in _tied(self._model).items():
            one, other = (names.get(self._rename(each)) for each in (target, source))
            if one is not None and other is not None and not self._stored[one].same_values(self._stored[other]):
                why = f"config.json ties {one} to {other}, and the files have different values for them"
                remedy = f'"tie_word_embeddings": false in config.json, if {one} is meant; else remove it'
                raise DataError(f"{self.folder}: {why}\n  try: {remedy}")


def _fields(folder: Path) -> HfFields:
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


def _wrappers(names: Iterable[str]) -> list[str]:
    """Prefixes that wrappers (torch.compile, DDP, FSDP, peft) have added to all names."""
    found = [sorted({part for part in _WRAPPERS if f".{part}." in f".{name}"}) for name in names]
    return sorted({part for parts in found for part in parts}) if found and all(found) else []


def _without_wrappers(folder: Path, wrappers: list[str]) -> str:
    """Returns a shell command that rewrites the folder without the wrappers' parts of names."""
    out = f"{folder}-renamed"
    parts = "|".join(re.escape(part) for part in wrappers)
    code = (
        "import re; from glob import glob; from safetensors.torch import load_file, save_file;"
        f" [save_file({{re.sub(r'(^|(?<=[.]))({parts})[.]', '', k): v for k, v in load_file(f).items()}},"
        f" f.replace('{folder}', '{out}', 1), metadata={{'format': 'pt'}})"
        f" for f in glob('{folder}/model*.safetensors')]"
    )
    index = f" && sed -i -E 's/([\".])(({parts})[.])+/\\1/g' {out}/{INDEX}" if (folder / INDEX).is_file() else ""
    named = " and ".join(f"'{part}.'" for part in wrappers)
    return (
        f"take {named}, which a wrapper has put into every name, out of them:"
        f' cp -rL {folder} {out} && python -c "{code}"{index}'
    )


def _ignorable(name: str, model: nn.Module, parameters: Mapping[str, Any]) -> bool:
    """Whether a stored tensor can be ignored, since the model has no such parameter.

    True for a rotary table of old files, a weight that the model ties to another, and tensors that transformers ignores
    for this architecture (layers that predict several tokens).
    """
    tied = _tied(model)
    if name not in parameters and (name in tied or name in tied.values()):
        return True
    return name.endswith("rotary_emb.inv_freq") or is_ignored(model, name)


def _tied(model: nn.Module) -> dict[str, str]:
    """Maps the name of a tied parameter to the name of the parameter that it is tied to."""
    return getattr(model, "all_tied_weights_keys", None) or {}
