"""Metadata of a Hugging Face model folder: config.json and the safetensors headers. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from foundation.directory import MANIFEST, check_sizes, fingerprint_of, read_manifest, sha256_of_file
from foundation.errors import DataError
from foundation.foreign_folders import recognise, what_it_is
from foundation.foreign_json import read_json
from foundation.model_names import no_folder_problem
from foundation.remote_folder import local_folder
from pipeline.models.folder.extra_weights import extra_names
from pipeline.models.folder.weight_files import EXPORT, HfFields, TensorInfo, refuse_adapter, stored_tensors

CONFIG = "config.json"
_TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class ModelFolder:
    """A model folder, without loading the weights. Use `ModelFolder.open`.

    Attributes:
        path: the folder, on this host.
        config: the parsed config.json.
        tensors: tensor name -> its header entry, over all safetensors files, without `extra`.
        origin: the path, or the URL that `path` is a copy of.
        extra: tensors of layers that predict more tokens, which are no part of the language model.
    """

    path: Path
    config: HfFields
    tensors: dict[str, TensorInfo]
    origin: str
    extra: dict[str, TensorInfo] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path) -> ModelFolder:
        """Reads config.json and the headers, and checks every weight file's size.

        Raises:
            DataError: config.json or the weights are missing, damaged or ambiguous; the model needs code in the folder;
                a tied head has other values than the embedding; or a URL cannot be copied.
        """
        origin, path = str(path), local_folder(path)
        config = read_config(path)
        if (path / MANIFEST).is_file():
            check_sizes(path, read_manifest(path, kind="model"))
        tensors = stored_tensors(path)
        _check_head(path, config, tensors)
        beside = extra_names(config, tensors)
        main = {name: info for name, info in tensors.items() if name not in beside}
        return cls(path, config, main, origin, {name: tensors[name] for name in tensors if name in beside})

    @property
    def every(self) -> dict[str, TensorInfo]:
        """All tensors of the files, `extra` included."""
        return self.tensors | self.extra

    @property
    def files(self) -> list[Path]:
        """The safetensors files, by name."""
        return sorted({info.file for info in self.every.values()})

    @property
    def weight_bytes(self) -> int:
        """Size of the safetensors files on disk, headers included."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: rows of the embedding; token ids are below it."""
        return int(self._text_config("vocab_size"))

    @property
    def longest_sequence(self) -> int | None:
        """max_position_embeddings, or None if the config sets no limit."""
        longest = self._text_config("max_position_embeddings", None)
        return None if longest is None else int(longest)

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are tied; if the config has no such key, whether no head is stored."""
        declared = self._text_config("tie_word_embeddings", None)
        return "lm_head.weight" not in self.tensors if declared is None else bool(declared)

    @property
    def quantized_by(self) -> str | None:
        """The quantization method in `quantization_config`, or None for a floating-point model."""
        section = self.config.get("quantization_config")
        return None if section is None else str(section.get("quant_method", "unknown"))

    @property
    def quantizes_activations(self) -> bool:
        """Whether layers round their inputs at inference, according to `quantization_config`."""
        return any(group.get("input_activations") for group in scheme_groups(self.config))

    @property
    def dtype(self) -> str:
        """Torch name of the floating-point dtype with the most bytes."""
        sizes = {word: sum(i.bytes for i in self.tensors.values() if i.dtype == word) for word in _TORCH_DTYPES}
        return _TORCH_DTYPES[max(sizes, key=lambda word: sizes[word])]

    @property
    def fp32_beside(self) -> frozenset[str]:
        """fp32 tensors in a folder whose weights have 16 bits, e.g. a router's bias, states of a Mamba layer."""
        if self.dtype == _TORCH_DTYPES["F32"]:
            return frozenset()
        return frozenset(name for name, info in self.tensors.items() if info.dtype == "F32")

    @property
    def parameters(self) -> int:
        """Number of stored parameters; tied parameters count once. Only meaningful for unquantized folders."""
        return sum(prod(info.shape) for info in self.tensors.values())

    def fingerprint(self) -> str:
        """Returns the manifest's fingerprint; without a manifest, the SHA-256 over the files' checksums."""
        if (self.path / MANIFEST).is_file():
            return read_manifest(self.path, kind="model").fingerprint
        files = sorted(p for p in self.path.iterdir() if p.is_file())
        return fingerprint_of({file.name: sha256_of_file(file) for file in files})

    def _text_config(self, key: str, *default: Any) -> Any:
        """Returns a key of the config; multimodal models have it under `text_config`."""
        text = self.config.get("text_config", {})
        if key in self.config or key in text or default:
            return self.config.get(key, text.get(key, *default))
        raise DataError(f"{self.path / CONFIG} has no '{key}': not a language model's config\n  try: {EXPORT}")


def scheme_groups(config: HfFields) -> list[HfFields]:
    """Groups of layers in the quantization_config of a Hugging Face config, each with its own scheme."""
    return list(((config.get("quantization_config") or {}).get("config_groups") or {}).values())


