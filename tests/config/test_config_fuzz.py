"""Whatever a config holds, the outcome is a resolved run or a HeadraceError in our own words: no other exception."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.configfile import set_value
from foundation.errors import ConfigError, HeadraceError
from foundation.json_schema import keys_of, schema_of
from foundation.section import Section
from pipeline.config.batch import split_padded_batch
from pipeline.config.deepspeed.ignored import IGNORED, OTHER_NAMES
from pipeline.config.deepspeed.keys import REFUSED, REFUSED_BF16, REFUSED_FP16, REFUSED_ZERO
from pipeline.config.load import read_config
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from tests.config import deepspeed_files
from tests.conftest import tiny_config

OURS = [key.path.replace("[]", ".0") for key in keys_of(schema_of(Config)) if "[" not in key.path.replace("[]", "")]
DEEPSPEEDS = [
    *IGNORED,
    *OTHER_NAMES,
    *REFUSED,
    *(f"zero_optimization.{key}" for key in REFUSED_ZERO),
    *(f"bf16.{key}" for key in REFUSED_BF16),
    *(f"fp16.{key}" for key in REFUSED_FP16),
]
NUMBERS = [0, 1, -1, 2, 3, 1e-300, 1e300, 2**31, 2**63, 10**40, -(2**63), 0.5, 8.0, math.nan, math.inf, -math.inf]
TEXTS = ["", "auto", "none", "nan", "1e5", "0", "\x00", "\ud800", "é\u202e", "a" * 500, "..", "/", "{}"]
WILD = st.recursive(
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS]) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["enabled", "device", "params", "type", "lr", "path", "", "0", "_comment"]), inner
        )
    ),
    max_leaves=4,
)
EDITS = st.lists(st.tuples(st.sampled_from(OURS) | st.sampled_from(DEEPSPEEDS), WILD), min_size=1, max_size=6)
PYDANTICS_WORDS = ("pydantic", "validation error", "input_value", "extra_forbidden", "Input should")


@contextmanager
def only_our_errors() -> Iterator[None]:
    try:
        yield
    except HeadraceError as error:
        refusal = error
    else:
        return
    text = str(refusal)
    assert not any(word in text for word in PYDANTICS_WORDS), text
    assert not isinstance(refusal, ConfigError) or (refusal.why and refusal.remedy), text


def outcome(text: str, folder: Path, *, suffix: str, processes: int) -> None:
    path = folder / f"c{suffix}"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with only_our_errors():
        loaded = read_config(path)
        run = resolve(loaded.config, world_size=processes)
        assert run.batch.samples > 0
        assert all(math.isfinite(run.schedule.lr(step)) for step in (1, 2, run.steps))
        assert run.layout
        assert run.precision
        assert str(run.batch)
        assert all(label and text for label, text in loaded.notes)


def edited(edits: list[tuple[str, Any]], start: dict[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(json.dumps(start))
    for path, value in edits:
        with only_our_errors():  # an edit before may have put a number where this one descends
            set_value(raw, path, value)
    return raw


def check_edits(edits: list[tuple[str, Any]], source: str | None, processes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = tiny_config(Path("tokens"), Path("run"))
        if source is not None:
            start = {key: start[key] for key in ("model", "data", "run")}
            for key, value in deepspeed_files.FILES[source].items():
                set_value(start, key, value)
        text = json.dumps(edited(edits, start))
        outcome(text, Path(folder), suffix=".json", processes=processes)


SOURCES = st.none() | st.sampled_from(sorted(deepspeed_files.FILES))
COUNTS = st.sampled_from([1, 2, 3, 8])
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(EDITS, SOURCES, COUNTS)
def test_edited_values_end_in_a_run_or_in_our_error(
    edits: list[tuple[str, Any]], source: str | None, processes: int
) -> None:
    check_edits(edits, source, processes)


@pytest.mark.sweep
@LONG
@given(EDITS, SOURCES, COUNTS)
def test_many_more_edited_values_end_in_a_run_or_in_our_error(
    edits: list[tuple[str, Any]], source: str | None, processes: int
) -> None:
    check_edits(edits, source, processes)


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, None, True, [], {}, [[[]]], {"": {}}, "auto"], ids=ascii)
def test_every_key_with_a_wild_value_ends_in_a_run_or_in_our_error(value: Any, tmp_path: Path) -> None:
    start = tiny_config(Path("tokens"), Path("run"))
    for path in dict.fromkeys([*OURS, *DEEPSPEEDS]):
        text = json.dumps(edited([(path, value)], start))
        try:
            outcome(text, tmp_path, suffix=".json", processes=1)
        except Exception as error:  # names the key
            raise AssertionError(f"{path} = {value!r}") from error


@QUICK
@given(st.data())
def test_damaged_files_end_in_a_run_or_in_our_error(data: st.DataObject) -> None:
    text = json.dumps(tiny_config(Path("tokens"), Path("run")), indent=1)
    start, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    middle = data.draw(st.text(max_size=4) | st.sampled_from([text[start:end] * 2, "{", "]", ",", '"run": {},', "NaN"]))
    suffix = data.draw(st.sampled_from([".json", ".yaml", ".json5"]))
    damaged = (text[:start] + middle + text[min(end, start + 3) :]).replace("\r", "")
    with tempfile.TemporaryDirectory() as folder:
        outcome(damaged, Path(folder), suffix=suffix, processes=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        '{"train_batch_size": ' + "9" * 5000 + "}",
        '{"run": {}, "run": {}}',
        "\ufeff{}",
        "{'a': 1,}",
        "&a [*a]",
        "a: 2001-99-99",
        "? {a: 1}\n: 2",
        "1: 2",
        "null: 3",
    ],
    ids=lambda text: ascii(text[:20]),
)
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_texts_that_are_no_config_end_in_our_error(text: str, suffix: str, tmp_path: Path) -> None:
    outcome(text, tmp_path, suffix=suffix, processes=1)
    with pytest.raises(HeadraceError):
        read_config(tmp_path / f"c{suffix}")


def test_a_padded_batch_of_any_size_is_split_at_once() -> None:
    assert split_padded_batch(2**62, 2**62, dp=3)[1] >= 1


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """The section classes within a field's type: itself, of an optional value, or of a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def described_keys(section: type[Section], at: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, description) of every key; that of a section is its docstring, unless the field has one."""
    for name, field in section.model_fields.items():
        inner = list(sections_in(field.annotation))
        yield at + name, field.description or (inner[0].__doc__ if inner else None) or ""
        for each in inner:
            yield from described_keys(each, f"{at}{name}.")


KEYS = dict(described_keys(Config))


def test_the_keys_of_nested_sections_are_among_those_checked() -> None:
    assert {"bf16.enabled", "zero_optimization.offload_param.buffer_size", "data.sources.max_epochs"} < KEYS.keys()


def test_every_key_has_a_description_of_several_words_in_one_paragraph() -> None:
    assert {key: text for key, text in KEYS.items() if len(text.split()) < 4 or "\n\n" in text} == {}
