"""Data mixture: opens the datasets of a run, checks that they fit together, and reads samples in global order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.formats.packfile import packing_name
from foundation.directory import Manifest, read_manifest
from foundation.errors import ConfigError, DataError
from foundation.paths import is_url
from foundation.remote_folder import local_folder
from pipeline.config.sections.data import DataSection, SourceSection
from pipeline.data import in_place
from pipeline.data.dataset import TokenDataset, UnknownIdError, tokenizer_details
from pipeline.data.documents import DocumentBoundaries, join
from pipeline.data.files import OpenFiles
from pipeline.data.fim import Fim, make_fim
from pipeline.data.in_place import InPlace
from pipeline.data.mixing_weights import Extent, make_order
from pipeline.data.packed import PackedDataset
from pipeline.data.remote_shards import RemoteShards, masks
from pipeline.data.sample_order import OrderStart, SampleLocation, SampleOrder
from pipeline.data.span_cache import Bytes


class DataMixture:
    """The training samples of a run: maps a global sample number to T + 1 tokens.

    Args:
        sources: opened datasets, in the config's order.
        order: order of the samples; None makes it from mixing `weights` and the run's `seed`.
        fim: fill-in-the-middle transformation, which the loader applies; `read` returns samples without it.
        remote: reader of the sources that are in object stores.
    """

    def __init__(
        self,
        sources: Sequence[TokenDataset],
        *,
        order: SampleOrder | None = None,
        weights: Sequence[float] = (1.0,),
        seed: int = 0,
        fim: Fim | None = None,
        remote: RemoteShards | None = None,
    ) -> None:
        self.sources, self.remote = list(sources), remote or RemoteShards()
        self.order = order or SampleOrder([s.windows for s in sources], weights=weights, seed=seed)
        self.sequence_length = sources[0].sequence_length
        self.fim = fim

    def read(self, samples: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Reads samples.

        Args:
            samples: int64 [n], global sample numbers from 0.

        Returns:
            int64 [n, T + 1].
        """
        return self.rows(self.order.locate(samples)).astype(np.int64)

    def rows(self, location: SampleLocation) -> npt.NDArray[Any]:
        """Reads the samples at the given locations, [n, T + 1], in the dtype of the files."""
        present = np.unique(location.source)
        if present.size == 1:
            return self.sources[int(present[0])].rows(location.window)
        masks = [location.source == number for number in present]
        parts = []
        for number, mine in zip(present, masks, strict=True):
            try:
                parts.append((mine, self.sources[number].rows(location.window[mine])))
            except UnknownIdError as error:
                error.row = int(np.flatnonzero(mine)[error.row])
                raise
        width = self.sequence_length + 1
        rows: npt.NDArray[Any] = np.empty(
            (location.source.size, width), dtype=np.result_type(*(part.dtype for _, part in parts))
        )
        for mine, part in parts:
            rows[mine] = part
        return rows

    @property
    def masked(self) -> bool:
        """Whether any source has a loss mask, as conversations do: only the assistant's tokens are targets."""
        return any(source.masked for source in self.sources)

    def loss_mask(self, location: SampleLocation) -> npt.NDArray[np.bool_]:
        """Reads the loss mask of the samples at the given locations: bool [n, T + 1]."""
        loss_mask = np.empty((location.source.size, self.sequence_length + 1), dtype=np.bool_)
        for number in np.unique(location.source):
            mine = location.source == number
            loss_mask[mine] = self.sources[number].loss_mask(location.window[mine])
        return loss_mask

    def read_ahead(self, location: SampleLocation, masks_of: SampleLocation | None = None, *, step: int = 0) -> None:
        """Starts reading samples in the background (readahead), by the kernel or from object stores.

        Args:
            location: locations of the samples.
            masks_of: locations of the samples whose loss masks are read.
            step: the first optimizer step that reads them.
        """
        for source, windows in self._by_source(location):
            if source.files is not self.remote:
                source.read_ahead(windows)
        for source, windows in self._by_source(masks_of):
            if source.files is not self.remote:
                source.read_ahead_masks(windows)
        self.remote.read_parts_ahead(self.remote_parts(location, masks_of), step)

    def remote_parts(self, location: SampleLocation, masks_of: SampleLocation | None) -> list[list[Bytes]]:
        """Spans in object stores that hold the tokens and the loss masks of the samples at the given locations."""
        tokens, of_masks = [], []
        for source, windows in self._by_source(location):
            if source.files is self.remote:
                tokens += self.remote.tokens(source.shard_spans(windows))
        for source, windows in self._by_source(masks_of):
            if source.files is self.remote and source.masked:
                of_masks += masks(source.shard_spans(windows))
        return [list(dict.fromkeys(spans)) for spans in (tokens, of_masks)]

    def remote_shards(self, location: SampleLocation) -> list[str]:
        """Shards in object stores whose index is read for the document boundaries of samples, each once."""
        found = [
            source.prefixes(windows)
            for source, windows in self._by_source(location)
            if source.files is self.remote and not isinstance(source, PackedDataset)
        ]
        return [prefix for prefixes in found for prefix in prefixes]

    def _by_source(self, location: SampleLocation | None) -> Iterator[tuple[TokenDataset, npt.NDArray[np.int64]]]:
        if location is not None:
            for number in np.unique(location.source):
                yield self.sources[number], location.window[location.source == number]

    def boundaries(self, samples: npt.ArrayLike) -> DocumentBoundaries:
        """Returns the document boundaries within samples; see `TokenDataset.boundaries`. No token is read."""
        location = self.order.locate(samples)
        parts = []
        for number in np.unique(location.source):
            mine = np.flatnonzero(location.source == number)
            parts.append((mine, self.sources[number].boundaries(location.window[mine])))
        return join(parts)

    @property
    def packed(self) -> bool:
        """Whether samples are packed documents, which may end with padding."""
        return any(isinstance(source, PackedDataset) for source in self.sources)

    @property
    def parents(self) -> dict[str, Any]:
        """Path and fingerprint of every source, for manifests and for the check on resume."""
        found = {}
        for i, source in enumerate(self.sources):
            found[f"data.sources.{i}"] = {"path": source.origin, "fingerprint": source.manifest.fingerprint}
            if isinstance(source, PackedDataset):
                place = f"{source.origin}/{packing_name(source.sequence_length)}"
                packed = {"path": place, "fingerprint": source.packing.fingerprint}
                found[f"data.sources.{i}.packing"] = packed
        return found

    @property
    def tokens(self) -> int:
        """Tokens in the training splits of all sources."""
        return sum(s.tokens for s in self.sources)


