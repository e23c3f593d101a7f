"""`headrace push`, against a server that speaks the Hub's API: one commit, byte-equal when read back, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.directory import commit, fresh_staging
from tests.headrace.commands.writable_hub import READ_ONLY, TOKEN, WritableHub, writable_hub

READ_BACK = "import sys, huggingface_hub as h; print(h.snapshot_download(sys.argv[1], repo_type=sys.argv[2],"
READ_BACK += " revision=sys.argv[3], local_dir=sys.argv[4]))"
CARD = b"---\nlicense: apache-2.0\n---\n# A river\n"


@pytest.fixture
def hub() -> Iterator[WritableHub]:
    with writable_hub() as found:
        yield found


def directory(root: Path, kind: str = "model", card: bytes = CARD, **more: bytes) -> Path:
    """A finished directory with two files that go by LFS, and one below a folder."""
    final = root / kind
    staging = fresh_staging(final)
    (staging / "deep").mkdir()
    files = {"a.bin": b"a" * 20_000, "b.bin": b"b" * 30_000, "deep/c.json": b"{}", **more}
    for name, content in (files | ({"README.md": card} if card else {})).items():
        (staging / name).write_bytes(content)
    commit(staging, final, kind=kind, config={})
    return final


def environment(hub: WritableHub, tmp: Path, token: str | None = TOKEN, **more: str) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp / "hf"), "HF_HUB_OFFLINE": "0"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return kept | own | ({"HF_TOKEN": token} if token else {}) | more


def push(*arguments: str | Path, env: dict[str, str], code: int = 0) -> str:
    command = [sys.executable, "-m", "headrace", "push", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def contents(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize(("kind", "repo_type", "revision"), [("model", "model", "main"), ("tokens", "dataset", "s-1")])
def test_a_pushed_directory_is_one_commit_and_read_back_byte_equal(
    hub: WritableHub, tmp_path: Path, kind: str, repo_type: str, revision: str
) -> None:
    made, env = directory(tmp_path, kind), environment(hub, tmp_path)
    push(made, "me/river", "--revision", revision, "--private", env=env)
    repository = hub.repositories[f"{repo_type}s/me/river"]
    assert repository.private
    assert [len(commits) for commits in repository.branches.values()] == ([2] if revision == "main" else [1, 2])

    back = tmp_path / "back"
    command = [sys.executable, "-c", READ_BACK, "me/river", repo_type, revision, str(back)]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=300)
    read = contents(back)
    read.pop(".gitattributes")
    assert read == contents(made)


def test_a_killed_push_leaves_no_commit_and_its_repetition_sends_the_rest_only(
    hub: WritableHub, tmp_path: Path
) -> None:
    made, env = directory(tmp_path), environment(hub, tmp_path)
    hub.hang_after = 1
    command = [sys.executable, "-m", "headrace", "push", str(made), "me/river"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        assert hub.stuck.wait(60)
        process.kill()
    assert len(hub.repositories["models/me/river"].branches["main"]) == 1
    hub.hang_after = None
    sent = list(hub.objects)
    assert sent
    push(made, "me/river", env=env)
    assert all(hub.uploads.count(each) == 1 for each in sent)
    assert set(contents(made)) < set(hub.repositories["models/me/river"].branches["main"][-1])
    push(made, "me/river", env=env)
    assert len(hub.repositories["models/me/river"].branches["main"]) == 2  # nothing changed: no commit


def test_a_dry_run_prints_what_would_go_and_asks_nobody(hub: WritableHub, tmp_path: Path) -> None:
    env = environment(hub, tmp_path, token=None, HF_HUB_OFFLINE="1")
    said = push(directory(tmp_path), "me/river", "--dry-run", "--revision", "step-1000", env=env)
    assert "me/river: model repository, revision step-1000" in said
    assert "20,000  a.bin" in said
    assert "manifest.json" in said
    assert "license: apache-2.0" in said
    assert hub.repositories == {}


def test_what_the_hub_or_the_account_refuses_is_named(hub: WritableHub, tmp_path: Path) -> None:
    made = directory(tmp_path)
    for token, more, message in (
        (None, {}, "there is no token of the Hugging Face Hub"),
        (TOKEN, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE=1 forbids the network"),
        ("hf_wrong", {}, "the Hub does not accept the token"),
        (READ_ONLY, {}, "the token may not write there"),
    ):
        assert message in push(made, "me/river", env=environment(hub, tmp_path, token, **more), code=2)
    assert hub.repositories == {}
    env = environment(hub, tmp_path)
    push(made, "me/river", env=env)
    assert "is public, and --private was given" in push(made, "me/river", "--private", env=env, code=2)
    hub.repositories["models/me/river"].branches["main"][-1]["old.bin"] = b"1"
    assert "files that this directory has not, such as old.bin" in push(made, "me/river", env=env, code=2)


def test_a_directory_that_is_not_whole_is_refused_before_the_network(hub: WritableHub, tmp_path: Path) -> None:
    env = environment(hub, tmp_path)
    assert "has no card" in push(directory(tmp_path, "tokens", card=b""), "me/river", env=env, code=2)
    assert "holds a 'checkpoint'" in push(directory(tmp_path, "checkpoint"), "me/river", env=env, code=2)
    made = directory(tmp_path)
    assert "has no owner" in push(made, "river", env=env, code=2)
    (made / "a.bin").write_bytes(b"x" * 20_000)
    assert "has another checksum" in push(made, "me/river", env=env, code=2)
    (made / "a.bin").write_bytes(b"x")
    assert "truncated or overwritten" in push(made, "me/river", env=env, code=2)
    assert hub.repositories == {}


def test_a_commit_of_another_writer_meanwhile_and_a_hub_that_is_away_say_push_again(
    hub: WritableHub, tmp_path: Path
) -> None:
    env = environment(hub, tmp_path)
    hub.moves = True
    assert "it was committed to meanwhile" in push(directory(tmp_path), "me/river", env=env, code=2)
    assert "old.bin" in hub.repositories["models/me/river"].branches["main"][-1]
    gone = environment(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")  # the discard port: nobody listens
    assert "what is there is not sent again" in push(tmp_path / "model", "me/river", env=gone, code=2)
