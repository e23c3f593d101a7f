"""The models of a comparison, checked before the first is loaded. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.tokenizer.fingerprint import TOKENIZER_JSON
from foundation.directory import MANIFEST, check_sizes, read_manifest
from foundation.errors import ConfigError
from pipeline.data.dataset import TokenDataset, tokenizer_details
from pipeline.evaluation.consumers.consumer import CONSUMERS
from pipeline.evaluation.consumers.description import GGUF, GGUF_FILE, ModelDescription, describe
from pipeline.evaluation.consumers.gate import POSITIONS
from pipeline.evaluation.heldout.data import FieldNames, HeldOutData, as_trained, open_heldout
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.gguf.vocabulary import first_difference, stored_tokens

NAMES = FieldNames("--data", "--sequence-length")
_PROMPT_TOKENS, _NEW_TOKENS = 32, 64


@dataclass(frozen=True)
class ModelCandidate:
    """A model and the consumer that serves it.

    Attributes:
        name: name in the comparison.
        path: folder of the model.
        about: format and scheme of the model.
        folder: metadata of the folder; None for a GGUF file.
        consumer: name of the consumer.
        not_run: why the consumer does not run; None when it does.
    """

    name: str
    path: Path
    about: ModelDescription
    folder: ModelFolder | None
    consumer: str
    not_run: str | None

    @property
    def weight_bytes(self) -> int:
        """Size of the files with weights, in bytes."""
        return (self.path / GGUF_FILE).stat().st_size if self.folder is None else self.folder.weight_bytes


@dataclass(frozen=True)
class Wanted:
    """The measurements to make beside the loss.

    Attributes:
        positions: largest number of positions whose distributions are compared.
        batches: batch sizes at which generation is timed; () for none.
        prompt_tokens: prompt tokens of each timed sequence; fewer where windows are short.
        new_tokens: generated tokens of each timed sequence; fewer where windows are short.
        prompts: texts that every model continues by greedy decoding.
        sample_tokens: new tokens for each prompt.
    """

    positions: int = POSITIONS
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = _PROMPT_TOKENS
    new_tokens: int = _NEW_TOKENS
    prompts: tuple[str, ...] = ()
    sample_tokens: int = 64


@dataclass(frozen=True)
class ModelComparison:
    """Checked models and the data on which they are scored.

    Attributes:
        candidates: models, of which the first is the reference of KL and top-1 agreement.
        data: the held-out section.
        dataset: opened split of `data`.
        vocabulary: V, the smallest vocabulary of all models.
        wanted: measurements to make beside the loss.
    """

    candidates: tuple[ModelCandidate, ...]
    data: HeldOutData
    dataset: TokenDataset
    vocabulary: int
    wanted: Wanted = field(default_factory=Wanted)


def check(
    models: Mapping[str, Path],
    *,
    data: HeldOutData,
    consumers: Sequence[str] | None = None,
    wanted: Wanted | None = None,
) -> ModelComparison:
    """Opens every model and the data.

    Args:
        models: name -> folder; the first is the reference.
        data: held-out section; fields not given in it default to the first model's training.
        consumers: names, each of which serves every model of its format; None for transformers and llama.cpp.
        wanted: measurements to make beside the loss; None for the defaults.

    Raises:
        ConfigError: no model, an unknown consumer, a different tokenizer, no tokenizer for the prompts, windows that
            are too long, or unusable numbers.
        DataError: a folder is missing or damaged.
    """
    wanted = wanted or Wanted()
    _check_numbers(wanted)
    if not models:
        raise ConfigError("--model", why="there is nothing to compare", remedy="give --model NAME=FOLDER")
    names = tuple(consumers) if consumers is not None else ("transformers", "llama.cpp")
    for name in names:
        if name not in CONSUMERS:
            raise ConfigError("--consumers", name, why="no such consumer", remedy=f"use {', '.join(CONSUMERS)}")
    opened = {name: _open(Path(path)) for name, path in models.items()}
    data = as_trained(data, Path(next(iter(models.values()))))
    folders = [folder for _, folder in opened.values() if folder is not None]
    datasets = [open_heldout(data, folder, names=NAMES) for folder in folders]
    dataset = (
        datasets[0]
        if datasets
        else TokenDataset.open(data.path, split=data.split, sequence_length=data.sequence_length)
    )
    sizes = [folder.vocab_size for folder in folders] or [_tokenizer_size(dataset)]
    for name, (_, folder) in opened.items():
        if folder is None:
            _check_gguf_tokenizer(Path(models[name]) / GGUF_FILE, dataset)
        elif wanted.prompts:
            _check_has_tokenizer(folder.path)
    found = [row for name, (about, folder) in opened.items() for row in _rows(name, models[name], about, folder, names)]
    return ModelComparison(tuple(found), data, dataset, min(sizes), wanted)


def parameters_of(candidate: ModelCandidate) -> int | None:
    """Number of parameters, tied ones once, by the manifest, the headers, or a quantized folder's architecture."""
    if (candidate.path / MANIFEST).is_file():
        recorded = read_manifest(candidate.path, kind="model").details.get("parameters")
        if recorded is not None:
            return int(recorded)
    if candidate.folder is None:
        return None
    if candidate.folder.quantized_by is None:
        return candidate.folder.parameters
    from pipeline.models.folder.loading import empty_model  # noqa: PLC0415  (brings in torch)

    return int(sum(parameter.numel() for parameter in empty_model(candidate.path).parameters()))


