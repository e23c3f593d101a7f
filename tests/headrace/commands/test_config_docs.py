"""`headrace schema` and `headrace explain`: every key, from the classes that read the files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foundation import configfile
from foundation.config_kinds import KINDS, example_file, keys, parts_of
from foundation.errors import ConfigError
from foundation.json_schema import NO_DEFAULT
from foundation.section import parse
from headrace.commands.explain import lines_of
from headrace.commands.schema import reference
from pipeline.config.foreign_names import foreign_names
from pipeline.engines.parallel.architecture_limits import layout_lines
from tests.conftest import ROOT
from tests.headrace.commands.test_app import run

SHIPPED = {
    "run": [*(ROOT / "ds_configs").rglob("*.json"), ROOT / "demo/teacher.json", ROOT / "demo/student.json"],
    "corpus": [ROOT / "demo/corpus.json", ROOT / "demo/filtered.json"],
    "prune": [],
    "quantize": [],
    "compress": [ROOT / "demo/compress.json"],
}


def errors(kind: str, value: object) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(KINDS[kind].schema()).iter_errors(value)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_is_a_json_schema_of_the_draft_it_names(kind: str) -> None:
    printed = json.loads(run("schema", kind))
    assert printed["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(printed)
    assert "title" not in printed["properties"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_description(kind: str) -> None:
    assert [key.path for key in keys(kind) if not key.description] == []


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in SHIPPED.items() for path in paths], ids=str)
def test_shipped_configs_are_right_by_the_schema_alone_and_with_what_they_extend(kind: str, path: Path) -> None:
    assert errors(kind, json.loads(path.read_text())) == []
    assert errors(kind, configfile.load(path)) == []


def test_an_editor_sees_what_is_wrong_and_allows_what_is_for_itself() -> None:
    assert errors("run", {"$schema": "run.schema.json", "extends": ["a.json"]}) == []
    assert errors("run", {"run": {"stepz": 3}})
    assert errors("run", {"run": {"steps": 0}})
    assert errors("run", {"run": {"steps": 5e8}}) == []
    assert errors("run", {"train_batch_size": "auto", "bf16": {"enabled": "auto"}}) == []
    assert errors("run", {"data": {"sources": [{}]}})  # a list is given whole, so its objects are, too
    assert errors("corpus", {"clean": [{"step": "c5"}]})


def test_the_reference_page_is_that_of_the_code() -> None:
    page = (ROOT / "docs/config-reference.md").read_text()
    assert page == reference(), "write it anew: headrace schema --markdown > docs/config-reference.md"


def test_the_page_of_common_keys_has_forty_that_exist() -> None:
    listed = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/reference/common-keys.md").read_text(), re.MULTILINE)
    assert len(listed) == len({*listed}) == 40
    assert {*listed} - {key.path for key in keys("run")} == set()


def test_the_schema_may_be_written_to_a_file(tmp_path: Path) -> None:
    run("schema", "corpus", "--output", tmp_path / "corpus.schema.json")
    assert json.loads((tmp_path / "corpus.schema.json").read_text()) == KINDS["corpus"].schema()
    assert f"one of {', '.join(KINDS)}" in run("schema", "corpse", code=2)


def test_a_key_is_explained_with_type_default_and_example() -> None:
    lines = lines_of("run.keep_every")
    assert lines[0] == "run.keep_every  (in the config of a training run)"
    text = "\n".join(lines)
    assert "  type     a whole number, at least 1, or null" in text
    assert "  default  null" in text
    assert '  example  {"run": {"dir": "runs/zero3", "keep_every": ' in text
    assert "headrace train" in text


@pytest.mark.parametrize("way", ["data.sources[].weight", "data.sources.0.weight", "data.sources[3].weight"])
def test_a_key_of_a_list_may_be_written_in_several_ways(way: str) -> None:
    assert lines_of(way) == lines_of("data.sources[].weight")


def test_a_section_lists_its_keys_and_nothing_lists_the_sections() -> None:
    assert any(line.startswith("  run.keep_every ") for line in lines_of("run"))
    overview = "\n".join(lines_of(""))
    assert all(re.search(rf"^{kind}: ", overview, re.MULTILINE) for kind in KINDS)
    assert re.search(r"^  zero_optimization +\S", overview, re.MULTILINE)


def test_a_last_name_finds_every_key_that_ends_with_it() -> None:
    text = "\n".join(lines_of("seed"))
    assert "data-prep job" in text
    assert "bf16.enabled" in "\n".join(lines_of("enabled"))


def test_a_step_of_the_cleaning_chain_is_explained() -> None:
    assert '{"clean": [{"step": "c4", "min_sentences": ' in "\n".join(lines_of("clean.c4.min_sentences"))


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("run.kep_every", "run.keep_every"),
        ("zero_optimisation.stage", "zero_optimization.stage"),
        ("warmup_num_step", "scheduler.params.warmup_num_steps"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_nearest(path: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean '.*{near}"):
        lines_of(path)


def test_keys_that_are_not_in_the_schema_are_explained_where_they_are_known() -> None:
    assert "use bf16" in "\n".join(lines_of("amp"))
    assert "model.config" in lines_of("model.config.hidden_size")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_and_every_default_is_one(kind: str) -> None:
    schema = KINDS[kind].schema()
    for key in keys(kind):
        whole: Any = json.loads(example_file(key, kind))
        assert "..." not in example_file(key, kind), key.path
        wrong = [each.message for each in jsonschema.Draft202012Validator(schema).iter_errors(whole)]
        assert [message for message in wrong if "required" not in message and "is not valid under" not in message] == []
        if key.default is not NO_DEFAULT:
            alone = {"$defs": key.schema.get("$defs", {}), **key.node}
            assert jsonschema.Draft202012Validator(alone).is_valid(key.default), key.path


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_has_the_keys_that_its_section_requires(kind: str) -> None:
    """Nothing is missing from an example but other sections."""
    schema = jsonschema.Draft202012Validator({**KINDS[kind].schema(), "required": []})
    for key in keys(kind):
        errors = schema.iter_errors(json.loads(example_file(key, kind)))
        assert [error.message for error in errors if error.validator == "required"] == [], key.path


def test_parts_of_a_path_leave_out_indices() -> None:
    assert parts_of("clean[c4].min_sentences") == ("clean", "c4", "min_sentences")
    assert parts_of("data.sources.0.path") == ("data", "sources", "path")


def test_a_config_in_yaml_is_the_same_config(tmp_path: Path) -> None:
    path = tmp_path / "corpus.yaml"
    path.write_text("output: o\nsources: [{path: x}]\ntokenizer: {train: bpe, vocab_size: 8e3}\n")
    section = KINDS["corpus"].section()
    assert parse(section, configfile.load(path)).tokenizer.vocab_size == 8000


def test_explain_layout_prints_stages_and_shards_of_a_family_or_why_there_are_none() -> None:
    gpt2 = run("explain", "layout", "gpt2")
    assert "pipeline stages (derived)\n  before  transformer.wte, transformer.wpe\n  layers  transformer.h\n" in gpt2
    assert "  transformer.h.*.attn (GPT2Attention)  c_attn qkv, c_proj rowwise\n" in gpt2
    assert "  model.layers.*.mlp  gate_proj colwise, up_proj colwise, down_proj rowwise\n" in run(
        "explain", "layout", "llama"
    )
    assert "refused: hrm_text has no base_model_pp_plan, and none" in run("explain", "layout", "hrm_text")
    with pytest.raises(ConfigError, match="no such model_type"):
        list(layout_lines("llamma"))


@pytest.mark.parametrize("name", foreign_names())
def test_a_name_of_another_tool_is_explained_by_the_key_here_or_by_why_there_is_none(name: str) -> None:
    lines, found = lines_of(name), foreign_names()[name]
    shown = {line.partition("  (in ")[0] for line in lines if "  (in " in line}
    assert {*found.ours} & {key.path for key in keys("run")} <= shown
    assert found.ours or f"  not offered: {found.no.partition('; ')[0]}" in lines or f"  here     {found.note}" in lines


def test_a_name_within_a_section_or_with_a_dash_is_explained_too() -> None:
    assert lines_of("training.max-steps")[1:] == lines_of("max_steps")[1:]


def test_a_key_that_is_only_near_by_spelling_is_called_so() -> None:
    for word, near in (("lorra", "lora"), ("warmup_num_step", "scheduler.params.warmup_num_steps")):
        with pytest.raises(ConfigError, match=f"did you mean '{near}'. It is the nearest by spelling"):
            lines_of(word)