def open_mixture(
    data: DataSection,
    *,
    seed: int,
    extent: Extent | None = None,
    start: OrderStart | None = None,
    stat_files: bool = True,
) -> DataMixture:
    """Opens every source's train split.

    Args:
        data: the config's section.
        seed: seed of the run.
        extent: length of the run; needed for a curriculum, for budgets, and to check limits on repetition.
        start: where the order of a later stage begins.
        stat_files: whether to compare the sizes of the files with the manifests now.

    Raises:
        DataError: a source is missing, damaged or too short.
        ConfigError: two sources were made with different tokenizers, or budgets and limits do not fit the run.
    """
    files, manifests, remote = OpenFiles(random_access=True), _Manifests(), RemoteShards()
    pools: dict[str, Any] = {"files": files, "manifests": manifests, "remote": remote, "stat_files": stat_files}
    opened = [_open(source, i, data, **pools) for i, source in enumerate(data.sources)]
    for number, dataset in enumerate(opened):
        _check_tokenizer(f"data.sources.{number}.path", dataset, like=opened[0])
    if data.fim is not None and any(dataset.masked for dataset in opened):
        why = "conversations have a loss mask, which fill-in-the-middle would misalign"
        raise ConfigError("data.fim", why=why, remedy="remove the section, or the sources of conversations")
    order = make_order(data, [dataset.windows for dataset in opened], seed=seed, extent=extent, start=start)
    return DataMixture(opened, order=order, fim=_make_fim(data, opened[0], seed=seed), remote=remote)


def _make_fim(data: DataSection, dataset: TokenDataset, *, seed: int) -> Fim | None:
    if data.fim is None:
        return None
    eos = tokenizer_details(dataset.manifest).get("eos_id")
    return make_fim(data.fim, seed=seed, length=data.sequence_length, tokenizer=dataset.tokenizer, eos=eos)


def open_heldout(data: DataSection, mixture: DataMixture, *, stat_files: bool = True) -> list[TokenDataset]:
    """Opens the held-out split of every source that has one, each split once, as contiguous windows.

    Args:
        data: the config's section.
        mixture: the train splits of the run.
        stat_files: whether to compare the sizes of the files with the manifests now.

    Raises:
        DataError: a held-out split is damaged or too short.
        ConfigError: no source has a held-out split, or a `heldout` was made with another tokenizer.
    """
    found = {(dataset.origin, dataset.source): dataset for dataset in _heldout(data, mixture, stat_files)}
    if not found:
        why = "none of the sources has held-out text (heldout_fraction 0?), so nothing could be evaluated"
        remedy = "name a tokens directory made with the same tokenizer, or --set evaluation.samples=0 for no evaluation"
        raise ConfigError("data.sources.0.heldout", why=why, remedy=remedy)
    return list(found.values())


def _heldout(data: DataSection, mixture: DataMixture, stat_files: bool) -> Iterator[TokenDataset]:
    length = data.sequence_length
    for number, (section, dataset) in enumerate(zip(data.sources, mixture.sources, strict=True)):
        splits = dataset.manifest.details["splits"]
        if section.heldout is not None:
            about: dict[str, Any] = {"of": dataset, "remote": mixture.remote.another(), "stat_files": stat_files}
            opened = _open_heldout(section.heldout, f"data.sources.{number}.heldout", length, **about)
            _check_tokenizer(f"data.sources.{number}.heldout", opened, like=mixture.sources[0])
            yield opened
        elif "heldout" not in splits:  # read in place, or made with heldout_fraction 0
            continue
        elif section.source is None:
            yield TokenDataset.open(split="heldout", sequence_length=length, **_again(dataset, stat_files))
        else:  # a small source's split may be shorter than one window
            about = {"split": "heldout", "sequence_length": length, "source": section.source}
            if TokenDataset(dataset.path, dataset.manifest, **about).windows:
                yield TokenDataset.open(**_again(dataset, stat_files), **about)


