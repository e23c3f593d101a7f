"""Merged checkpoints: exact means in any layout, each byte read once; refusals; whole or absent."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import foundation.remote_directory
from foundation.directory import read_manifest, write_manifest
from foundation.errors import ConfigError
from headrace.commands.app import run as headrace
from pipeline.checkpoint.checkpoint import Checkpoint, CheckpointInfo
from pipeline.checkpoint.export.find import RunPlace
from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.checkpoint.export.verify import verify_checkpoint
from pipeline.checkpoint.merging import merge as merge_module
from pipeline.checkpoint.merging.coefficients import METHODS, SHAPES, MergeMethod
from pipeline.checkpoint.merging.merge import Merge, merged_lineage
from pipeline.checkpoint.merging.sources import choose, open_sources
from pipeline.checkpoint.pins import pin
from pipeline.checkpoint.save import save_streamed
from pipeline.checkpoint.store import CheckpointStore
from pipeline.checkpoint.write import streamed
from tests import warm
from tests.conftest import launch, tiny_config, write_config


@pytest.fixture(scope="module")
def runs(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one`: a process of the native engine; `two`: ZeRO-3 of DeepSpeed on two, another seed. Routers have biases."""
    work = tmp_path_factory.mktemp("runs")
    for name, engine, processes in (("one", "torch", 1), ("two", "deepspeed", 2)):
        config = tiny_config(tokens, work / name, engine=engine, moe={"balance": "bias"})
        config["model"]["config"] = MOE
        config.pop("scheduler")
        config["run"] |= {"steps": 9, "checkpoint_every": 3, "keep_checkpoints": 3, "seed": processes}
        config["evaluation"] = {"samples": 0}
        launch("train.py", write_config(work / f"{name}.json", config), processes=processes)
    return work


MOE = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


def merge(*words: object, code: int = 0) -> None:
    assert headrace(["merge", *map(str, words)]) == code


def path_of(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:08d}"


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    weights = CheckpointWeights(checkpoint)
    buffers = {name: weights.buffer(name) for name in weights.buffers}
    return {name: weights.value(name) for name in weights.shapes} | {n: b for n, b in buffers.items() if b is not None}


