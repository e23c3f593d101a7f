"""Law 6: a directory that has its name is complete; anything else is not there under its name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundation.directory import (
    check_sizes,
    code_version,
    commit,
    existing_parent,
    final_name,
    free_bytes,
    read_manifest,
    staging_path,
    verify,
    write_manifest,
)
from foundation.errors import DataError
from tests.conftest import ROOT


def build(final: Path, text: str = "water") -> None:
    staging = staging_path(final)
    (staging / "sub").mkdir(parents=True)
    (staging / "a.txt").write_text(text)
    (staging / "sub" / "b.bin").write_bytes(b"\0" * 100)
    commit(staging, final, kind="tokens", config={"k": 1}, details={"n": 2})


def test_several_processes_may_write_one_file_at_once(tmp_path: Path) -> None:
    write = """
import sys
from pathlib import Path
from foundation.directory import write_json
for n in range(300):
    write_json(Path("shared.json"), {"n": n})
"""
    writers = [subprocess.Popen([sys.executable, "-c", write], cwd=tmp_path) for _ in range(3)]
    while any(writer.poll() is None for writer in writers):
        if (tmp_path / "shared.json").exists():
            json.loads((tmp_path / "shared.json").read_text())
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["shared.json"]


def test_free_space_is_that_of_the_nearest_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for missing in (tmp_path / "a" / "b", Path("a") / "b"):
        assert existing_parent(missing) == tmp_path
    (tmp_path / "a").mkdir()
    assert existing_parent(Path("a")) == Path("a")
    assert existing_parent(Path("a") / "b" / "c") == tmp_path / "a"
    free = shutil.disk_usage(tmp_path).free
    assert free_bytes(tmp_path / "x" / "y") == pytest.approx(free, rel=0.2)  # others write meanwhile


def test_a_committed_directory_is_described_by_its_manifest(tmp_path: Path) -> None:
    build(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out", kind="tokens")
    assert set(manifest.files) == {"a.txt", "sub/b.bin"}
    assert (manifest.config, manifest.details) == ({"k": 1}, {"n": 2})
    assert all(whole for _, whole in verify(tmp_path / "out", manifest))
    assert not staging_path(tmp_path / "out").exists()


def test_everything_is_flushed_before_a_directory_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, flushed = tmp_path / "tokens", list[tuple[str, bool]]()
    monkeypatch.setattr("foundation.directory.sync", lambda path: flushed.append((path.name, final.exists())))
    build(final)
    *parts, last = flushed
    names = ["a.txt", "b.bin", "manifest.json", "sub", staging_path(final).name]
    assert sorted(parts) == sorted((name, False) for name in names)
    assert last == (tmp_path.name, True)


def test_equal_bytes_have_equal_fingerprints_and_other_bytes_have_not(tmp_path: Path) -> None:
    for name, text in (("one", "x"), ("two", "x"), ("three", "y")):
        build(tmp_path / name, text)
    prints = [read_manifest(tmp_path / name, kind="tokens").fingerprint for name in ("one", "two", "three")]
    assert prints[0] == prints[1] != prints[2]
    assert (tmp_path / "one/manifest.json").read_bytes() == (tmp_path / "two/manifest.json").read_bytes()


def test_an_existing_directory_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    build(tmp_path / "out", "old")
    staging = staging_path(tmp_path / "out")
    staging.mkdir()
    (staging / "a.txt").write_text("new")
    with pytest.raises(DataError, match="exists already"):
        commit(staging, tmp_path / "out", kind="tokens", config={})
    commit(staging, tmp_path / "out", kind="tokens", config={}, replace=True)
    assert (tmp_path / "out/a.txt").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_truncation_and_loss_are_found_by_size_and_a_flipped_byte_by_checksum(tmp_path: Path) -> None:
    build(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out", kind="tokens")
    path = tmp_path / "out/sub/b.bin"
    path.write_bytes(b"\0" * 50 + b"\1" + b"\0" * 49)
    check_sizes(tmp_path / "out", manifest)
    assert dict(verify(tmp_path / "out", manifest)) == {"a.txt": True, "sub/b.bin": False}
    for size in (99, 101):
        path.write_bytes(b"\0" * size)
        with pytest.raises(DataError, match=rf"b\.bin has {size} bytes, the manifest says 100"):
            check_sizes(tmp_path / "out", manifest)
    path.unlink()
    with pytest.raises(DataError, match=r"b\.bin is missing"):
        check_sizes(tmp_path / "out", manifest)


def test_a_directory_that_was_moved_aside_when_its_replacer_died_gets_its_name_back(tmp_path: Path) -> None:
    build(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    staging = staging_path(tmp_path / "out")
    staging.mkdir()
    with pytest.raises(DataError, match="exists already"):
        commit(staging, tmp_path / "out", kind="tokens", config={})
    assert (tmp_path / "out/a.txt").read_text() == "old"


def test_files_get_the_mode_that_open_would_give_them(tmp_path: Path) -> None:
    staging = staging_path(tmp_path / "out")
    staging.mkdir()
    (staging / "private").write_text("x")
    (staging / "private").chmod(0o600)
    commit(staging, tmp_path / "out", kind="tokens", config={})
    (tmp_path / "usual").write_text("x")
    assert (tmp_path / "out/private").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/hostname"])
def test_a_manifest_that_names_files_outside_its_directory_is_refused(tmp_path: Path, name: str) -> None:
    write_manifest(tmp_path, kind="tokens", config={}, files={name: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(DataError, match=f"json names {name}, which is not in its directory: refused"):
        read_manifest(tmp_path, kind="tokens")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "tokens"}', "\x00\xff", "[" * 100_000])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    build(tmp_path / "out")
    (tmp_path / "out/manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path / "out", kind="tokens")


def test_a_manifest_in_which_one_character_changed_is_damaged(tmp_path: Path) -> None:
    build(tmp_path / "out")
    path = tmp_path / "out/manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"bytes": 100', '"bytes": 101'))
    with pytest.raises(DataError, match=r"manifest\.json is damaged: its checksum"):
        read_manifest(tmp_path / "out", kind="tokens")
    path.write_text(text)
    read_manifest(tmp_path / "out", kind="tokens")


def test_a_commit_does_not_change_the_umask_of_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging/a").write_text("a")
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", lambda _mask: pytest.fail("the umask belongs to the whole process"))
            commit(tmp_path / "staging", tmp_path / "final", kind="tokens", config={})
    finally:
        os.umask(before)
    assert (tmp_path / "final/a").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == ["a", "manifest.json"]


def test_a_directory_of_another_kind_is_refused_with_how_to_make_the_right_one(tmp_path: Path) -> None:
    build(tmp_path / "out")
    with pytest.raises(DataError, match=r"holds a 'tokens', but a 'model' is needed\n.*headrace export"):
        read_manifest(tmp_path / "out", kind="model")


WRITER = """
import sys
from pathlib import Path
from foundation.directory import commit, staging_path
final = Path(sys.argv[1])
staging = staging_path(final)
staging.mkdir()
for i in range(400):
    (staging / f"{i}.bin").write_bytes(bytes([i % 256]) * 200_000)
