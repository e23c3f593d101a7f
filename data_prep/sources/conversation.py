"""Conversations (chat messages with roles), represented as one line of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

TEMPLATE_FILE = "chat_template.jinja"
"""Chat template file in a tokenizer folder, as `AutoTokenizer` reads and writes it."""


class ConversationError(ValueError):
    """A conversation that cannot be used for training; the message is the reason."""


def conversation_line(messages: Any, tools: Any = None) -> str:
    """Serializes a conversation as one line of JSON, which readers pass on as the document's text.

    Messages given as a string of JSON, or as strings of JSON in a list, are parsed; messages of ShareGPT (`from`,
    `value`) get a role.

    Raises:
        ConversationError: the messages are not a non-empty list of objects with a "role".
    """
    messages = _parsed(messages, what="the messages")
    if not isinstance(messages, list) or not messages:
        raise ConversationError("not a list of messages")
    messages = [_with_role(_parsed(message, what="a message")) for message in messages]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConversationError("a message without a role")
    return orjson.dumps({"messages": messages, "tools": tools}).decode()


def _parsed(value: Any, *, what: str) -> Any:
    """Parses a value if it is a string of JSON; returns other values unchanged.

    Raises:
        ConversationError: the value is another string.
    """
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        verb = "is" if what.startswith("a ") else "are"
        raise ConversationError(f"{what} {verb} a string that is not JSON: {error}") from None


def parse_conversation(line: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Parses a line from `conversation_line`; tools given as a string, or as strings in a list, are parsed as JSON.

    Returns:
        The messages, and the tools or None.

    Raises:
        ConversationError: the tools are not a list.
    """
    content = orjson.loads(line)
    tools = _parsed(content["tools"], what="the tools")
    if tools is not None and not isinstance(tools, list):
        raise ConversationError(f"the tools must be a list, not a JSON {type(tools).__name__}")
    return content["messages"], tools and [_parsed(tool, what="a tool") for tool in tools]


def message_text(line: str) -> str:
    """The messages' contents, without any template: the text for tokenizer training."""
    contents = (message.get("content") for message in orjson.loads(line)["messages"])
    texts = (content if isinstance(content, list) else [content] for content in contents)
    said = ([text for text in map(_text_of_part, parts) if isinstance(text, str)] for parts in texts)
    return "\n".join("".join(parts) for parts in said if parts)


def joined_parts(parts: Sequence[Any]) -> str:
    """The text of a content given as a list of parts: strings, or `{"type": "text", "text": ...}`.

    Raises:
        ConversationError: a part is something else, such as an image.
    """
    texts = [_text_of_part(part) for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            kind = repr(part.get("type")) if isinstance(part, dict) else f"a {type(part).__name__}"
            raise ConversationError(f"a message has a part that is not text ({kind}): only text can be trained on")
    return "".join(texts)


def _text_of_part(part: Any) -> Any:
    """The text of a text part; other parts unchanged."""
    return part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part


def prompt_and_answer(prompt: Sequence[Any], answer: Any) -> list[Any]:
    """The messages of a conversation of one turn, from fields such as `instruction`, `input` and `output`.

    Args:
        prompt: the user's side: strings, joined by line ends, where empty ones and None are skipped; or lists of
            messages.
        answer: the assistant's side: a string or a list of messages.

    Raises:
        ConversationError: a field is something else, or one side is empty.
    """
    if isinstance(answer, list):
        lists = [part for part in prompt if part is not None]
        if all(isinstance(part, list) for part in lists):
            return [message for part in (*lists, answer) for message in part]
    for part in (*prompt, answer):
        if part is not None and not isinstance(part, str):
            raise ConversationError(f"a field of messages_field holds a {type(part).__name__}, not a string")
    asked = "\n".join(part for part in prompt if part)
    if not asked or not answer:
        raise ConversationError(
            f"the {'assistant' if asked else 'user'} says nothing: its fields of messages_field are empty"
        )
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    "system": "system",
    "function_call": "assistant",
}
"""Value of `from` in ShareGPT and in tools that read its format -> role."""


def _with_role(message: Any) -> Any:
    """Returns a message, with `role` and `content` if it has ShareGPT's `from` and `value`.

    Raises:
        ConversationError: an unknown name, or a function call that is not JSON.
    """
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    name, value = message["from"], message.get("value")
    if name not in _SHAREGPT_ROLES:
        raise ConversationError(f"a message from {name!r}, which is none of: {', '.join(_SHAREGPT_ROLES)}")
    rest = {key: item for key, item in message.items() if key not in ("from", "value")}
    if name != "function_call":
        return {"role": _SHAREGPT_ROLES[name], "content": value} | rest
    calls = _parsed(value, what="a function call")
    functions = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in functions]} | rest


def conversation_hint(names: Iterable[str]) -> str:
    """A hint for the config if rows with these fields look like conversations; else ""."""
    known = list(names)
    for field in ("messages", "conversations"):
        if field in known:
            return f' (conversations: "messages_field": "{field}")'
    for fields in (("instruction", "input", "output"), ("prompt", "completion"), ("prompt", "response")):
        found = [field for field in fields if field in known]
        if {fields[0], fields[-1]} <= set(found):
            return f' (conversations: "messages_field": {orjson.dumps(found).decode()})'
    return ""