def by_hand(checkpoints: Sequence[Path], coefficients: Sequence[float]) -> dict[str, Tensor]:
    found = [tensors_of(each) for each in checkpoints]
    pairs = {name: [(c, each[name].double()) for c, each in zip(coefficients, found, strict=True)] for name in found[0]}
    return {name: torch.stack([c * value for c, value in each]).sum(0).float() for name, each in pairs.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_mean_of_checkpoints_of_any_layout_is_the_mean_to_the_bit(runs: Path, tmp_path: Path) -> None:
    merge(runs / "one", "--steps", "3,9", tmp_path / "one")
    expected = by_hand([path_of(runs / "one", 3), path_of(runs / "one", 9)], [0.5, 0.5])
    assert_equal(tensors_of(path_of(tmp_path / "one", 9)), expected)
    biases = [name for name in expected if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(expected[name].abs().sum() > 0 for name in biases)  # they are buffers, and took part
    merge(f"{runs / 'one'}@6", f"{path_of(runs / 'two', 9)}", tmp_path / "soup", "--weights", "0.25,0.75")
    expected = by_hand([path_of(runs / "one", 6), path_of(runs / "two", 9)], [0.25, 0.75])
    assert_equal(tensors_of(path_of(tmp_path / "soup", 9)), expected)
    assert verify_checkpoint(Checkpoint(path_of(tmp_path / "soup", 9), 9)) == []


def test_large_tensors_are_read_and_written_in_parts_and_each_byte_once(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "_SHARD_BYTES", 3000)
    monkeypatch.setattr(merge_module, "_BLOCK", 100)
    chosen = choose([RunPlace.parse(str(runs / "one")), RunPlace.parse(str(runs / "two"))], last=2, steps=())
    made = Merge.of(open_sources(chosen), MergeMethod("mean"))
    written = made.write(tmp_path / "out")
    assert_equal(tensors_of(written.path), by_hand([each.path for _, each in chosen], [0.25] * 4))
    for source in made.sources:
        stored = sum(each.bytes for each in source.tensors.values())
        read = source.reader._files._reads.run_dir
        # a shard that is read whole has a header: 1 to 2 kB of torch.save
        shards = sum(len(source.metadata.table.rows(source.metadata.table.index[key])) for key in source.tensors)
        assert stored <= read <= stored + 3000 * shards


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [(4, 8, 12, 16), (4, 8, 16, 20)])
def test_wsm_is_the_run_with_the_decayed_rate(shape: str, steps: tuple[int, ...]) -> None:
    """Updates of a constant rate, scaled by the factor at their interval, lead to the merged weights."""
    updates = torch.randn(len(steps) - 1, 5, dtype=torch.float64)
    checkpoints = torch.cat([torch.zeros(1, 5, dtype=torch.float64), updates.cumsum(0)])
    found = MergeMethod("wsm", shape=shape).coefficients(steps)
    assert sum(found) == pytest.approx(1)
    span = (steps[-1] - steps[0]) * len(steps) / (len(steps) - 1)
    factors = [SHAPES[shape]((step - steps[0]) / span) for step in steps[1:]]
    assert all(1 > earlier > later > 0 for earlier, later in pairwise(factors))
    decayed = (torch.tensor(factors, dtype=torch.float64)[:, None] * updates).sum(0)
    assert torch.allclose(torch.tensor(found, dtype=torch.float64) @ checkpoints, decayed)


def test_a_linear_decay_is_the_mean_and_an_ema_is_its_recursion() -> None:
    assert MergeMethod("wsm").coefficients((10, 20, 30, 40)) == pytest.approx(
        MergeMethod("mean").coefficients((1, 2, 3, 4))
    )
    values = [3.0, -1.0, 2.0]
    average = values[0]
    for value in values[1:]:
        average = 0.8 * average + 0.2 * value
    found = MergeMethod("ema", ema=0.8).coefficients((1, 2, 3))
    assert sum(c * value for c, value in zip(found, values, strict=True)) == pytest.approx(average)
    for name in METHODS[1:3]:
        with pytest.raises(ConfigError, match="weights checkpoints of one run by their order"):
            MergeMethod(name).coefficients((10, 20, 20))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("one", "--steps", "3,5"), "has no checkpoint of step 5\n  try: the nearest it has, of step 3 and 6"),
        (("one", "--last", "4"), "has 3 checkpoints, of steps 3, 6, 9"),
        (("one",), "is the only checkpoint"),
        (("one", "two", "--weights", "3,1"), "their sum is 4"),
        (("one", "two", "--weights", "3,1"), "use 0.75,0.25"),
        (("one", "two", "--method", "mean", "--weights", "1,0"), "method mean does not use it"),
        (("one", "narrow"), "has shape (512, 32) in the first and (512, 16) in the second"),
        (("one", "spoken"), "their tokenizers differ"),
        (("one", "routed"), "model.config.num_experts_per_tok differs: 2 and 1"),
        (("one", "torn"), "bytes, the manifest says"),
        (("one", "nowhere"), "no such directory"),
    ],
)
def test_what_cannot_be_merged_is_refused_before_any_work(
    words: tuple[str, ...], said: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in {"narrow", "spoken", "routed", "torn"} & {*words}:
        changed(Path(shutil.copytree(runs / "one", tmp_path / name, symlinks=True)), name)
    named = {name: runs / name for name in ("one", "two")}
    named |= {name: tmp_path / name for name in ("narrow", "spoken", "routed", "torn", "nowhere")}
    merge(*(named.get(word, word) for word in words), tmp_path / "out", code=2)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


def changed(run: Path, how: str) -> None:
    """Makes a run's newest checkpoint one that does not fit."""
    newest = path_of(run, 9)
    manifest = read_manifest(newest, kind="checkpoint")
    about = {"config": manifest.config, "parents": manifest.parents, "details": manifest.details}
    if how == "torn":
        shard = next(newest.glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1])
        return
    if how == "narrow":
        key = "weight/model.embed_tokens.weight"
        lazy = streamed.LazyTensor((512, 16), torch.float32, lambda: torch.zeros(512, 16))
        save_streamed(CheckpointStore(run, keep=9), CheckpointInfo(9, **about), {key: lazy}, lambda _done, _total: None)
        return
    if how == "spoken":
        manifest.details["tokenizer"]["fingerprint"] = "another"
    else:
        manifest.details["hf_config"]["num_experts_per_tok"] = 1
    write_manifest(newest, kind="checkpoint", files=manifest.files, **about)