print("written", flush=True)
commit(staging, final, kind="tokens", config={})
print("committed", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3])
def test_a_process_killed_while_committing_leaves_all_or_nothing(tmp_path: Path, delay_s: float) -> None:
    final = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(final)], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    time.sleep(delay_s)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if final.exists():
        manifest = read_manifest(final, kind="tokens")
        assert len(manifest.files) == 400
        assert all(whole for _, whole in verify(final, manifest))
    else:
        assert staging_path(final).exists()


def test_a_manifest_is_plain_json_without_time_or_host(tmp_path: Path) -> None:
    build(tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert set(manifest) == {"kind", "config", "code", "parents", "details", "files", "fingerprint", "checksum"}


def test_a_file_and_a_directory_without_a_manifest_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"file: it is a file, not a directory\n  try: make one with: headrace prep"):
        read_manifest(tmp_path / "file", kind="tokens")
    with pytest.raises(DataError, match=r"has no manifest.json: .*\n  try: make one with: headrace prep"):
        read_manifest(tmp_path, kind="tokens")


def test_the_code_version_has_the_commit_of_the_checkout() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert code_version()["commit"] == done.stdout.strip()


def test_a_staging_directory_knows_the_name_that_it_will_get_and_others_have_none(tmp_path: Path) -> None:
    assert final_name(staging_path(tmp_path / "model.v1")) == "model.v1"
    assert all(final_name(tmp_path / name) is None for name in ("model", "model.partial", ".model"))
