"""Conversations as other tools write them: ShareGPT, Alpaca, prompt and completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.config.corpus import Source
from data_prep.sources.conversation import ConversationError, conversation_line, prompt_and_answer
from data_prep.sources.listing import resolve
from data_prep.sources.read_unit import read_unit, wanted_fields
from data_prep.sources.records import BadRecord
from data_prep.sources.units import units
from foundation.errors import ConfigError, DataError
from tests.data_prep.conftest import write_config
from tests.data_prep.in_process import run_job

CALL = {"name": "weir", "arguments": {"open": True}}
SHAREGPT = [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "Open the weir."},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "open"},
    {"from": "gpt", "value": "It is open.", "weight": 1},
]
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Open the weir."},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "open"},
    {"role": "assistant", "content": "It is open.", "weight": 1},
]
ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Say yes.", "input": "", "output": "yes"},
]


def written(work: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), work / "a.parquet")
    else:
        text = json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
        (work / f"a.{kind}").write_text(text)
    return f"a.{kind}"


def read(path: str, **fields: Any) -> tuple[list[Any], list[BadRecord]]:
    """The messages of all conversations, and the unreadable records."""
    source = Source.model_validate({"path": path} | fields)
    found: list[Any] = []
    bad: list[BadRecord] = []
    for unit in units([resolve(source, at="sources.0")], task_bytes=1 << 40):
        for record in read_unit(unit, wanted_fields(source)):
            if isinstance(record, BadRecord):
                bad.append(record)
            else:
                found += [json.loads(text)["messages"] for text in record.texts]
    return found, bad


KINDS = pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])


@KINDS
def test_messages_of_sharegpt_get_a_role(kind: str, work: Path) -> None:
    path = written(work, kind, [{"conversations": SHAREGPT}])
    assert read(path, messages_field="conversations") == ([MESSAGES], [])


def test_an_unknown_name_or_a_call_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConversationError, match="from 'narrator', which is none of: human, user, gpt"):
        conversation_line([{"from": "narrator", "value": "x"}])
    with pytest.raises(ConversationError, match="a function call is a string that is not JSON"):
        conversation_line([{"from": "function_call", "value": "weir()"}])


@KINDS
def test_fields_of_what_the_user_and_the_assistant_say_are_a_conversation(kind: str, work: Path) -> None:
    found, bad = read(written(work, kind, ALPACA), messages_field=["instruction", "input", "output"])
    assert not bad
    assert found == [
        [{"role": "user", "content": "Add.\n1 and 2"}, {"role": "assistant", "content": "3"}],
        [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}],
    ]


@KINDS
def test_prompt_and_completion_may_be_texts_or_lists_of_messages(kind: str, work: Path) -> None:
    fields = {"messages_field": ["prompt", "completion"]}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = written(work, kind, [{"prompt": talk[:1], "completion": talk[1:]}])
    assert read(path, **fields) == ([talk], [])
    path = written(work, kind, [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}])
    found, bad = read(path, **fields)
    assert found == [talk]
    assert [(record.reason, record.detail) for record in bad] == [
        ("not a conversation", "the assistant says nothing: its fields of messages_field are empty")
    ]
    with pytest.raises(ConversationError, match="holds a int, not a string"):
        prompt_and_answer([1], "b")


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (ALPACA, '"messages_field": ["instruction","input","output"]'),
        ([{"conversations": SHAREGPT}], '"messages_field": "conversations"'),
        ([{"prompt": "a", "completion": "b"}], '"messages_field": ["prompt","completion"]'),
    ],
)
@KINDS
def test_rows_without_text_that_are_conversations_are_recognized(
    rows: list[dict[str, Any]], remedy: str, kind: str, work: Path
) -> None:
    """The remedy of the message is taken, and works."""
    path = written(work, kind, rows)
    with pytest.raises((ConfigError, DataError)) as refused:
        run_job(write_config(sources=[{"path": path}]))
    assert remedy in str(refused.value)
    assert not read(path, **json.loads(f"{{{remedy}}}"))[1]


def test_a_list_of_fields_names_at_least_two() -> None:
    with pytest.raises(ValueError, match="two fields or more"):
        Source(path="a.jsonl", messages_field=["prompt"])
