"""Nothing gets its name that a consumer finds far from the original, by log-probabilities compared within bounds."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from foundation.directory import MANIFEST, read_manifest, write_manifest
from foundation.errors import ConfigError, DataError
from pipeline.compress.quantization.config import SCHEMES, SchemeName
from pipeline.data.dataset import TokenDataset
from pipeline.evaluation.consumers import process, remedies
from pipeline.evaluation.consumers.bounds import BOUNDS, Bound, bound_of, bound_within, broken_bounds
from pipeline.evaluation.consumers.command_compress import bound_of_folder
from pipeline.evaluation.consumers.compare import ScoreComparison, compare
from pipeline.evaluation.consumers.consumer import CONSUMERS, VLLM_PYTHON, plan_consumers
from pipeline.evaluation.consumers.description import FOLDER, GGUF, ModelDescription, describe
from pipeline.evaluation.consumers.gate import GateSample, run_gate
from pipeline.evaluation.consumers.request import ScoreRequest
from pipeline.evaluation.consumers.texts import AWKWARD
from pipeline.models.gguf.types import FILE_TYPES
from tests import warm
from tests.compress.quantization.test_quantize import ENTRY, Made, write_config
from tests.evaluation.heldout.small import SEQUENCE, TEXTS, VOCAB, make_tokenizer
from tests.support import output_of, refusal_of

VLLM_NEEDS = {"W4A16": {"avx512f"}, "W8A8": {"avx512_vnni", "avx_vnni", "amx_int8"}}


def quantize(folder: Path, model: Path, tokens: Path, scheme: str, **fields: Any) -> Made:
    said = output_of(warm.run(ENTRY, "--config", write_config(folder, model, tokens, scheme=scheme, **fields)))
    return Made(folder / "small", read_manifest(folder / "small", kind="model"), said)


def verify(folder: Path, *options: object) -> Any:
    return warm.run("-m", "pipeline", "compress", "verify", folder, *options)


@pytest.fixture(scope="module")
def gguf(model: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Made:
    request.getfixturevalue("llama_cpp")
    return quantize(tmp_path_factory.mktemp("gguf"), model, tokens, "Q4_K_M")


@pytest.fixture(scope="module")
def int8(model: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return quantize(tmp_path_factory.mktemp("int8"), model, tokens, "W8A8", consumers=["transformers"])


@pytest.fixture(scope="module")
def sample(model: Path, tokens: Path) -> GateSample:
    dataset = TokenDataset.open(tokens, split="heldout", sequence_length=SEQUENCE)
    return GateSample.of(dataset, model, vocabulary=VOCAB)


def test_windows_leave_room_for_a_token_where_a_model_has_no_more_positions(model: Path, tokens: Path) -> None:
    dataset = TokenDataset.open(tokens, split="heldout", sequence_length=SEQUENCE)
    whole, shorter = (GateSample.of(dataset, model, vocabulary=VOCAB, longest=each) for each in (None, SEQUENCE))
    assert whole.windows.shape[1] == SEQUENCE + 1
    assert shorter.windows.shape[1] == SEQUENCE - 1
    assert (shorter.windows == whole.windows[: len(shorter.windows), : SEQUENCE - 1]).all()


def test_the_manifest_has_the_figures_of_llama_cpp_and_names_who_was_not_run(gguf: Made) -> None:
    consumers = gguf.manifest.details["consumers"]
    figures = consumers["llama.cpp"]
    assert 0 < figures["mean_kl"] < 0.05
    assert figures["mean_kl"] < figures["max_kl"]
    assert figures["top1_agreement"] > 0.9
    assert figures["perplexity"] == pytest.approx(figures["original_perplexity"], rel=0.05)
    assert figures["texts"] == figures["texts_with_equal_ids"] > len(AWKWARD)
    assert set(consumers) == set(CONSUMERS)
    assert "GGUF" in consumers["transformers"]["not_run"]
    assert gguf.manifest.details["weight_bytes"] == (gguf.path / "model.gguf").stat().st_size
    assert "llama.cpp" in gguf.stdout


@pytest.mark.integration
def test_activations_are_scored_as_served(int8: Made, sample: GateSample, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights in int8 alone would be nearer: what is scored is what is served."""
    figures = int8.manifest.details["consumers"]["transformers"]
    assert 1e-6 < figures["mean_kl"] < 0.02
    tensors = load_file(int8.path / "model.safetensors")
    assert {str(t.dtype) for n, t in tensors.items() if n.endswith("_proj.weight")} == {"torch.int8"}
    scores = CONSUMERS["transformers"].score(ScoreRequest(int8.path, sample.windows, (), VOCAB))
    from pipeline.models.folder.loading import load_model  # noqa: PLC0415

    loaded = load_model(int8.path)
    loaded(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert "it/s" not in capfd.readouterr().err  # compressed-tensors' bars, at loading and at the first forward pass
    assert any(hasattr(module, "quantization_scheme") for module in loaded.modules())
    assert scores.log_probabilities.shape == (len(sample.windows), SEQUENCE, VOCAB)
    assert np.exp(scores.log_probabilities.astype(np.float64)).sum(-1) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.integration
def test_verify_gives_the_figures_of_the_manifest_again(gguf: Made) -> None:
    found = json.loads(output_of(verify(gguf.path, "--json")).splitlines()[-1])
    assert found["scheme"] == "Q4_K_M"
    again, before = found["consumers"]["llama.cpp"], gguf.manifest.details["consumers"]["llama.cpp"]
    assert again["mean_kl"] == pytest.approx(before["mean_kl"], rel=1e-3)
    assert again["positions"] == before["positions"]


def test_verify_uses_the_bound_of_the_manifest_and_deletes_nothing(gguf: Made, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(gguf.path, tmp_path / "copied"))
    known = gguf.manifest
    config = {**known.config, "max_mean_kl": 1e-9}
    how: dict[str, Any] = {"parents": known.parents, "details": known.details, "files": known.files}
    write_manifest(copied, kind="model", config=config, **how)
    done = verify(copied)
    assert done.returncode == 1
    assert f"{copied} was not accepted:" in " ".join(done.stderr.split())
    assert "1e-09 is allowed" in done.stderr
    assert "deleted" not in done.stderr
    assert (copied / "model.gguf").is_file()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("config", "expected"), [({"scheme": "W8A8"}, "W8A8"), ({"scheme": "mixed"}, "mixed"), ({}, "FP8")]
)
def test_a_folder_is_judged_again_by_its_scheme(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    """With a head of its own a W8A8 is stored as mixed, and a mixed one may have become W8A8 everywhere."""
    assert bound_of_folder(tmp_path, scheme="FP8") == bound_of("FP8")
    write_manifest(tmp_path, kind="model", config=config, parents={}, details={}, files={})
    assert bound_of_folder(tmp_path, scheme="FP8") == bound_of(expected)


def test_a_bound_of_any_size_can_be_given() -> None:
    assert bound_within("W8A8", None) == bound_of("W8A8")
    assert bound_within("W8A8", 0.1).perplexity_ratio == pytest.approx(np.exp(0.1) + 0.02)
    assert bound_within("W8A8", 1e6) == Bound(1e6, np.inf)


@pytest.mark.integration
def test_a_damaged_file_is_outside_the_bound(gguf: Made, model: Path, sample: GateSample, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(gguf.path, tmp_path / "copied"))
    file = copied / "model.gguf"
    raw = bytearray(file.read_bytes())
    raw[-30000:-10000] = bytes(20000)
    file.write_bytes(raw)
    plan = plan_consumers(copied)
    assert [each.name for each in plan.run] == ["llama.cpp"]
    with pytest.raises(DataError, match=r"llama.cpp: mean KL to the original is") as caught:
        run_gate(model, copied, bound=bound_of("Q4_K_M"), sample=sample, vocabulary=VOCAB, consumers=plan)
    assert "which layers lose most is not known" in str(caught.value)


@pytest.mark.integration
@pytest.mark.sweep
def test_a_tokenizer_with_other_ids_is_refused(int8: Made, model: Path, sample: GateSample, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(int8.path, tmp_path / "copied"))
    (copied / MANIFEST).unlink()  # whose sizes would tell
    make_tokenizer(copied, [text.upper() for text in TEXTS])
    plan = plan_consumers(copied, ("transformers",))
    with pytest.raises(DataError, match="its tokenizer gives other ids for"):
        run_gate(model, copied, bound=bound_of("W8A8"), sample=sample, vocabulary=VOCAB, consumers=plan)


@pytest.mark.sweep
def test_the_layer_with_wrong_weights_is_named(int8: Made, model: Path, sample: GateSample, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(int8.path, tmp_path / "copied"))
    file = copied / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].flip(0)
    save_file(tensors, file, metadata={"format": "pt"})
    plan = plan_consumers(copied, ("transformers",))
    with pytest.raises(DataError, match=r"largest first: model\.layers\.1 "):
        run_gate(model, copied, bound=bound_of("W8A8"), sample=sample, vocabulary=VOCAB, consumers=plan)


