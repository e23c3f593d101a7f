"""The datasets of a run, opened and checked against each other, read in the order of law 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.directory import Manifest, read_manifest
from headrace.base.errors import ConfigError, DataError
from pipeline.config.schema import DataSection, SourceSection
from pipeline.data import megatron
from pipeline.data.dataset import TokenDataset, tokenizer_details
from pipeline.data.documents import Borders, join
from pipeline.data.files import OpenFiles
from pipeline.data.fim import Fim, make_fim
from pipeline.data.mixing_weights import Extent, make_order
from pipeline.data.order import SampleLocation, SampleOrder
from pipeline.data.packed import PackedDataset


class DataMixture:
    """The training samples of a run: global sample number -> T + 1 tokens.

    Args:
        sources: opened datasets, in the config's order.
        order: which window of which of them is sample i; or `weights`, the share of each, and the run's `seed`.
        fim: what the loader does to samples besides; `read` gives them as they lie.
    """

    def __init__(
        self,
        sources: Sequence[TokenDataset],
        *,
        order: SampleOrder | None = None,
        weights: Sequence[float] = (1.0,),
        seed: int = 0,
        fim: Fim | None = None,
    ) -> None:
        self.sources = list(sources)
        self.order = order or SampleOrder([s.windows for s in sources], weights=weights, seed=seed)
        self.sequence_length = sources[0].sequence_length
        self.fim = fim

    def read(self, samples: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Gathers samples.

        Args:
            samples: int64 [n], global sample numbers from 0.

        Returns:
            int64 [n, T + 1].
        """
        return self.rows(self.order.place(samples)).astype(np.int64)

    def rows(self, place: SampleLocation) -> npt.NDArray[Any]:
        """The samples of some places, [n, T + 1], in the dtype of the files."""
        present = np.unique(place.source)
        if present.size == 1:
            return self.sources[int(present[0])].rows(place.window)
        parts = [(mine := place.source == number, self.sources[number].rows(place.window[mine])) for number in present]
        width = self.sequence_length + 1
        rows: npt.NDArray[Any] = np.empty(
            (place.source.size, width), dtype=np.result_type(*(part.dtype for _, part in parts))
        )
        for mine, part in parts:
            rows[mine] = part
        return rows

    @property
    def masked(self) -> bool:
        """Whether some tokens are not learnt: those of conversations that the assistant does not say."""
        return any(source.masked for source in self.sources)

    def learnt(self, place: SampleLocation) -> npt.NDArray[np.bool_]:
        """For each token of the samples of some places whether the loss may be taken on it: bool [n, T + 1]."""
        learnt = np.empty((place.source.size, self.sequence_length + 1), dtype=np.bool_)
        for number in np.unique(place.source):
            mine = place.source == number
            learnt[mine] = self.sources[number].learnt(place.window[mine])
        return learnt

    def hint(self, place: SampleLocation) -> None:
        """Has the system begin to read what lies at some places, without waiting for it."""
        for number in np.unique(place.source):
            self.sources[number].hint(place.window[place.source == number])

    def borders(self, samples: npt.ArrayLike) -> Borders:
        """Where documents begin within samples; see `TokenDataset.borders`. No token is read."""
        place = self.order.place(samples)
        parts = []
        for number in np.unique(place.source):
            mine = np.flatnonzero(place.source == number)
            parts.append((mine, self.sources[number].borders(place.window[mine])))
        return join(parts)

    @property
    def packed(self) -> bool:
        """Whether samples are packed documents, and may end with padding."""
        return any(isinstance(source, PackedDataset) for source in self.sources)

    @property
    def parents(self) -> dict[str, Any]:
        """Path and fingerprint of every source, for manifests and for the check on resume."""
        found = {}
        for i, source in enumerate(self.sources):
            found[f"data.sources.{i}"] = {"path": str(source.path), "fingerprint": source.manifest.fingerprint}
            if isinstance(source, PackedDataset):
                packed = {"path": str(source.packed), "fingerprint": source.packing.fingerprint}
                found[f"data.sources.{i}.packing"] = packed
        return found

    @property
    def tokens(self) -> int:
        """Tokens in the training splits of all sources."""
        return sum(s.tokens for s in self.sources)


def open_mixture(data: DataSection, *, seed: int, extent: Extent | None = None) -> DataMixture:
    """Opens every source's train split.

    Args:
        data: the config's section.
        seed: the run's.
        extent: how long the run is; needed where there are stages or budgets, and for limits to be checked.

    Raises:
        DataError: a source is missing, damaged or too short.
        ConfigError: two sources were made with different tokenizers, or the shares do not fit the run.
    """
    files, manifests = OpenFiles(random_access=True), _Manifests()
    opened = [_open(source, i, data, files=files, manifests=manifests) for i, source in enumerate(data.sources)]
    for number, dataset in enumerate(opened):
        _check_tokenizer(f"data.sources.{number}.path", dataset, like=opened[0])
    if data.fim is not None and any(dataset.masked for dataset in opened):
        why = "tokens of conversations carry a loss mask, which moving their middles would tear apart"
        raise ConfigError("data.fim", why=why, remedy="remove the section, or train on them without it")
    order = make_order(data, [dataset.windows for dataset in opened], seed=seed, extent=extent)
    return DataMixture(opened, order=order, fim=_make_fim(data, opened[0], seed=seed))


