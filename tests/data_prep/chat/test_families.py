"""Templates of well-known families, reduced to what makes their masks hard, and fields that templates leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_prep.chat.encoder import ChatEncoder
from data_prep.config.corpus import TokenizerSection
from data_prep.sources.conversation import ConversationError, conversation_line
from data_prep.tokenizer.load import load
from data_prep.tokenizer.train import train

SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "<|im_end|>", "<|channel|>"]
USER, SAID = "<|user|>{{ m.content }}<|end|>", "{{ m.content }}<|end|>"


def loop(answer: str, *, user: str = USER, before: str = "", after: str = "", prompt: str = "<|assistant|>") -> str:
    """A template: `answer` and `user` for each message, `after` at the end, or the generation prompt."""
    each = f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}{{% else %}}{user}{{% endif %}}"
    end = f"{{% if add_generation_prompt %}}{prompt}{{% else %}}{after}{{% endif %}}"
    return before + each + "{% endfor %}" + end


THOUGHT = "{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}"
DEEPSEEK = loop(f"<|assistant|>{SAID}", prompt="<|assistant|><think>\n")
NEMOTRON = loop(f"<|assistant|><think>{THOUGHT}</think>{SAID}", prompt="<|assistant|><think>\n")
PHI_3 = loop(f"<|assistant|>\n{SAID}\n", after="<|endoftext|>", prompt="<|assistant|>\n")
GPT_OSS = loop("<|assistant|>{{ m.content }}{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}")
GLM = loop("<|assistant|>{{ m.content }}", user="<|user|>{{ m.content }}")
QWEN_3 = loop(f"<|assistant|>{{% if loop.last %}}<think></think>{{% endif %}}{SAID}")
LLAMA_3_2 = loop(f"<|assistant|>{SAID}", before="{{ strftime_now('%d %b %Y') }}")
THINKS = loop(f"<|assistant|><think>{THOUGHT}</think>{SAID}")
TWO = [
    {"role": "user", "content": "<t?"},
    {"role": "assistant", "content": "<b>"},
    {"role": "user", "content": "|?"},
    {"role": "assistant", "content": "<t"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    section = TokenizerSection(train="bpe", vocab_size=400, special_tokens=SPECIAL)
    train(["a wheel of <b> the mill <think> </think>"] * 20, folder, section)
    return folder


def encoder(folder: Path, template: str, **about: Any) -> ChatEncoder:
    (folder / "chat_template.jinja").write_text(template)
    return ChatEncoder(folder, parse_special_tokens=False, **about)


def learnt(folder: Path, template: str, messages: list[Any], **about: Any) -> list[str]:
    """The runs of text that count in the loss, with the EOS that is put after the document."""
    found = encoder(folder, template, **about).encode(conversation_line(messages), everything=False)
    runs, last = [[]], 0
    for token, counts in zip(found.ids.tolist(), found.mask.tolist(), strict=True):
        if counts and not last:
            runs.append([])
        if counts:
            runs[-1].append(token)
        last = counts
    texts = [load(folder).decode(run, skip_special_tokens=False) for run in runs[1:]]
    return [*texts[:-1], texts[-1] + "EOS" * found.end_learnt]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (DEEPSEEK, ["<b><|end|>", "<t<|end|>"]),
        (NEMOTRON, ["</think><b><|end|>", "</think><t<|end|>"]),
        (PHI_3, ["<b><|end|>\n", "<t<|end|>\n<|endoftext|>"]),
        (GPT_OSS, ["<b><|end|>", "<t<|return|>"]),
        (GLM, ["<b><|user|>", "<tEOS"]),
        (LLAMA_3_2, ["<b><|end|>", "<t<|end|>"]),
    ],
    ids=["think in the prompt", "think in both", "a closing EOS", "another end at the end", "next role", "date"],
)
def test_the_answers_and_their_ends_are_learnt(template: str, expected: list[str], folder: Path) -> None:
    """Also where the prompt goes on as an answer begins (`<`), and where two special tokens begin alike (`<|`)."""
    assert learnt(folder, template, TWO, date="2026-01-31") == expected
    asked = {"role": "user", "content": "?"}
    cut = [text.replace("<|return|>", "<|end|>").replace("\n<|endoftext|>", "\n") for text in expected]
    cut = [text.replace("EOS", "<|user|>") for text in cut]
    assert learnt(folder, template, [*TWO, asked], date="2026-01-31") == cut


def test_a_template_that_changes_earlier_turns_is_refused_even_if_the_last_answer_is_the_same(folder: Path) -> None:
    with pytest.raises(ConversationError, match="changes earlier turns"):
        learnt(folder, QWEN_3, [*TWO[:2], *TWO[:2]])
    assert learnt(folder, QWEN_3, TWO[:2]) == ["<think></think><b><|end|>"]


def test_the_date_of_the_config_is_the_templates_today(folder: Path) -> None:
    found = encoder(folder, LLAMA_3_2, date="2026-01-31").encode(conversation_line(TWO), everything=False)
    assert found.text.startswith("31 Jan 2026<|user|>")
    with pytest.raises(ConversationError, match=r'"tokenizer": {"date": "2026-01-31"}'):
        learnt(folder, LLAMA_3_2, TWO)
    with pytest.raises(ValueError, match="Invalid isoformat"):
        TokenizerSection(path="t", date="today")


def answer(**fields: Any) -> list[Any]:
    return [TWO[0], {"role": "assistant", "content": "b"} | fields]


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": "why"}, "why"),
        ({"thinking": "why"}, "why"),
        ({"reasoning": "why", "thinking": None}, "why"),
        ({"reasoning": "other", "thinking": "why"}, "why"),
        ({}, ""),
    ],
)
def test_reasoning_is_learnt_under_each_of_its_names(fields: dict[str, Any], reasoning: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for template in (THINKS, THINKS.replace("reasoning_content", "thinking")):
        assert learnt(folder, template, answer(**fields)) == [f"<think>{reasoning}</think>b<|end|>"]
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        found = encoder(folder, template).encode(conversation_line(answer(**fields)), everything=False)
        assert found.text == theirs.apply_chat_template(answer(**fields), tokenize=False)
        assert not found.unprinted


RESULT = {"role": "tool", "content": "seven", "name": "f", "tool_call_id": "1"}
NAMES = loop(SAID, user="{{ m.name }}")
CALL = {"function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (DEEPSEEK, answer(thinking="why", weight=1), {"reasoning": 1}),
        (QWEN_3, answer(content="<think>why</think>b"), {}),
        (loop("{{ m.content.split('</think>')[-1] }}"), answer(content="<think>why</think>b"), {"reasoning": 1}),
        (NAMES, [*answer(mood="", id=3)[1:], RESULT], {"content of tool": 1, "id": 1, "tool_call_id": 1}),
        (NAMES.replace("m.name", "m.name + m.tool_call_id"), [*answer()[1:], RESULT], {"content of tool": 1}),
    ],
    ids=["reasoning", "nothing", "reasoning in the content", "fields", "a field that the template needs"],
)
def test_fields_that_the_template_does_not_print_are_counted(
    template: str, messages: list[Any], expected: dict[str, int], folder: Path
) -> None:
    assert encoder(folder, template).encode(conversation_line(messages), everything=False).unprinted == expected


def test_tools_that_the_template_does_not_print_are_counted(folder: Path) -> None:
    for template, expected in ((DEEPSEEK, {"tools": 1}), ("{{ tools | length }}" + DEEPSEEK, {})):
        found = encoder(folder, template).encode(conversation_line(TWO, [CALL]), everything=False)
        assert found.unprinted == expected


@pytest.mark.parametrize("field", ["content", "tool_calls", "function_call"])
def test_a_conversation_without_what_was_said_is_refused(field: str, folder: Path) -> None:
    printed = "{% for p in m.content %}{{ p.text }}{% endfor %}" if field == "content" else "{{ m.content }}"
    with pytest.raises(ConversationError, match=f"has {field}, which the chat template does not print"):
        learnt(folder, loop(printed + "<|end|>"), answer(**({} if field == "content" else {field: [CALL]})))


@pytest.mark.parametrize("template", [f"{{% if 'f' in m %}}{{{{ m.f[0] }}}}{{% endif %}}{SAID}", SAID + "{{ m.f }}"])
def test_a_field_that_is_null_is_as_good_as_absent(template: str, folder: Path) -> None:
    assert learnt(folder, loop(template), answer(f=None)) == ["b<|end|>"]


@pytest.mark.parametrize("blank", ["", "\n", "\n\n"])
def test_a_turns_end_that_is_the_documents_is_not_doubled(blank: str, folder: Path) -> None:
    encoded = encoder(folder, loop(SAID + blank)).encode(conversation_line(TWO), everything=False)
    (end,) = load(folder).encode("<|end|>", add_special_tokens=False).ids[-1:]
    framed = encoded.without((), (int(encoded.ids[-1 - encoded.blanks]),))
    assert load(folder).decode(framed.ids.tolist(), skip_special_tokens=False).endswith("<t")
    assert framed.end_learnt
    assert len(framed.ids) == len(framed.mask)
    assert encoded.without((), (end,)).ids.tolist() == encoded.ids.tolist()