def _again(dataset: TokenDataset, stat_files: bool) -> dict[str, Any]:
    """Arguments that open another split of the same directory."""
    remote = {"files": dataset.files.another()} if isinstance(dataset.files, RemoteShards) else {}
    return {"path": dataset.origin, "manifest": dataset.manifest, "stat_files": stat_files, **remote}


class _Manifests(dict[str, Manifest]):
    """Manifests of tokens directories; each is read once, however many sources of the directory are in the mixture."""

    def __missing__(self, path: str) -> Manifest:
        self[path] = read_manifest(path, kind="tokens")
        return self[path]


def _open(
    section: SourceSection,
    number: int,
    data: DataSection,
    *,
    files: OpenFiles,
    manifests: _Manifests,
    remote: RemoteShards,
    stat_files: bool,
) -> TokenDataset:
    field = f"data.sources.{number}"
    about: dict[str, Any] = {"files": files, "stat_files": stat_files}
    if is_url(section.path):
        about["files"] = remote
    elif (found := in_place.find(section.path)) is not None:
        return _open_in_place(found, section, field, data, files=files)
    else:
        _refuse_suffix(section.path)
        about["manifest"] = manifests[section.path]
    if section.tokenizer is not None:
        why = f"{section.path} has the tokenizer that it was made with"
        raise ConfigError(f"{field}.tokenizer", section.tokenizer, why=why, remedy="leave it out")
    kind = PackedDataset if data.packing == "best_fit" else TokenDataset
    return kind.open(section.path, split="train", sequence_length=data.sequence_length, source=section.source, **about)


def _open_in_place(
    found: InPlace, section: SourceSection, field: str, data: DataSection, *, files: OpenFiles
) -> TokenDataset:
    if section.tokenizer is None:
        why = f"{found.index} does not name the tokenizer that made it"
        if (named := found.tokenizer_name) is not None:
            why = f"{found.path} was made with {named}, and has no copy of it"
        raise ConfigError(f"{field}.tokenizer", why=why, remedy="name its Hugging Face folder")
    if section.source is not None:
        why = f"{section.path} is a {found.kind} dataset, which has no named sources"
        raise ConfigError(f"{field}.source", section.source, why=why, remedy="leave it out")
    if data.packing != "contiguous":
        why = f"{section.path} is a {found.kind} dataset, which is read in place and cannot be packed"
        remedy = f"use contiguous, or headrace import {section.path} OUT --tokenizer {section.tokenizer}"
        raise ConfigError("data.packing", data.packing, why=why, remedy=remedy)
    about: dict[str, Any] = {"tokenizer": local_folder(section.tokenizer), "files": files}
    return _in_place(found, f"{field}.tokenizer", data.sequence_length, **about)


def _open_heldout(
    path: str, field: str, length: int, *, of: TokenDataset, remote: RemoteShards, stat_files: bool
) -> TokenDataset:
    if not is_url(path) and (found := in_place.find(path)) is not None:
        return _in_place(found, field, length, tokenizer=of.tokenizer, split="heldout")
    _refuse_suffix(path)
    files = remote if is_url(path) else None
    return TokenDataset.open(path, split="heldout", sequence_length=length, files=files, stat_files=stat_files)


def _in_place(
    found: InPlace, field: str, length: int, *, tokenizer: Path, split: str = "train", files: OpenFiles | None = None
) -> TokenDataset:
    manifest = in_place.manifest_of(found, tokenizer=str(tokenizer), field=field, split=split)
    about: dict[str, Any] = {"split": split, "sequence_length": length, "tokenizer": tokenizer, "files": files}
    dataset = TokenDataset(found.path, manifest, folder=found.folder, **about)
    dataset.check_not_empty()
    return dataset


def _refuse_suffix(path: str) -> None:
    stem, dot, suffix = path.rpartition(".")
    if dot and suffix in ("bin", "idx") and in_place.find(stem) is not None:
        raise DataError(f"{path} is one file of a Megatron-LM dataset\n  try: {stem}")


def _check_tokenizer(field: str, dataset: TokenDataset, *, like: TokenDataset) -> None:
    own, first = (tokenizer_details(each.manifest)["fingerprint"] for each in (dataset, like))
    if own != first:
        why = f"its tokenizer differs from that in {like.origin}: the same id would mean different text"
        remedy = f'make it with "tokenizer": {{"path": "{like.tokenizer}"}}'
        raise ConfigError(field, dataset.origin, why=why, remedy=remedy)
