"""The loss mask is that of transformers, `apply_chat_template(return_assistant_tokens_mask=True)`, for every family."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Sequence, WhitespaceSplit

from data_prep.chat.encoder import ChatEncoder
from data_prep.config.corpus import TokenizerSection
from data_prep.sources.conversation import conversation_line
from data_prep.tokenizer.train import train

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<s>", "</s>", "[INST]", "[/INST]"]
BEGIN, END = "{% generation %}", "{% endgeneration %}"
_EACH = "{% for m in messages %}{% if m.role == 'assistant' %}ANSWER{% elif m.role == 'user' %}USER{% else %}SYSTEM"
_EACH += "{% endif %}{% endfor %}{% if add_generation_prompt %}PROMPT{% endif %}"


def loop(user: str, answer: str, system: str, prompt: str, *, before: str = "") -> str:
    """A template of a loop over the messages; `answer` has its generation block, `before` is written first."""
    parts = _EACH.replace("ANSWER", answer).replace("USER", user).replace("SYSTEM", system).replace("PROMPT", prompt)
    return before + parts


C, SAID = "{{ m.content }}", BEGIN + "{{ m.content }}"
_DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
FAMILIES = {
    "chatml": loop(
        f"<|im_start|>user\n{C}<|im_end|>\n",
        f"<|im_start|>assistant\n{SAID}<|im_end|>{END}\n",
        f"<|im_start|>system\n{C}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "default system prompt": loop(
        f"<|im_start|>user\n{C}<|im_end|>\n",
        f"<|im_start|>assistant\n{SAID}<|im_end|>\n{END}",
        f"<|im_start|>system\n{C}<|im_end|>\n",
        "<|im_start|>assistant\n",
        before=_DEFAULT,
    ),
    "blank before the block": loop(f"[INST] {C} [/INST]", f" {SAID}</s>{END}", f"[INST] {C} [/INST]", ""),
    "mistral": loop(f"[INST] {C}[/INST]", f"{BEGIN} {C}</s>{END}", f"[INST] {C}\n\n[/INST]", "", before="<s>"),
    "vicuna": loop(f"USER: {C} ", f"ASSISTANT: {SAID}</s>{END}", f"{C} ", "ASSISTANT:"),
    "zephyr": loop(
        f"<|user|>\n{C}</s>\n", f"<|assistant|>\n{SAID}</s>{END}\n", f"<|system|>\n{C}</s>\n", "<|assistant|>\n"
    ),
    "phi": loop(f"<|user|>\n{C}<|im_end|>\n", f"<|assistant|>\n{SAID}<|im_end|>\n{END}", f"{C}\n", "<|assistant|>\n"),
    "llama 3": loop(
        "<s>user</s>\n\n{{ m.content | trim }}</s>",
        f"<s>assistant</s>\n\n{BEGIN}{{{{ m.content | trim }}}}</s>{END}",
        "<s>system</s>\n\n{{ m.content | trim }}</s>",
        "<s>assistant</s>\n\n",
        before="{{ bos_token }}",
    ),
    "gemma": loop(f"<s>user\n{C}</s>\n", f"<s>model\n{SAID}</s>\n{END}", f"<s>user\n{C}\n\n", "<s>model\n"),
    "plain text": loop(f"Human: {C}\n", f"AI: {SAID}\n{END}", f"{C}\n", "AI:"),
    "thinking": loop(
        f"<|im_start|>user\n{C}<|im_end|>\n",
        f"<|im_start|>assistant\n{BEGIN}<think>\n\n</think>\n\n{C}<|im_end|>{END}\n",
        f"<|im_start|>system\n{C}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "alpaca": loop(f"### Instruction:\n{C}\n\n", f"### Response:\n{SAID}</s>{END}", f"{C}\n\n", "### Response:\n"),
    "the word of the prompt": loop(f"{C}=>", f"{SAID};{END}", f"{C}.", ""),
}
KINDS = ("bpe", "sentencepiece-bpe")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks") / request.param
    folder.mkdir()
    section = TokenizerSection(train=request.param, vocab_size=450, special_tokens=SPECIAL)
    train(["AI: yes, the wheel turns. ASSISTANT: the mill=>no; ### Response:\nLa rivière"] * 30, folder, section)
    return folder


def encoder(folder: Path, template: str) -> ChatEncoder:
    (folder / "chat_template.jinja").write_text(template)
    return ChatEncoder(folder, parse_special_tokens=False)


text = st.builds(str.__add__, st.text(st.sampled_from("the wheel\né☃, 12"), max_size=12), st.sampled_from("abc.7"))
turns = st.lists(st.tuples(text, text), min_size=1, max_size=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_is_that_of_transformers(family: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = FAMILIES[family]
    ours, theirs = encoder(folder, template), transformers.AutoTokenizer.from_pretrained(str(folder))

    @given(turns=turns, system=st.none() | text)
    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    def equal(turns: list[tuple[str, str]], system: str | None) -> None:
        talk = [{"role": "system", "content": system}] if system is not None else []
        for asked, answered in turns:
            talk += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        found = ours.encode(conversation_line(talk), everything=False)
        expected = theirs.apply_chat_template(talk, return_assistant_tokens_mask=True, return_dict=True)
        assert found.ids.tolist() == expected["input_ids"]
        assert found.mask.tolist() == expected["assistant_masks"]

    equal()


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("blank", ["", " ", "\n\n"])
def test_a_span_may_end_at_the_first_token_or_in_blanks_that_have_none(
    strips: bool, blank: str, folder: Path, tmp_path: Path
) -> None:
    """Where transformers counts all that follows (its issue 47325)."""
    mine = shutil.copytree(folder, tmp_path / "tokenizer")
    if strips:
        tokenizer = Tokenizer.from_file(str(mine / "tokenizer.json"))
        own = [tokenizer.pre_tokenizer] if tokenizer.pre_tokenizer is not None else []
        tokenizer.pre_tokenizer = Sequence([WhitespaceSplit(), *own])
        tokenizer.save(str(mine / "tokenizer.json"))
    template = f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{SAID}{END}{{% else %}}<|user|>{C}"
    ours = encoder(mine, template + "{% endif %}{% endfor %}")
    talk = [{"role": "assistant", "content": f"a{blank}"}, {"role": "user", "content": "xyz"}]
    found = ours.encode(conversation_line([*talk, talk[0]]), everything=False)
    learnt = "".join(_decoder(mine)(found.ids[found.mask == 1]).split())
    assert learnt == "a<|user|>a"  # with the next role's token, since no other ends the answer


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_of_the_answer_is_learnt_and_nothing_else_that_was_said(
    family: str, blocks: bool, folder: Path
) -> None:
    """Also where the assistant begins, and the template has a system prompt of its own."""
    template = FAMILIES[family] if blocks else FAMILIES[family].replace(BEGIN, "").replace(END, "")
    ours = encoder(folder, template)
    asked, first, last = "xyz", "the wheel", "turns"
    talk: list[dict[str, Any]] = [
        {"role": "assistant", "content": first},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": last},
    ]
    found = ours.encode(conversation_line(talk), everything=False)
    decode = _decoder(folder)
    learnt, left = decode(found.ids[found.mask == 1]), decode(found.ids[found.mask == 0])
    assert first in learnt
    assert last in learnt
    assert asked not in learnt
    assert "Be kind" not in learnt
    assert first not in left
    assert last not in left


def _decoder(folder: Path) -> Any:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda ids: tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
