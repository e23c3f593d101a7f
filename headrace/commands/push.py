"""`headrace push DIRECTORY REPOSITORY`: uploads a finished directory, with its card, in one commit to the Hub."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from foundation.directory import MANIFEST, check_sizes, verify
from foundation.errors import DataError
from foundation.paths import LOCAL
from foundation.remote_directory import local_manifest
from foundation.storage import StorageError

_TEXT = """\
Pushes a finished directory to the Hugging Face Hub: a model to a model repository, tokens to a dataset repository.

Sizes and checksums are compared with the manifest first. All files and the card are one commit: a push that is killed
leaves no file in the repository, and repeated it sends only what is not there. The token is that of `hf auth login` or
HF_TOKEN, and must be allowed to write."""
CARD = "README.md"
_PAPERS = (CARD, "croissant.json", "training-content-summary.md", "sbom.cdx.json")
"""Files that `headrace card` may have written beside the files in the manifest."""
_TYPES = {"model": "model", "tokens": "dataset"}
"""Kind of a directory -> type of its repository."""
_MAIN = "main"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.description = _TEXT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "directory", metavar="DIRECTORY", type=LOCAL.as_path(), help="a model or tokens, finished, with a card"
    )
    parser.add_argument("repository", metavar="OWNER/NAME", help="repository of the Hub; created if it does not exist")
    parser.add_argument(
        "--revision",
        default=_MAIN,
        metavar="BRANCH",
        help="branch to push to; created from main if it does not exist (default: main)",
    )
    parser.add_argument("--private", action="store_true", help="create it private; a public one is refused")
    parser.add_argument("--dry-run", action="store_true", help="check, print what would be pushed; no network")


def run(arguments: argparse.Namespace) -> int:
    """Checks the directory, then pushes it or prints what would be pushed.

    Raises:
        DataError: the directory is unfinished or damaged, or the Hub refuses the push.
        StorageError: the Hub cannot be reached; a repetition is safe.
    """
    directory, repository, revision = arguments.directory, arguments.repository, arguments.revision
    _check_name(repository)
    repo_type, names = _checked(directory)
    sizes = {name: (directory / name).stat().st_size for name in names}
    total = f"{len(names)} files, {sum(sizes.values()) / 1e9:,.3f} GB"
    if arguments.dry_run:
        visibility = "private" if arguments.private else "the account's default visibility"
        print(f"{repository}: {repo_type} repository, revision {revision}, if new: {visibility}")
        for name, size in sizes.items():
            print(f"{size:>16,}  {name}")
        print(f"{total}; metadata of the card:\n{_front_matter(directory / CARD)}")
        return 0
    _check_account()
    with _explained(repository):
        url = _push(directory, names, repository, repo_type, revision, private=arguments.private)
    print(f"{repository}: {repo_type}, revision {revision}, {total}\n{url}")
    return 0


def _check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    from huggingface_hub.utils._validators import validate_repo_id  # noqa: PLC0415

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise DataError(f"{repository} is no name of a repository: {error}\n  try: OWNER/NAME") from None
    if "/" not in repository:
        raise DataError(f"{repository} has no owner\n  try: OWNER/{repository}, with your account or organization")


def _checked(directory: Path) -> tuple[str, list[str]]:
    """Checks sizes and checksums; returns the type of repository and the files to push."""
    manifest = local_manifest(directory)[1]
    if manifest.kind not in _TYPES:
        remedy = "headrace export, and push the model" if manifest.kind in ("run", "checkpoint") else "headrace copy"
        raise DataError(f"{directory} holds a '{manifest.kind}'; a model or tokens can be pushed\n  try: {remedy}")
    check_sizes(directory, manifest)
    if not (directory / CARD).is_file():
        raise DataError(f"{directory} has no card ({CARD})\n  try: headrace card {directory}")
    for name, right in verify(directory, manifest):
        if not right:
            raise DataError(f"{directory / name} has another checksum than {MANIFEST} says\n  try: make it again")
    papers = {name for name in _PAPERS if (directory / name).is_file()}
    return _TYPES[manifest.kind], sorted(papers | {MANIFEST, *manifest.files})


def _front_matter(card: Path) -> str:
    found = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8"), re.DOTALL)
    return found[1] if found else "none"


def _check_account() -> None:
    from huggingface_hub import constants, get_token  # noqa: PLC0415

    if constants.HF_HUB_OFFLINE:
        raise DataError("HF_HUB_OFFLINE=1 forbids the network\n  try: unset HF_HUB_OFFLINE, or --dry-run")
    if not get_token():
        raise DataError("there is no token of the Hugging Face Hub\n  try: hf auth login, or set HF_TOKEN")


def _push(directory: Path, names: list[str], repository: str, repo_type: str, revision: str, *, private: bool) -> str:
    """Creates the repository and the branch if they are missing, and commits; returns the commit's URL."""
    from huggingface_hub import CommitOperationAdd, HfApi  # noqa: PLC0415

    api = HfApi(library_name="headrace")
    api.create_repo(repository, repo_type=repo_type, private=private or None, exist_ok=True)
    if private and not api.repo_info(repository, repo_type=repo_type).private:
        raise DataError(f"{repository} is public, and --private was given\n  try: another name, or without --private")
    if revision != _MAIN:
        api.create_branch(repository, branch=revision, repo_type=repo_type, exist_ok=True)
    there: Any = api.repo_info(repository, repo_type=repo_type, revision=revision)
    _check_others([file.rfilename for file in there.siblings or ()], names, f"{repository}, revision {revision}")
    done = api.create_commit(
        repository,
        [CommitOperationAdd(path_in_repo=name, path_or_fileobj=directory / name) for name in names],
        commit_message=f"headrace push {directory.resolve().name}",
        repo_type=repo_type,
        revision=revision,
        parent_commit=there.sha,  # a concurrent writer's commit is refused, not mixed with this one
    )
    return done.commit_url


def _check_others(there: list[str], names: list[str], place: str) -> None:
    """Refuses to mix two directories: old shards beside new ones would be read together with them."""
    suffixes = {PurePosixPath(name).suffix for name in names} - {"", ".md"}
    others = sorted(name for name in set(there) - set(names) if PurePosixPath(name).suffix in suffixes)
    if others:
        why = f"{place} has {len(others)} files that this directory has not, such as {others[0]}"
        raise DataError(f"{why}\n  try: another repository or branch, or hf repos delete-files OWNER/NAME FILE")


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turns the Hub's errors within the block into errors with a remedy."""
    from huggingface_hub import errors  # noqa: PLC0415

    http_error = errors.HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2, by its version
    try:
        yield
    except (errors.HfHubHTTPError, http_error, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
        said = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        if status == 401:
            raise DataError(f"{repository}: the Hub does not accept the token: {said}\n  try: hf auth login") from None
        if status in (403, 404):
            remedy = "a token that may write, or a repository of your own: hf auth whoami"
            raise DataError(f"{repository}: the token may not write there: {said}\n  try: {remedy}") from None
        if status == 412:
            raise DataError(f"{repository}: it was committed to meanwhile: {said}\n  try: push again") from None
        if isinstance(cause, http_error):
            raise StorageError(f"{repository}: {said}\n  try: push again; what is there is not sent again") from None
        if isinstance(error, ValueError) and CARD in str(error):
            raise DataError(f"{repository}: the Hub refuses the card: {error}\n  try: mend {CARD}") from None
        raise