@pytest.mark.integration
def test_a_result_outside_the_bound_is_deleted_with_its_layers_named(model: Path, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, tokens, scheme="W4A16", max_mean_kl=1e-9, consumers=["transformers"])
    said = refusal_of(warm.run(ENTRY, "--config", config))
    assert "was not accepted, and was deleted" in said
    assert "transformers: mean KL to the original" in said
    assert "model.layers." in said
    assert [path.name for path in tmp_path.iterdir()] == ["quantize.json"]


@pytest.mark.integration
@pytest.mark.usefixtures("warm_vllm")
@pytest.mark.skipif(VLLM_PYTHON not in os.environ, reason=f"needs vLLM, whose environment's Python {VLLM_PYTHON} names")
# of the others test_cells.py has a model each
@pytest.mark.sweep
@pytest.mark.parametrize(
    "scheme", ["W4A16", *(pytest.param(each, marks=pytest.mark.sweep) for each in ("W8A8", "FP8"))]
)
def test_vllm_serves_what_was_written(scheme: str, model: Path, tokens: Path, tmp_path: Path) -> None:
    if (needs := VLLM_NEEDS.get(scheme)) and not needs & set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"vLLM's kernel for {scheme} needs a processor with {' or '.join(sorted(needs))}")
    made = quantize(tmp_path, model, tokens, scheme, dtype="bfloat16", consumers=["transformers", "vllm"])
    figures = made.manifest.details["consumers"]
    assert figures["vllm"]["mean_kl"] == pytest.approx(figures["transformers"]["mean_kl"], rel=0.5, abs=1e-4)
    assert figures["vllm"]["texts_with_equal_ids"] == figures["vllm"]["texts"]


