"""Second moments of what layers read; importance matrices: what they measure and change, where they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from foundation.directory import read_manifest
from foundation.errors import ConfigError, DataError
from foundation.section import parse
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.importance_matrix import measure_importance
from pipeline.compress.quantization.moments import SecondMoments
from pipeline.compress.quantization.rules import prepare
from pipeline.models.gguf.types import UNWEIGHTED
from pipeline.models.gguf.write import encoded
from tests import warm
from tests.compress.quantization.test_quantize import ENTRY, write_config
from tests.evaluation.heldout.small import VOCAB
from tests.models.architectures import config_of


def linear_layers(*names: str) -> dict[str, nn.Linear]:
    return {name: nn.Linear(6, 3) for name in names}


def mean(rows: Tensor) -> Tensor:
    return rows.T @ rows / len(rows)


def test_layers_that_read_one_tensor_share_the_mean_over_all_tokens_of_all_batches() -> None:
    layers = linear_layers("query", "key", "output")
    first, second, other = torch.randn(2, 4, 6), torch.randn(1, 4, 6), torch.randn(1, 5, 6)
    moments = SecondMoments(CPU)
    with moments.observe(layers):
        for states in (first, second):
            layers["query"](states)
            layers["key"](states)
        layers["output"](other)
    layers["query"](first)  # no longer observed
    found = dict(moments.pop())
    assert list(found) == [("query", "key"), ("output",)]
    torch.testing.assert_close(found["query", "key"], mean(torch.cat([first, second], 0).reshape(-1, 6)))
    torch.testing.assert_close(found["output",], mean(other[0]))


def test_layers_that_read_one_tensor_in_some_batches_only_are_apart() -> None:
    layers = linear_layers("one", "two")
    both, one, two = torch.randn(4, 6), torch.randn(3, 6), torch.randn(5, 6)
    moments = SecondMoments(CPU)
    with moments.observe(layers):
        layers["one"](both), layers["two"](both)
        layers["one"](one), layers["two"](two)
    found = dict(moments.pop())
    torch.testing.assert_close(found["one",], mean(torch.cat([both, one])))
    torch.testing.assert_close(found["two",], mean(torch.cat([both, two])))


def test_a_layer_without_a_token_has_moments_of_zero() -> None:
    layers = linear_layers("expert")
    moments = SecondMoments(CPU)
    with moments.observe(layers):
        layers["expert"](torch.empty(0, 6))
    assert not dict(moments.pop())["expert",].any()


@pytest.mark.parametrize("then", ["one", "two", None])
def test_an_input_that_is_changed_in_place_after_it_was_read_is_refused(then: str | None) -> None:
    layers, states = linear_layers("one", "two"), torch.randn(4, 6)

    def run() -> None:
        with SecondMoments(CPU).observe(layers), torch.no_grad():
            layers["one"](states)
            states.add_(1)
            if then is not None:
                layers[then](states)

    with pytest.raises(ConfigError, match="changes the input of one in place"):
        run()


CPU = torch.device("cpu")


def measured(name: str, **fields: Any) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """A model of random weights, ids of two batches, and the importance of all of its tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, vocab_size=VOCAB, **fields)).eval()
    ids = torch.randint(0, VOCAB, (4, 12))
    names = [*model.state_dict(), *(f"model.layers.0.mlp.experts.{n}.gate_proj.weight" for n in range(64))]
    return model, ids, dict(measure_importance(model, names, ids.split(2), device=CPU))


def test_it_is_the_mean_square_of_each_input_over_all_tokens() -> None:
    model, ids, found = measured("llama")
    states: list[torch.Tensor] = []
    layer = model.model.layers[1]
    layer.mlp.down_proj.register_forward_pre_hook(lambda _module, given: states.append(given[0]))
    with torch.no_grad():
        last = model.model(input_ids=ids).last_hidden_state
    expected = states[0].flatten(0, 1).square().mean(0)
    assert found["model.layers.1.mlp.down_proj.weight"] == pytest.approx(expected.numpy(), rel=1e-4)
    assert found["lm_head.weight"] == pytest.approx(last.flatten(0, 1).square().mean(0).numpy(), rel=1e-4)
    shared = [found[f"model.layers.1.self_attn.{each}_proj.weight"] for each in "qkv"]
    assert np.array_equal(shared[0], shared[1])
    assert np.array_equal(shared[1], shared[2])
    assert "model.embed_tokens.weight" not in found  # rows are looked up: they have no inputs
    assert "model.norm.weight" not in found


def test_each_expert_has_that_of_its_own_tokens_and_conv1d_that_of_its_rows() -> None:
    _, _, found = measured("qwen3_moe", norm_topk_prob=True)
    experts = [value for name, value in found.items() if ".experts." in name]
    assert len(experts) > 1
    assert not np.array_equal(experts[0], experts[1])
    model, _, found = measured("gpt2", bos_token_id=0, eos_token_id=0)
    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D":
            assert found[f"{name}.weight"].shape == (module.weight.shape[0],)


