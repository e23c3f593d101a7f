"""What a conversation is: messages with roles, handed on as one line of JSON."""

from __future__ import annotations

from typing import Any

import orjson

TEMPLATE_FILE = "chat_template.jinja"
"""Of a tokenizer folder, as `AutoTokenizer` reads and writes it."""


class ConversationError(ValueError):
    """A conversation that cannot be trained on; says why."""


def canonical(messages: Any, tools: Any = None) -> str:
    """A conversation as one line of JSON: what readers hand on as its text.

    Raises:
        ConversationError: it is no list of turns with a role.
    """
    if not isinstance(messages, list) or not messages:
        raise ConversationError("not a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConversationError("a message without a role")
    return orjson.dumps({"messages": messages, "tools": tools}).decode()


def opened(line: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages and tools of a line from `canonical`; tools that are a string are read as JSON.

    Raises:
        ConversationError: the tools are no list.
    """
    content = orjson.loads(line)
    tools = content["tools"]
    if isinstance(tools, str):
        try:
            tools = orjson.loads(tools)
        except orjson.JSONDecodeError as error:
            raise ConversationError(f"the tools are a string that is not JSON: {error}") from None
    if tools is not None and not isinstance(tools, list):
        raise ConversationError(f"the tools are no list, but a JSON {type(tools).__name__}")
    return content["messages"], tools


def plain(line: str) -> str:
    """What is said in a conversation, without any template: what a tokenizer learns from."""
    said = (message.get("content") for message in orjson.loads(line)["messages"])
    return "\n".join(content for content in said if isinstance(content, str))


def why_no_conversation(messages: Any) -> tuple[str, str] | None:
    """Reason and detail of what `canonical` refuses; None for what it takes."""
    try:
        canonical(messages)
    except (ConversationError, TypeError) as error:
        return "not a conversation", str(error)
    return None