def test_a_consumer_that_cannot_take_a_scheme_is_refused_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="reads GGUF files"):
        plan_consumers(ModelDescription(FOLDER, "W8A8", 64), ("llama.cpp",))
    with pytest.raises(ConfigError, match="use W8A8"):
        plan_consumers(ModelDescription(FOLDER, "W8A16", 64), ("vllm",))
    with pytest.raises(ConfigError, match="heads have 48 features"):
        plan_consumers(ModelDescription(FOLDER, "W8A8", 48), ("vllm",))
    monkeypatch.setenv(VLLM_PYTHON, "/nowhere/python")
    with pytest.raises(ConfigError, match="does not exist"):
        plan_consumers(ModelDescription(FOLDER, "FP8", 64), ("vllm",))
    with pytest.raises(ConfigError, match="no such consumer"):
        plan_consumers(ModelDescription(GGUF, "Q8_0", None), ("ollama",))
    assert describe(model) == ModelDescription(FOLDER, "float32", 32)


@pytest.mark.usefixtures("llama_cpp")
def test_a_consumer_that_ends_says_the_end_of_its_output(sample: GateSample, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(DataError, match="cannot score") as caught:
        CONSUMERS["llama.cpp"].score(ScoreRequest(tmp_path, sample.windows, (), VOCAB))
    assert "cannot load" in str(caught.value)


def test_consumers_lists_those_that_are_here() -> None:
    assert all(name in output_of(warm.run("-m", "pipeline", "compress", "consumers")) for name in CONSUMERS)


def test_verify_needs_an_original_where_no_manifest_names_it(model: Path, tokens: Path) -> None:
    assert "--original" in refusal_of(verify(model, "--data", tokens))


def test_a_consumer_that_hangs_is_ended_and_named(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import time\nprint('progress 1 2', flush=True)\ntime.sleep(1000)\n")
    monkeypatch.setattr(process, "SILENCE_S", 0.5)
    consumer = replace(CONSUMERS["transformers"], worker=str(worker))
    request = ScoreRequest(model, np.zeros((1, 4), np.int64), (), 8)
    with pytest.raises(DataError, match=r"(?s)transformers cannot score.*killed after 0.5 s without progress"):
        consumer.score(request)


def told(kl: float, *, perplexity: float = 10.0, equal: int = 9) -> dict[str, Any]:
    """Figures of a consumer."""
    ids = {"texts": 9, "texts_with_equal_ids": equal}
    return {"mean_kl": kl, "perplexity": perplexity, "original_perplexity": 10.0, **ids}


@pytest.mark.parametrize(("kl", "perplexity"), [(0.3, 10.0), (0.01, 13.0), (1e-7, 10.5), (2.0, 200.0)])
def test_the_bound_that_a_refusal_names_takes_the_figures(kl: float, perplexity: float) -> None:
    figures = {"transformers": told(kl, perplexity=perplexity)}
    text = remedies.of_quantization(figures, ["transformers"], scheme="W8A16", worst=None)
    found = re.search(r'"max_mean_kl": ([\d.e+-]+),', text)
    assert found is not None
    comparison = ScoreComparison(kl, kl, 1.0, perplexity, 10.0, 1)
    assert broken_bounds(comparison, bound_within("W8A16", float(found[1]))) == []


def test_a_refusal_names_the_consumers_that_accept_a_model_and_no_bound_where_a_bound_does_not_help() -> None:
    figures = {"llama.cpp": told(1e-5, equal=3), "transformers": told(1e-5), "vllm": {"not_run": "it is not here"}}
    text = remedies.of_quantization(figures, ["llama.cpp"], scheme="W8A8", worst=None)
    assert text == '"consumers": ["transformers"], if it is served by no other'
    assert "GGUF" in remedies.of_quantization({"vllm": told(1.0, equal=0)}, ["vllm"], scheme="W8A8", worst=None)
    infinite = {"transformers": told(float("inf"))}
    assert "max_mean_kl" not in remedies.of_quantization(infinite, ["transformers"], scheme="W4A16", worst=None)
    assert remedies.of_pruning(infinite, ["transformers"], scheme="float16") == '"dtype": "float32"'
    assert "--consumers transformers" in remedies.of_verification(figures, ["llama.cpp"])


@pytest.mark.parametrize("scheme", [*SCHEMES, *BOUNDS])
def test_every_scheme_that_rounds_has_one_with_more_bits(scheme: str) -> None:
    text = remedies.of_quantization({"transformers": told(1.0)}, ["transformers"], scheme=scheme, worst=None)
    best = scheme in {"W8A16", "F32", "mixed", "MXFP4", "float32", "bfloat16", "float16"}
    found = re.search(r'"scheme": "(\w+)"', text)
    assert (found is None) is best
    assert found is None or (found[1] in BOUNDS and bound_of(found[1]).mean_kl <= bound_of(scheme).mean_kl)


def test_a_file_that_rounds_nothing_is_not_told_to_skip_layers_or_to_widen_the_bound() -> None:
    text = remedies.of_quantization({"llama.cpp": told(0.5)}, ["llama.cpp"], scheme="F32", worst="model.layers.1")
    assert "Hugging Face folder" in text
    assert "max_mean_kl" not in text
    assert 'skip"' not in text


@pytest.mark.integration
def test_every_remedy_of_a_refused_quantization_is_taken(model: Path, tokens: Path, tmp_path: Path) -> None:
    """The bound that is named for the loss of all layers is enough for more bits, and for fewer layers, too."""
    fields: dict[str, Any] = {"scheme": "W4A16", "consumers": ["transformers"], "max_mean_kl": 1e-9}
    said = refusal_of(warm.run(ENTRY, "--config", write_config(tmp_path, model, tokens, **fields)))
    line = said.splitlines()[-1].partition("try: ")[2].replace(", if that is near enough", "")
    line = re.sub(r'("re:[^"]*") added to "skip"', r'"skip": ["lm_head", \1]', line)
    ways = [json.loads(f"{{{way}}}") for way in line.split(" or ")]
    assert [set(way) for way in ways] == [{"max_mean_kl"}, {"scheme"}, {"skip"}]
    bounded = {**fields, "max_mean_kl": ways[0]["max_mean_kl"]}
    for number, way in enumerate(ways):
        folder = tmp_path / str(number)
        folder.mkdir()
        output_of(warm.run(ENTRY, "--config", write_config(folder, model, tokens, **bounded | way)))


N, T, V = 3, 9, 700


def log_probabilities(seed: int, *, n: int = N, t: int = T) -> torch.Tensor:
    return torch.randn(n, t - 1, V, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


@pytest.mark.parametrize("n", [N, 40])  # 24 positions, and 320, which are more than one block of rows
def test_the_comparison_is_that_of_torch(n: int) -> None:
    first, second = log_probabilities(0, n=n), log_probabilities(1, n=n)
    windows = torch.randint(0, V, (n, T), generator=torch.Generator().manual_seed(2))
    found = compare(first.numpy(), second.numpy(), windows.numpy())
    kl = F.kl_div(second.double(), first.double(), log_target=True, reduction="none").sum(-1)
    targets = windows[:, 1:].flatten()
    loss = F.nll_loss(second.flatten(0, 1).double(), targets)
    own = F.nll_loss(first.flatten(0, 1).double(), targets)
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-6)
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    assert found.original_perplexity == pytest.approx(math.exp(own), rel=1e-6)
    assert found.top1_agreement == int((first.argmax(-1) == second.argmax(-1)).sum()) / targets.numel()
    assert found.positions == n * (T - 1)


def test_a_model_is_no_distance_from_itself() -> None:
    same = log_probabilities(0).numpy()
    found = compare(same, same, np.zeros((N, T), dtype=np.int64))
    assert (found.mean_kl, found.max_kl, found.top1_agreement) == (0.0, 0.0, 1.0)


def compared(mean_kl: float, perplexity: float) -> ScoreComparison:
    return ScoreComparison(mean_kl, mean_kl, 1.0, perplexity, 10.0, 100)


def test_what_is_outside_a_bound_is_said_with_both_numbers() -> None:
    bound = Bound(0.1, 1.1)
    assert broken_bounds(compared(0.05, 10.5), bound) == []
    assert broken_bounds(compared(0.2, 10.5), bound) == ["mean KL to the original is 0.2 nats, and 0.1 is allowed"]
    [line] = broken_bounds(compared(0.05, 12.0), bound)
    assert "perplexity went from 10 to 12" in line
    assert len(broken_bounds(compared(math.nan, math.inf), bound)) == 2


def test_every_scheme_has_a_bound_and_more_bits_have_a_smaller_one() -> None:
    schemes = SchemeName.__args__  # type: ignore[attr-defined]
    assert set(schemes) == set(SCHEMES) | set(FILE_TYPES)
    assert set(schemes) <= set(BOUNDS)
    falling = ["Q2_K", "Q4_K_M", "Q5_K_M", "Q8_0", "BF16", "F32"]
    kls = [bound_of(name).mean_kl for name in falling]
    assert kls == sorted(kls, reverse=True)
