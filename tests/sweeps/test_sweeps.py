"""Sweeps: tables name the cells of the code, one cell of every family runs, mutants compute something else."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sweeps import sweep as sweeps
from tests.sweeps.__main__ import run_cells
from tests.sweeps.all_sweeps import SWEEPS
from tests.sweeps.families import LEAST_EQUAL, LEAST_TRAINED, tiny_fields
from tests.sweeps.layout_table import SUFFIX, note_of, summary
from tests.sweeps.mutants import EQUIVALENT, SUBJECTS, all_mutants, drawn, mutants_of
from tests.sweeps.mutations import folder_of
from tests.sweeps.run_families import FURTHER, LAYOUTS, failure, run_family
from tests.sweeps.run_layouts import COLUMNS, NAMED, run_layouts
from tests.sweeps.sweep import ROOT, CellResult, Sweep, digest_of

ROW = re.compile(
    r"^\| (?P<group>.+?) \| (?P<cells>\d+) \| \d+ \| (?P<passed>\d+) \| \d+ \| `(?P<digest>\w+)` \|$", re.MULTILINE
)


# mutants are drawn from the code, and change with it
@pytest.mark.integration
@pytest.mark.parametrize("name", sorted(SWEEPS.keys() - {"mutations"}))
def test_the_committed_table_has_the_cells_that_the_code_enumerates(name: str) -> None:
    sweep = SWEEPS[name]()
    committed = {row["group"]: (int(row["cells"]), row["digest"]) for row in ROW.finditer(sweep.table_file.read_text())}
    enumerated = {group: (len(cells), digest_of(cells)) for group, cells in sweep.groups.items()}
    assert committed == enumerated, f"run: make sweep-{name} (or python -m tests.sweeps {name} --table)"


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted(SWEEPS))
def test_the_committed_page_says_what_a_cell_is(name: str) -> None:
    sweep = SWEEPS[name]()
    assert " ".join(sweep.what.split()) in " ".join(sweep.table_file.read_text().split()), (
        f"python -m tests.sweeps {name} --table"
    )


def test_a_sweep_that_was_stopped_runs_the_cells_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "STATE", tmp_path / "state")
    monkeypatch.setattr(sweeps, "TABLES", tmp_path / "tables")
    ran: list[str] = []

    def run(cells: Sequence[str]) -> dict[str, tuple[bool, str]]:
        if "c" in cells and "c" not in ran:
            ran.append("c")
            raise KeyboardInterrupt
        ran.extend(cells)
        return {cell: (cell != "b", f"{cell} is wrong" if cell == "b" else "") for cell in cells}

    sweep = Sweep("toy", "toys", "A cell is a letter.", {"one": ["a", "b"], "two": ["c"]}, run)
    with pytest.raises(KeyboardInterrupt):
        run_cells(sweep, sweep.remaining())
    assert sweep.remaining() == ["b", "c"]  # a failed cell is run again
    run_cells(sweep, sweep.remaining())
    assert ran == ["a", "b", "c", "b", "c"]
    text = sweep.table_file.read_text()
    assert "of which 3 were run and 2 passed" in text
    assert "- `b`: b is wrong" in text


KINDS = {
    "ministral3": "sdpa",  # attention of our own
    "gpt_oss": "sdpa",  # attention sinks
    "mamba2": "sdpa",  # no attention heads, an infinity in its config
    "deepseek_v3": "sdpa",  # a router's bias, which is a persistent buffer
    "afmoe": "sdpa",  # a frozen parameter
    "zamba": "sdpa",  # parameters that layers share
    "dbrx": "sdpa",  # modules that run depending on the data, which ZeRO-3 must gather at once
}
IN_CI = {"gpt_oss", "deepseek_v3", "mamba2"}
"""The others run with `make sweep-tests`, and all families with `make sweep-families`."""

NAMED_FAMILIES = [
    *("gpt2", "gpt_oss", "gemma2", "gemma3_text", "gemma4_text", "deepseek_v3", "deepseek_v32", "glm4_moe", "olmoe"),
    *("qwen3_next", "nemotron_h", "bamba", "falcon_h1", "lfm2", "kimi_linear", "bloom", "cohere"),
]


def test_the_number_of_families_that_train_never_falls() -> None:
    text = SWEEPS["families"]().table_file.read_text()
    assert sum(int(row["passed"]) for row in ROW.finditer(text) if SUFFIX not in row["group"]) >= LEAST_TRAINED


def test_the_number_of_decoders_that_are_equal_in_a_layout_never_falls() -> None:
    text = SWEEPS["families"]().table_file.read_text()
    rows = re.findall(r"^\| ([\w ]+) \| \d+ \| (\d+) \|", text.partition("## Layouts")[2], re.MULTILINE)
    equal = {column: int(count) for column, count in rows}
    assert {column: equal[column] for column, least in LEAST_EQUAL.items() if equal[column] < least} == {}


def test_layouts_are_counted_over_decoders_that_train_and_refusals_by_reason() -> None:
    dense = {"dp": "equal, sdpa", "cp ring": "refused: parallel.cp: gpt2 is odd, 2 (try: 1)", "Ulysses": "equal, sdpa"}
    outcomes = {
        "gpt2": dense,
        "bloom": {**dense, "cp ring": "refused: parallel.cp: bloom is odd, 4 (try: 1)"},
        "olmoe": {**dense, "cp ring": "equal, sdpa", "ep": "differs: loss by 1.0e-03"},
        "bert": {**dense, "cp ring": "failed: | broken"},
        "fuyu": {"dp": "refused: it has parts"},
    }
    results = {
        kind + SUFFIX: CellResult(kind + SUFFIX, True, note_of(found), 0.0, "-", "-")
        for kind, found in outcomes.items()
    }
    text = "\n".join(summary(results))
    assert "| cp ring | 3 | 1 | 33.3 |  | 1 | 1 | 100.0 |  | 1 | 0 | 0.0 |" in text
    assert "| cp | 3 | 3 | 100.0 | 85 | 1 | 1 | 100.0 |  | 1 | 1 | 100.0 |" in text
    assert "- 2: cp ring: FAMILY is odd, N: gpt2, bloom\n- 1: ep: differs: loss by 1.0e-03: olmoe" in text
    assert "- 1: cp ring: failed: / broken: bert" in text


@pytest.mark.integration
def test_a_layout_is_equal_refused_different_or_failed() -> None:
    fewer, more = {"train_batch_size": 2}, {"train_batch_size": 8}  # there are 4 samples
    dp = COLUMNS["dp"]
    layouts = {"failed": dp | more, "refused": COLUMNS["ep"], "differs": dp | fewer, "equal": COLUMNS["packing"]}
    outcomes = run_layouts("llama", layouts)
    assert all(outcome.startswith(column) for column, outcome in outcomes.items()), outcomes
    assert "IndexError" in outcomes["failed"]


@pytest.mark.integration
def test_a_weight_of_two_stages_that_only_one_uses_has_the_gradient_of_one_process() -> None:
    outcomes = run_layouts("zamba2", {"torch": COLUMNS["pp"], "deepspeed": NAMED["ZeRO-1, pp 2"]})  # adapters of layers
    assert {outcome.partition(",")[0] for outcome in outcomes.values()} == {"equal"}, outcomes


@pytest.mark.sweep
@pytest.mark.parametrize("kind", NAMED_FAMILIES)
def test_a_family_is_equal_to_one_process_in_layouts_of_both_engines(kind: str) -> None:
    outcomes = run_layouts(kind, NAMED)
    assert {name: outcome for name, outcome in outcomes.items() if not outcome.startswith("equal")} == {}


def test_a_tiny_model_keeps_what_selects_code_paths_and_has_no_dropout() -> None:
    fields = tiny_fields("gpt2")
    assert fields["n_embd"] == 64
    assert fields["resid_pdrop"] == 0.0
    assert "activation_function" not in fields


def test_a_refusal_is_told_by_its_reason_and_a_fault_by_its_exception() -> None:
    assert failure("ZeRO-1", 2, "model.config.x = 1\n  why: it is odd\n  try: 2") == "refused: it is odd"
    output = "Traceback\n  File x\n[rank1]: ValueError: broken\nmore"
    assert failure("ZeRO-1", 1, output) == "ZeRO-1 ended with code 1: [rank1]: ValueError: broken"


@pytest.mark.integration
@pytest.mark.parametrize(
    "kind", [each if each in IN_CI else pytest.param(each, marks=pytest.mark.sweep) for each in KINDS]
)
def test_a_family_of_every_kind_trains_is_exported_and_loaded_with_its_loss(
    kind: str, tokens: Path, tmp_path: Path
) -> None:
    name = {"gpt_oss": "ZeRO-1", "afmoe": "ZeRO-1", "mamba2": "FSDP2", "zamba": "FSDP2"}.get(kind, "ZeRO-3")
    result = run_family(kind, tokens, tmp_path, layouts={name: LAYOUTS[name]})
    assert result.trained, result.note
    assert result.note.startswith(KINDS[kind])


@pytest.mark.integration
# longrope that crosses its threshold; layers without RoPE
@pytest.mark.parametrize("kind", ["phi3", pytest.param("smollm3", marks=pytest.mark.sweep)])
def test_a_family_trains_with_its_sequence_divided_and_from_some_of_its_layers(
    kind: str, tokens: Path, tmp_path: Path
) -> None:
    result = run_family(kind, tokens, tmp_path, layouts={"FSDP2": LAYOUTS["FSDP2"], **FURTHER})
    assert result.trained, result.note
    assert re.fullmatch(r"sdpa; FSDP2 (\d\.\d+), cp 2 \1, layers dropped \d\.\d+", result.note), result.note


@pytest.mark.integration
def test_a_model_that_sees_later_tokens_is_refused_before_it_trains(tokens: Path, tmp_path: Path) -> None:
    result = run_family("cpmant", tokens, tmp_path)
    assert (result.trained, result.note.split(",")[0]) == (False, "refused: it sees the tokens to its right")


FUNCTION = '''
def lr(step: int = 3) -> float:
    """Doubles 2 < 3."""
    assert step > 1
    log.info("step %d", step + 1)
    if step < 0:
        raise ValueError(f"{step + 1}", step - 1)
    rate: Literal[2] = divide(step, peak)
    self.count += 1
    return rate
'''


def test_200_mutants_of_a_seed_change_the_code_and_have_tests() -> None:
    found = drawn()
    assert {subject: len(mutants) for subject, mutants in found.items()} == {
        subject: count for subject, (count, _) in SUBJECTS.items()
    }
    mutants = [each for several in found.values() for each in several]
    assert len({each.name for each in mutants}) == 200
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in mutants}
    trees = {file: ast.dump(ast.parse(text)) for file, text in texts.items()}
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.applied(texts[mutant.file]))) != trees[mutant.file], mutant.name
        assert folder_of(mutant) != "tests", mutant.name


def test_another_seed_draws_others() -> None:
    names = [{each.name for found in drawn(seed=seed).values() for each in found} for seed in (0, 0, 1)]
    assert names[0] == names[1]
    assert len(names[0] & names[2]) < 60


def test_mutants_that_are_equivalent_to_the_code_still_exist() -> None:
    assert EQUIVALENT.keys() <= {each.name for found in all_mutants().values() for each in found}


def test_messages_assertions_and_annotations_are_left_alone() -> None:
    names = [mutant.name.partition(" [")[0] for mutant in mutants_of(FUNCTION, "lr.py")]
    assert names == [
        "lr: < -> <= in step < 0",
        "lr: 0 -> 1 in step < 0",
        "lr: swap step and peak in divide(step, peak)",
        "lr: leave out self.count += 1",
        "lr: 1 -> 2 in self.count += 1",
    ]


@pytest.mark.parametrize(
    "moved", ["import math\n\n\n" + FUNCTION, FUNCTION.replace("    assert step > 1\n", "    first = next(steps)\n")]
)
def test_a_mutant_keeps_its_name_where_its_function_moves(moved: str) -> None:
    assert [each.name for each in mutants_of(moved, "b.py")] == [each.name for each in mutants_of(FUNCTION, "a.py")]