def _open(path: Path) -> tuple[ModelDescription, ModelFolder | None]:
    about = describe(path)
    if about.scheme_format != GGUF:
        return about, ModelFolder.open(path)
    if (path / MANIFEST).is_file():
        check_sizes(path, read_manifest(path, kind="model"))
    return about, None


def _tokenizer_size(dataset: TokenDataset) -> int:
    return int(str(tokenizer_details(dataset.manifest)["vocab_size"]))


def _check_gguf_tokenizer(file: Path, dataset: TokenDataset) -> None:
    """Checks that ids mean the same tokens in file and data; only their number if the data lacks its tokenizer."""
    tokens, tokenizer = stored_tokens(file), dataset.path / "tokenizer" / TOKENIZER_JSON
    size, why = _tokenizer_size(dataset), None
    if tokenizer.is_file():
        why = first_difference(tokens, tokenizer)
    elif size > len(tokens):
        why = f"it has {len(tokens)} tokens, and the data's tokenizer {size}"
    if why is not None:
        why, remedy = f"{file} has another tokenizer: {why}", "evaluate on a dataset tokenized with the model's own"
        raise ConfigError(NAMES.path, str(dataset.path), why=why, remedy=remedy)


def _check_has_tokenizer(path: Path) -> None:
    if not any((path / name).is_file() for name in (TOKENIZER_JSON, "tokenizer_config.json")):
        raise ConfigError(
            "--prompt", why=f"{path} has no tokenizer to read a text with", remedy="copy the tokenizer's files there"
        )


def _rows(
    name: str, path: Path, about: ModelDescription, folder: ModelFolder | None, consumers: Sequence[str]
) -> Iterator[ModelCandidate]:
    """Yields a row for each consumer of the model's format; if there is none, one row with the reason."""
    own: dict[str, Any] = {"name": name, "path": Path(path), "about": about, "folder": folder}
    fitting = [each for each in consumers if (each == "llama.cpp") == (about.scheme_format == GGUF)]
    for each in fitting:
        yield ModelCandidate(**own, consumer=each, not_run=CONSUMERS[each].refuses(about) or CONSUMERS[each].missing())
    if not fitting:
        reason = "; ".join(f"{each}: {CONSUMERS[each].refuses(about)}" for each in consumers)
        yield ModelCandidate(**own, consumer="none", not_run=reason)


def _check_numbers(wanted: Wanted) -> None:
    if wanted.positions < 1:
        raise ConfigError("--positions", wanted.positions, why="it is not 1 or more", remedy="use 1 or more")
    for batch in wanted.batches:
        if batch < 1:
            raise ConfigError("--batches", batch, why="a batch has a sequence at least", remedy="use 1,8")
    if wanted.sample_tokens < 1:
        raise ConfigError("--tokens", wanted.sample_tokens, why="it is not 1 or more", remedy="use 1 or more")
    if "" in wanted.prompts:
        raise ConfigError("--prompt", "", why="generation needs at least one token", remedy="give some text")
