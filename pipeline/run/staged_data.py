"""A run's data on a disk of the node (`data.stage_to`): copied before training, read from there, removed on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headrace.base.directory import Manifest
from pipeline.config.sections.data import DataSection
from pipeline.data.dataset import TokenDataset
from pipeline.data.mixture import DataMixture
from pipeline.data.staging import StagedCopy, check_space, copy_path, in_use, remove_copy, stage


def check_stage_space(data: DataSection, mixture: DataMixture) -> None:
    """Refuses a run whose data does not fit on this node's disk, before a process group is made.

    Raises:
        DataError: see `check_space`.
    """
    if data.stage_to is not None:
        for path, manifest in _directories(mixture).items():
            check_space(Path(data.stage_to), path, manifest)


@contextmanager
def staged_data(
    data: DataSection,
    mixture: DataMixture,
    heldout: Sequence[TokenDataset],
    *,
    say: Callable[[str], None],
    progress: Callable[[], None],
) -> Iterator[Callable[[bool], None]]:
    """Copies the run's tokens directories to this node's disk, or waits for it, and has the datasets read from there.

    Args:
        data: the config's section.
        mixture, heldout: the run's datasets.
        say: takes a line for people about each directory.
        progress: is called meanwhile.

    Yields:
        What removes the copies, given whether the run has finished; it does nothing with `data.stage_keep`.

    Raises:
        DataError: see `stage`.
    """
    copies: list[StagedCopy] = []
    with ExitStack() as stack:
        if data.stage_to is not None:
            for path, manifest in _directories(mixture).items():
                to = Path(data.stage_to)
                stack.enter_context(in_use(copy_path(to, path, manifest)))
                copy = stage(to, path, manifest, progress=progress)
                say(str(copy))
                copies.append(copy)
                for dataset in (*mixture.sources, *heldout):
                    if dataset.path == path:
                        dataset.read_from(copy.path)

        def clean_up(finished: bool) -> None:
            stack.close()
            for copy in copies if finished and not data.stage_keep else ():
                remove_copy(copy.path)

        yield clean_up


def _directories(mixture: DataMixture) -> dict[Path, Manifest]:
    """The tokens directories of the mixture, each once; what is read in place has no checksums and stays."""
    return {each.path: each.manifest for each in mixture.sources if not each.in_place}
