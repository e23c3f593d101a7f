"""Line deduplication: the first occurrences of a line are kept, in the order of the input."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.config.dedup import LinesSection
from data_prep.dedup import table
from data_prep.dedup.line_tasks import DroppedLines, repeated_lines_tasks, write_line_hashes
from data_prep.dedup.lines import EXEMPT, line_hashes, remove_lines
from data_prep.task import Counts
from tests.data_prep.dedup.conftest import hashes_of, real_texts

MENU = "Home | Products | About us | Contact | Log in"
WORDS = st.lists(st.sampled_from(["", "short", MENU, MENU.upper(), "Chapter 1: of lines and their copies"]), max_size=8)


def test_only_the_first_occurrence_of_a_line_is_kept(tmp_path: Path) -> None:
    texts = [f"{MENU}\nThe first page.\n", f"The second page.\n{MENU}", f"{MENU}\n{MENU}\nThe third page."]
    kept = deduplicated(tmp_path, [texts[:1], texts[1:]], LinesSection())
    assert kept == [texts[0], "The second page.", "The third page."]


def test_case_digits_and_white_space_at_the_ends_are_ignored() -> None:
    one, other = (
        "Copyright 1998 Example Limited, all rights reserved",
        "\tCOPYRIGHT 2026 example limited, all rights reserved \r",
    )
    assert len(set(line_hashes(f"{one}\n{other}", section=LinesSection()).tolist())) == 1
    assert len(set(line_hashes(f"{one}\n{one}.", section=LinesSection()).tolist())) == 2


def test_short_lines_are_never_dropped(tmp_path: Path) -> None:
    section = LinesSection(min_bytes=10)
    assert line_hashes("}\n\n    return x\nreturn None, 0", section=section).tolist()[:2] == [EXEMPT, EXEMPT]
    assert deduplicated(tmp_path, [["}\n\n}\n0123456\n0123456"]], section) == ["}\n\n}\n0123456\n0123456"]


def test_paragraphs_are_separated_by_empty_lines(tmp_path: Path) -> None:
    texts = [f"One.\n\n{MENU}\nmore of it\n\nTwo.", f"{MENU}\nmore of it\n\n{MENU}\n\n{MENU}\nmore of it"]
    assert deduplicated(tmp_path, [texts], LinesSection(unit="paragraph")) == [texts[0], MENU]


@settings(deadline=None, max_examples=30)
@given(
    texts=st.lists(WORDS.map("\n".join), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    parts=st.integers(1, 4),
    copies=st.integers(1, 3),
)
def test_the_first_occurrences_are_kept_for_any_split_into_runs_and_ranges(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cuts: list[int], parts: int, copies: int
) -> None:
    section = LinesSection(copies=copies)
    bounds = [0, *sorted(cuts), 12]
    runs = [texts[a:b] for a, b in pairwise(bounds)]
    kept = deduplicated(tmp_path_factory.mktemp("job"), runs, section, parts=parts)
    assert kept == deduplicated_sequentially(texts, section)


def test_real_texts_lose_only_the_lines_they_share(tmp_path: Path) -> None:
    texts, section = real_texts(), LinesSection()
    kept = deduplicated(tmp_path, [texts[n * 40 : n * 40 + 40] for n in range(len(texts) // 40 + 1)], section, parts=3)
    assert kept == deduplicated_sequentially(texts, section)
    assert 0 < sum(map(len, texts)) - sum(map(len, kept)) < 0.3 * sum(map(len, texts))


def test_every_line_has_a_hash_and_removing_no_line_changes_nothing() -> None:
    odd = ["", "\n", "\n\n\n", "a\r\nb", "\u2028line\x85\x0c", "İ" * 40 + "\n\ud800", *real_texts()]
    for text in odd:
        for unit in ("line", "paragraph"):
            section = LinesSection(unit=unit)
            lines = len(line_hashes(text, section=section))
            assert remove_lines(text, np.zeros(lines, dtype=bool), section=section) == text
            assert remove_lines(text, np.arange(lines) >= 0, section=section) == ""


@pytest.mark.parametrize("same", [False, True], ids=["all different", "all the same"])
def test_a_lines_task_keeps_its_memory_limit(tmp_path: Path, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    count, paths = 8_000, [tmp_path / f"run{n}" for n in range(25)]
    for n, path in enumerate(paths):
        path.mkdir()
        write_line_hashes(path, [hashes_of([1 if same else 1 + n * count + i for i in range(count)])])
    monkeypatch.setattr(table, "MEMORY", 2 << 20)
    tasks = repeated_lines_tasks(LinesSection(), runs=paths, lines=count * len(paths), directory=tmp_path)
    assert len(tasks) == 8
    tracemalloc.start()
    dropped = sum(task.run(ignore)["lines"] for task in tasks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dropped == (count * len(paths) - 1 if same else 0)
    assert peak < 2 << 20


def deduplicated(work: Path, runs: list[list[str]], section: LinesSection, *, parts: int = 1) -> list[str]:
    """The texts of all runs, without the lines that the tasks drop."""
    hashes = [[line_hashes(text, section=section) for text in run] for run in runs]
    paths = [work / f"run{n}" for n in range(len(runs))]
    lines = 0
    for path, hashes_of_run in zip(paths, hashes, strict=True):
        path.mkdir()
        lines += write_line_hashes(path, hashes_of_run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "MEMORY", max(1, -(-lines * 80 // parts)))
        tasks = repeated_lines_tasks(section, runs=paths, lines=lines, directory=work)
    for task in random.Random(0).sample(tasks, len(tasks)):
        task.run(ignore)
    kept = []
    for number, (run, hashes_of_run) in enumerate(zip(runs, hashes, strict=True)):
        dropped = DroppedLines([task.directory for task in tasks], run=number)
        kept += [
            remove_lines(t, dropped.next_document(len(h)), section=section)
            for t, h in zip(run, hashes_of_run, strict=True)
        ]
    return kept


def deduplicated_sequentially(texts: list[str], section: LinesSection) -> list[str]:
    """The texts by definition: lines are counted in one pass over the input."""
    seen: Counter[int] = Counter()
    kept = []
    for text in texts:
        dropped = []
        for line in line_hashes(text, section=section).tolist():
            dropped.append(line != EXEMPT and seen[line] >= section.copies)
            seen[line] += 1
        kept.append(remove_lines(text, np.array(dropped), section=section))
    return kept


def ignore(_counts: Counts) -> None:
    """No progress display."""