def trained_data(path: Path) -> dict[str, Any]:
    """Returns section `data` of the config in a model directory's manifest, with current keys; {} without a manifest.

    Args:
        path: a Hugging Face folder or a directory with a GGUF file.
    """
    if not (path / MANIFEST).is_file():
        return {}
    section = read_manifest(path, kind="model").config.get("data")
    return section if isinstance(section, dict) else {}


def read_config(path: Path) -> HfFields:
    """Reads the config.json of a model folder; refuses an ambiguous one.

    Raises:
        DataError: there is no folder or readable config.json, it is an adapter, it needs to execute its own code, or
            keys contradict each other.
    """
    if not path.is_dir():
        why, remedy = no_folder_problem(str(path), EXPORT)
        known = recognise(path) if path.is_file() else None
        raise DataError(f"{path}: {why}\n  try: {known.remedy if known else remedy}")
    refuse_adapter(path)
    try:
        config = read_json(path / CONFIG, remedy=EXPORT)
    except FileNotFoundError:
        why = f"{path}: not a Hugging Face folder (no {CONFIG})"
        raise DataError(f"{why}{what_it_is(path, EXPORT)}") from None
    _refuse_remote_code(path, config)
    _refuse_two_ropes(path, config)
    return config


def _refuse_remote_code(path: Path, config: HfFields) -> None:
    """Refuses a model that needs code in its folder, which headrace never executes; known architectures do not."""
    code = config.get("auto_map")
    if not isinstance(code, dict) or not code.keys() & {"AutoConfig", "AutoModelForCausalLM"} or _has_package(config):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: PLC0415  takes seconds
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    kind = config.get("model_type")
    known = CONFIG_MAPPING_NAMES if "AutoModelForCausalLM" not in code else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in known:
        file = str(next(iter(code.values()))).partition(".")[0]
        why = f"transformers has no model_type {kind!r}, and the code in the folder ({file}.py) is not executed here"
        remedy = (
            "train it with a loop of your own, which loads it with trust_remote_code=True (docs/how-to/own-loop.md),"
            " or use a model whose architecture transformers has"
        )
        raise DataError(f"{path / CONFIG}: {why}\n  try: {remedy}")


def _has_package(config: HfFields) -> bool:
    """Whether transformers has a package with the architecture's name; does not import it, which takes seconds."""
    found, kind = find_spec("transformers"), str(config.get("model_type") or "")
    places = (found and found.submodule_search_locations) or ()
    return kind.isidentifier() and any((Path(place) / "models" / kind).is_dir() for place in places)


def _refuse_two_ropes(path: Path, config: HfFields) -> None:
    """Refuses `rope_scaling` that contradicts `rope_parameters`: programs use one or the other."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if not isinstance(old, dict) or not isinstance(new, dict):
        return
    same = {"rope_type": old.get("rope_type", old.get("type", "default")), **old}
    wrong = next((key for key, value in same.items() if key != "type" and new.get(key) != value), None)
    if wrong is not None:
        why = f"rope_scaling and rope_parameters differ in {wrong}: {same[wrong]!r} and {new.get(wrong)!r}"
        raise DataError(f"{path / CONFIG}: {why}\n  try: remove the one that is not meant")


def _check_head(path: Path, config: HfFields, tensors: dict[str, TensorInfo]) -> None:
    """Refuses a folder whose config ties the head to the embedding while its files have a head with other values.

    transformers then unties them with a warning; other programs ignore the head. Head and embedding are the two
    matrices [V, H] outside of the layers.
    """
    text = {**(config.get("text_config") or {}), **config}
    tie, vocabulary = text.get("tie_word_embeddings"), text.get("vocab_size")
    outside = {name: info for name, info in tensors.items() if not any(word.isdigit() for word in name.split("."))}
    wide = {name: info for name, info in outside.items() if len(info.shape) == 2 and info.shape[0] == vocabulary}
    heads = [name for name in wide if "head" in name or name.startswith(("embed_out", "output"))]
    if tie is False or not heads:
        return
    head = heads[0]
    first = next((name for name in wide if name not in heads and wide[name].shape == wide[head].shape), None)
    if first is None or wide[first].same_values(wide[head]) or not _ties(text):
        return
    how = "tie_word_embeddings is true" if tie else f"{text.get('model_type')} ties them where {CONFIG} says nothing"
    raise DataError(
        f"{path}: {how}, and {head} and {first} have different values: some programs use the head, some leave it out\n"
        f'  try: "tie_word_embeddings": false in {CONFIG}, if the head is meant; else remove {head} from the weights'
    )


def _ties(config: HfFields) -> bool:
    """Whether transformers ties the head; for some models (BigBird-Pegasus's decoder) it never does."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415  takes seconds

    kind, tie = config.get("model_type"), config.get("tie_word_embeddings")
    if kind not in CONFIG_MAPPING:
        return bool(tie)
    default = CONFIG_MAPPING[kind]()
    wanted = getattr(default, "tie_word_embeddings", False) if tie is None else tie
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(default), None)
    return bool(wanted) and (model is None or bool(model._tied_weights_keys))