def test_the_names_of_gpt2_on_the_hub_have_no_prefix() -> None:
    model, ids, found = measured("gpt2", bos_token_id=0, eos_token_id=0)
    name = "h.1.mlp.c_proj.weight"
    short = measure_importance(model, [name], ids.split(2), device=CPU)
    assert np.array_equal(short[name], found[f"transformer.{name}"])


def test_a_matrix_whose_inputs_are_all_zero_is_rounded_without() -> None:
    model, ids, _ = measured("llama")
    with torch.no_grad():
        model.model.norm.weight.zero_()
    names = ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"]
    assert list(measure_importance(model, names, [ids], device=CPU)) == names[1:]


def test_an_input_that_is_always_zero_still_has_some_weight() -> None:
    model, ids, _ = measured("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = 0
    found = measure_importance(model, ["lm_head.weight"], [ids], device=CPU)["lm_head.weight"]
    assert 0 < found[3] < 1e-5 * found.mean()


@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q5_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K])
def test_the_error_of_the_output_is_smaller_with_it(kind: Q) -> None:
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((32, 512)).astype(np.float32)
    importance = np.exp(2 * generator.standard_normal(512)).astype(np.float32)
    back = [dequantize(encoded(weight, kind, given), kind).reshape(weight.shape) for given in ((), (importance,))]
    plain, weighed = (float((np.square(each - weight) * importance).sum()) for each in back)
    assert weighed < (0.97 if kind is Q.Q6_K else 0.8) * plain


@pytest.mark.usefixtures("llama_cpp")
def test_every_expert_is_rounded_by_its_own_and_one_without_as_if_there_were_none() -> None:
    generator = np.random.default_rng(0)
    experts = generator.standard_normal((3, 8, 256)).astype(np.float32)
    given = [np.exp(2 * generator.standard_normal(256)).astype(np.float32), None, None]
    together = encoded(experts, Q.Q4_K, given)
    assert np.array_equal(together[0], encoded(experts[0], Q.Q4_K, given[:1]))
    assert np.array_equal(together[1], encoded(experts[1], Q.Q4_K))
    assert not np.array_equal(together[0], encoded(experts[0], Q.Q4_K))
    for kind in UNWEIGHTED:
        assert np.array_equal(encoded(experts, kind, given), encoded(experts, kind))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scheme": "Q8_0"}, "an importance matrix changes nothing in"),
        ({"scheme": "mixed", "budget": {"bytes": 10**6, "candidates": ["Q8_0"]}}, "changes nothing"),
        ({"scheme": "W4A16"}, '"method": "gptq"'),
        ({"scheme": "Q4_K_M", "calibration": {"samples": 1_000_000}}, "calibration.samples = 1000000"),
        ({"scheme": "Q4_K_M", "calibration": {"split": "nowhere"}}, "nowhere"),
    ],
)
def test_an_importance_matrix_without_an_effect_or_a_text_is_refused(
    fields: dict[str, Any], expected: str, model: Path, tokens: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "Q4" in fields["scheme"]:
        request.getfixturevalue("llama_cpp")
    config = write_config(tmp_path, model, tokens, imatrix=True, **fields)
    with pytest.raises((ConfigError, DataError)) as caught:
        prepare(parse(QuantizeConfig, json.loads(config.read_text())))
    assert expected in str(caught.value)


@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.integration
def test_a_file_with_it_is_served_and_says_so(model: Path, tokens: Path, tmp_path: Path) -> None:
    made: dict[bool, Any] = {}
    for imatrix in (False, True):
        folder = tmp_path / str(imatrix)
        folder.mkdir()
        fields = {"scheme": "Q4_0", "imatrix": imatrix, "calibration": {"samples": 32}, "consumers": ["llama.cpp"]}
        done = warm.run(ENTRY, "--config", write_config(folder, model, tokens, **fields))
        assert done.returncode == 0, done.stderr
        made[imatrix] = read_manifest(folder / "small", kind="model")
        assert ("imatrix" in done.stdout) is imatrix
        assert ("rounded without: model.embed_tokens.weight" in done.stderr) is imatrix
    plain, weighed = (made[each].details for each in (False, True))
    assert weighed["quantization"]["imatrix"] is True
    assert weighed["weight_bytes"] == plain["weight_bytes"]
    figures = [each["consumers"]["llama.cpp"]["mean_kl"] for each in (plain, weighed)]
    assert figures[1] < 1.1 * figures[0]  # not worse, of a model whose inputs are hardly uneven
    assert made[True].files["model.gguf"] != made[False].files["model.gguf"]
