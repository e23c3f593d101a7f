"""The eval and complete commands, as processes: what they print, and what they refuse."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from foundation.errors import ConfigError, DataError
from pipeline.data.dataset import TokenDataset
from pipeline.evaluation.heldout import command, complete
from pipeline.evaluation.heldout.heldout_loss import evaluate
from pipeline.models.folder.loading import load_model
from tests import warm
from tests.evaluation.heldout.small import SEQUENCE, TEXTS, make_masked, make_tokens
from tests.support import output_of, refusal_of


def arguments(*given: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([*map(str, given), "--sequence-length", str(SEQUENCE)])


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copied"))


def test_json_output_equals_the_result_of_evaluate(model: Path, tokens: Path) -> None:
    said = output_of(
        warm.run("-m", "pipeline.evaluation.heldout", model, "--data", tokens, "--sequence-length", SEQUENCE, "--json")
    )
    found = json.loads(said)
    dataset = TokenDataset.open(tokens, split="heldout", sequence_length=SEQUENCE)
    here = evaluate(load_model(model), dataset, batch_size=8, device="cpu")
    assert found["loss_nats"] == pytest.approx(here.loss_nats, rel=1e-5)
    assert found["weight_bytes"] == (model / "model.safetensors").stat().st_size
    assert (found["tokens"], found["dtype"]) == (here.tokens, "float32")


def test_a_table_is_printed_for_people(model: Path, tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(arguments(model, "--data", tokens, "--max-tokens", 200)) == 0
    shown = capsys.readouterr().out
    assert "bits per byte" in shown
    assert f"192 in windows of {SEQUENCE}" in shown  # 200 tokens are 6 whole windows


def test_no_bits_per_byte_with_a_loss_mask(model: Path, masked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(arguments(model, "--data", masked, "--max-tokens", 200)) == 0
    assert re.search(r"bits per byte +\S +- ", capsys.readouterr().out)
    assert command.run(arguments(model, "--data", masked, "--max-tokens", 200, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bits_per_byte"] is None
    assert 0 < found["tokens"] < 192 / 2  # of 6 windows of 32 a third


def test_a_loss_mask_without_targets_is_refused_before_the_model_is_loaded(
    copied: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = make_masked(tmp_path / "nothing", tokens, lambda ids, _: np.zeros(ids.size))
    monkeypatch.setattr(command, "_with_bar", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(DataError, match="leaves no target"):
        command.run(arguments(copied, "--data", nothing))


def test_a_dataset_of_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    other = make_tokens(tmp_path / "other", [text.upper() for text in TEXTS])
    with pytest.raises(ConfigError, match=r"--data.*\n.*made with tokenizer"):
        command.run(arguments(model, "--data", other))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocab_size": 300}, ConfigError, r"384 ids.*vocabulary of 300"),
        ({"num_hidden_layers": 3}, DataError, r"missing model\.layers\.2"),  # and not initialized randomly
    ],
)
def test_a_model_that_lacks_ids_or_tensors_is_refused(
    copied: Path, tokens: Path, change: dict[str, int], error: type[Exception], message: str
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error, match=message):
        command.run(arguments(copied, "--data", tokens))


def test_windows_longer_than_the_models_positions_are_refused(model: Path, tokens: Path) -> None:
    said = refusal_of(warm.run("-m", "pipeline.evaluation.heldout", model, "--data", tokens, "--sequence-length", 129))
    assert "--sequence-length = 129" in said
    assert "use 128 or less" in said


def test_a_missing_path_is_refused(model: Path, tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        command.run(arguments(tmp_path / "nothing", "--data", tokens))
    with pytest.raises(DataError, match="no such directory"):
        command.run(arguments(model, "--data", tmp_path / "nothing"))


def test_truncated_weights_are_refused(copied: Path, tokens: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(DataError, match="truncated"):
        command.run(arguments(copied, "--data", tokens))
    weights.write_bytes(b"\xff" * 20)
    with pytest.raises(DataError, match="header cannot be read"):
        command.run(arguments(copied, "--data", tokens))


def completion(*given: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    complete.add_arguments(parser)
    return parser.parse_args([*map(str, given)])


def completed(capsys: pytest.CaptureFixture[str], *given: object) -> str:
    assert complete.run(completion(*given)) == 0
    return capsys.readouterr().out


@pytest.fixture
def chatty(copied: Path) -> Path:
    history = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    answered = "{% if add_generation_prompt %}The mill{% endif %}"
    (copied / "chat_template.jinja").write_text(history + answered)
    return copied


def test_a_completion_follows_the_prompt_and_is_repeatable(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (model, "--prompt", "The mill at race 7", "--tokens", 12)
    first = completed(capsys, *given)
    assert first.startswith("The mill at race 7")
    assert len(first.strip()) > len("The mill at race 7")
    assert completed(capsys, *given) == first


def test_the_command_samples_unless_greedy_is_selected(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (model, "--prompt", "The mill", "--tokens", 24, "--temperature", 1.5, "--top-p", 1)
    drawn = {completed(capsys, *given, "--seed", seed) for seed in (0, 1, 2, 2**32 - 1)}
    assert len(drawn) == 4
    greedy = completed(capsys, *given[:5], "--greedy")
    assert greedy not in drawn
    assert completed(capsys, *given[:5], "--temperature", 0, "--seed", 5) == greedy
    # the likeliest token alone has so much of the probability
    assert completed(capsys, *given[:5], "--top-p", 1e-6) == greedy
    expected = complete.complete(model, "The mill", tokens=24, temperature=0.8, top_p=0.95, seed=0)
    assert completed(capsys, *given[:5]) == expected + "\n"


def test_sampling_depends_on_the_seed_alone(model: Path) -> None:
    first, again, other = (
        complete.complete(model, "The mill", tokens=24, temperature=1.5, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_chat_uses_the_template_and_prints_the_reply_alone(chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = completed(capsys, chatty, "--prompt", "How many wheels?", "--tokens", 12, "--chat", "--greedy")
    plain = "<user>How many wheels?The mill"
    whole = completed(capsys, chatty, "--prompt", plain, "--tokens", 12, "--greedy")
    assert answer.strip()
    assert whole == plain + answer


def test_a_reply_ends_at_the_token_that_the_template_adds(chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (chatty, "--prompt", "How many wheels?", "--tokens", 12, "--chat", "--greedy")
    whole = completed(capsys, *given)
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    ids = tokenizer("The mill" + whole)["input_ids"][len(tokenizer("The mill")["input_ids"]) :]
    # the fourth token of the reply becomes the end of a turn: another one than the tokenizer's EOS
    end = next(token for token in ids[3:] if token not in ids[:3])
    content = tokenizer.convert_ids_to_tokens(end)
    tokenizer.add_special_tokens({"additional_special_tokens": [content]})
    tokenizer.save_pretrained(chatty)
    template = (chatty / "chat_template.jinja").read_text()
    (chatty / "chat_template.jinja").write_text(
        template.replace("{% endfor %}", "{% if m.role == 'assistant' %}" + content + "{% endif %}{% endfor %}")
    )
    reply = completed(capsys, *given)
    assert whole.startswith(reply.rstrip("\n"))
    assert len(reply) < len(whole)


def test_a_chat_template_that_fails_is_refused(chatty: Path) -> None:
    (chatty / "chat_template.jinja").write_text("{{ raise_exception('a system message comes first') }}")
    with pytest.raises(ConfigError, match=r"--chat\n.*a system message comes first"):
        complete.run(completion(chatty, "--prompt", "How many wheels?", "--chat"))


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--tokens", ["--tokens", 0]),
        ("--temperature", ["--temperature", -1]),
        ("--temperature", ["--temperature", "nan"]),
        ("--temperature", ["--temperature", "inf"]),
        ("--temperature", ["--temperature", 0.5, "--greedy"]),
        ("--top-p", ["--top-p", 0]),
        ("--top-p", ["--top-p", 1.5]),
        ("--top-p", ["--top-p", 0.5, "--greedy"]),
        ("--top-p", ["--top-p", 0.5, "--temperature", 0]),
        ("--seed", ["--seed", -1]),
        ("--seed", ["--seed", 2**32]),
        ("--prompt", ["--prompt", ""]),
        (r"--chat\n.*has no chat template.*\n.*leave --chat out", ["--chat"]),
    ],
)
def test_invalid_arguments_are_refused_by_name(model: Path, flag: str, given: list[object]) -> None:
    with pytest.raises(ConfigError, match=flag):
        complete.run(completion(model, "--prompt", "The", *given))
