"""Conversations (chat messages with roles), represented as one line of JSON."""

from __future__ import annotations

from typing import Any

import orjson

TEMPLATE_FILE = "chat_template.jinja"
"""Chat template file in a tokenizer folder, as `AutoTokenizer` reads and writes it."""


class ConversationError(ValueError):
    """A conversation that cannot be used for training; the message is the reason."""


def conversation_line(messages: Any, tools: Any = None) -> str:
    """Serializes a conversation as one line of JSON, which readers pass on as the document's text.

    Messages that are a string of JSON, or strings of JSON in a list, are parsed; those of ShareGPT (`from`, `value`)
    become messages with a role.

    Raises:
        ConversationError: the messages are not a non-empty list of objects with a "role".
    """
    messages = _parsed(messages, what="the messages")
    if not isinstance(messages, list) or not messages:
        raise ConversationError("not a list of messages")
    if any(isinstance(message, str) for message in messages):
        messages = [_parsed(message, what="a message") for message in messages]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConversationError("a message without a role")
    return orjson.dumps({"messages": messages, "tools": tools}).decode()


def _parsed(value: Any, *, what: str) -> Any:
    """A value, parsed if it is a string of JSON.

    Raises:
        ConversationError: it is another string.
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
        the messages, and the tools or None.

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
    return "\n".join(content for content in contents if isinstance(content, str))


def conversation_problem(messages: Any) -> tuple[str, str] | None:
    """Reason and detail if `conversation_line` refuses the messages, else None."""
    try:
        conversation_line(messages)
    except (ConversationError, TypeError) as error:
        return "not a conversation", str(error)
    return None