def test_room_is_asked_for_before_the_merge_starts(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(foundation.remote_directory, "free_bytes", lambda _path: 1_000_000)
    merge(runs / "one", "--last", "2", tmp_path / "out", code=2)
    assert "0.00 GB are free there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_mean_that_is_not_finite_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(runs / "one", tmp_path / "run", symlinks=True))
    shard = next(path_of(run, 6).glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    value = CheckpointWeights(path_of(run, 6)).value("model.embed_tokens.weight")
    at = data.index(value.numpy().tobytes())
    data[at : at + 4] = b"\x00\x00\xc0\x7f"  # a NaN
    shard.write_bytes(data)
    merge(run, "--steps", "3,6", tmp_path / "out", code=2)
    assert "the mean of weight/model.embed_tokens.weight is not finite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from headrace.commands.app import run
event, ending = sys.argv[1:3]
def killed(name, arguments):
    if name == event and ".out.partial" in (path := str(arguments[0])) and path.endswith(ending):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(killed)
run(sys.argv[3:])
"""


@pytest.mark.parametrize(("event", "ending"), [("open", "metadata.npz"), ("os.rename", ".out.partial")])
def test_a_killed_merge_leaves_nothing_finished_and_the_next_one_is_whole(
    event: str, ending: str, runs: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(runs / "one", tmp_path / "run", symlinks=True))
    words = ("merge", source, "--last", "2", tmp_path / "out")
    done = warm.run("-c", KILLED, event, ending, *words)
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.partial").exists()
    merge(*words[1:])
    assert not (tmp_path / ".out.partial").exists()
    assert verify_checkpoint(Checkpoint(path_of(tmp_path / "out", 9), 9)) == []


def test_a_pinned_checkpoint_stays_until_what_needs_it_is_gone(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "one", tmp_path / "run", symlinks=True))
    branch = tmp_path / "branch"
    branch.mkdir()
    pin(run, 3, by=branch)
    store = CheckpointStore(run, keep=1)
    store._prune(9)
    assert [each.step for each in store.checkpoints()] == [9, 3]
    branch.rmdir()
    store._prune(9)
    assert [each.step for each in store.checkpoints()] == [9]


def test_a_merged_run_is_exported_with_its_lineage_and_trained_on(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    merge(runs / "two", "--last", "3", "--method", "wsm", "--shape", "1-sqrt", out)
    assert headrace(["export", str(out), str(tmp_path / "model")]) == 0
    steps = read_manifest(tmp_path / "model", kind="model").details["lineage"]["steps"]
    assert [(each["step"], each.get("of_steps")) for each in steps] == [("training", None), ("merge", [3, 6, 9])]
    card = (tmp_path / "model/README.md").read_text()
    assert "### 2. Merge of checkpoints" in card
    said = launch("train.py", runs / "two.json", f"run.dir={out}", "run.steps=11", "engine=torch")
    assert "the optimizer's state starts at zero: the checkpoint is merged from others" in said
    manifests = [read_manifest(path_of(runs / name, 9), kind="checkpoint") for name in ("one", "two")]
    branches = merged_lineage(manifests, {"method": "mean"})
    assert [each["step"] for each in branches["steps"]] == ["training", "training", "merge"]
    assert len(branches["corpora"]) == 1