def _make_fim(data: DataSection, dataset: TokenDataset, *, seed: int) -> Fim | None:
    if data.fim is None:
        return None
    eos = tokenizer_details(dataset.manifest).get("eos_id")
    return make_fim(data.fim, seed=seed, length=data.sequence_length, tokenizer=dataset.tokenizer, eos=eos)


def open_heldout(data: DataSection, blend: DataMixture) -> list[TokenDataset]:
    """Opens the held-out split of every source that has one, each once, in contiguous windows.

    Raises:
        DataError: one is damaged or too short.
        ConfigError: none of the sources has one, or a `heldout` was made with another tokenizer.
    """
    found = {(str(dataset.path), dataset.source): dataset for dataset in _heldout(data, blend)}
    if not found:
        why = "none of the sources has held-out text, so nothing could be evaluated"
        remedy = "name a tokens directory made with the same tokenizer"
        raise ConfigError("data.sources.0.heldout", why=why, remedy=remedy)
    return list(found.values())


def _heldout(data: DataSection, blend: DataMixture) -> Iterator[TokenDataset]:
    length = data.sequence_length
    for number, (section, dataset) in enumerate(zip(data.sources, blend.sources, strict=True)):
        splits = dataset.manifest.details["splits"]
        if section.heldout is not None:
            opened = _open_heldout(section.heldout, f"data.sources.{number}.heldout", length, of=dataset)
            _check_tokenizer(f"data.sources.{number}.heldout", opened, like=blend.sources[0])
            yield opened
        elif section.source is None and not megatron.is_prefix(section.path):
            yield TokenDataset.open(section.path, split="heldout", sequence_length=length, manifest=dataset.manifest)
        elif "heldout" in splits:  # a small source may have not one window of it
            about: dict[str, Any] = {"split": "heldout", "sequence_length": length, "source": section.source}
            if TokenDataset(dataset.path, dataset.manifest, **about).windows:
                yield TokenDataset.open(dataset.path, manifest=dataset.manifest, **about)


class _Manifests(dict[str, Manifest]):
    """Manifests of tokens directories, each read once however many of its sources are named."""

    def __missing__(self, path: str) -> Manifest:
        self[path] = read_manifest(path, kind="tokens")
        return self[path]


def _open(
    section: SourceSection, number: int, data: DataSection, *, files: OpenFiles, manifests: _Manifests
) -> TokenDataset:
    field = f"data.sources.{number}"
    if megatron.is_prefix(section.path):
        return _open_prefix(section, field, data, files=files)
    _refuse_suffix(section.path)
    manifest = manifests[section.path]
    if section.tokenizer is not None:
        why = f"{section.path} has its own, with which it was made"
        raise ConfigError(f"{field}.tokenizer", section.tokenizer, why=why, remedy="leave it out")
    kind = PackedDataset if data.packing == "best_fit" else TokenDataset
    return kind.open(
        section.path,
        split="train",
        sequence_length=data.sequence_length,
        source=section.source,
        manifest=manifest,
        files=files,
    )


def _open_prefix(section: SourceSection, field: str, data: DataSection, *, files: OpenFiles) -> TokenDataset:
    if section.tokenizer is None:
        why = f"{section.path}.idx does not say which tokenizer made it"
        raise ConfigError(f"{field}.tokenizer", why=why, remedy="name its Hugging Face folder")
    if section.source is not None:
        why = f"{section.path}.idx knows no sources"
        raise ConfigError(f"{field}.source", section.source, why=why, remedy="leave it out")
    if data.packing != "contiguous":
        why = f"{section.path} is not a tokens directory, which data_prep could have packed"
        raise ConfigError("data.packing", data.packing, why=why, remedy="contiguous")
    field = f"{field}.tokenizer"
    return _prefix(section.path, field, data.sequence_length, tokenizer=Path(section.tokenizer), files=files)


def _open_heldout(path: str, field: str, length: int, *, of: TokenDataset) -> TokenDataset:
    if megatron.is_prefix(path):
        return _prefix(path, field, length, tokenizer=of.tokenizer, split="heldout")
    _refuse_suffix(path)
    return TokenDataset.open(path, split="heldout", sequence_length=length)


def _prefix(
    path: str, field: str, length: int, *, tokenizer: Path, split: str = "train", files: OpenFiles | None = None
) -> TokenDataset:
    prefix = Path(path)
    manifest = megatron.described(prefix, tokenizer=str(tokenizer), field=field, split=split)
    about: dict[str, Any] = {"split": split, "sequence_length": length, "tokenizer": tokenizer, "files": files}
    dataset = TokenDataset(prefix, manifest, folder=prefix.parent, **about)
    dataset.refuse_short()
    return dataset


def _refuse_suffix(path: str) -> None:
    stem, dot, suffix = path.rpartition(".")
    if dot and suffix in ("bin", "idx") and megatron.is_prefix(stem):
        raise DataError(f"{path} is one file of a pair\n  try: {stem}")


def _check_tokenizer(field: str, dataset: TokenDataset, *, like: TokenDataset) -> None:
    own, first = (tokenizer_details(each.manifest)["fingerprint"] for each in (dataset, like))
    if own != first:
        why = f"its tokenizer is not that of {like.path}: the same id would mean different text"
        remedy = f'make it with "tokenizer": {{"path": "{like.tokenizer}"}}'
        raise ConfigError(field, str(dataset.path), why=why, remedy=remedy)
