"""Runs a sweep: `python -m tests.sweeps NAME`; started again it runs the cells that are left (`make sweep-NAME`)."""

from __future__ import annotations

import argparse
import random
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.sweeps.all_sweeps import SWEEPS
from tests.sweeps.sweep import Sweep, result_of


def main() -> int:
    """Entry point; 1 when a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweeps", description=__doc__)
    parser.add_argument("name", choices=sorted(SWEEPS), help="which sweep")
    parser.add_argument("--group", metavar="TEXT", default="", help="only groups whose name contains this")
    parser.add_argument("--cells", type=int, metavar="N", help="stop after so many cells")
    parser.add_argument("--sample", type=int, metavar="SEED", help="in a random order: what was run is a sample")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--table", action="store_true", help="only write the table of the results so far")
    asked = parser.parse_args()
    sweep = SWEEPS[asked.name]()
    if asked.fresh:
        sweep.state_file.unlink(missing_ok=True)
    if not asked.table:
        wanted = [cell for group, cells in sweep.groups.items() if asked.group in group for cell in cells]
        batches = [wanted[start : start + sweep.batch] for start in range(0, len(wanted), sweep.batch)]
        if asked.sample is not None:
            random.Random(asked.sample).shuffle(batches)
        left, ran = set(sweep.remaining()), sweep.results()
        cells = [cell for batch in batches for cell in batch if cell in left]
        run_cells(sweep, sorted(cells, key=ran.__contains__)[: asked.cells])  # those that failed run again, last
    sweep.write_table()
    print(f"{sweep.table_file} written")
    return int(any(not result.passed for result in sweep.results().values()))


def run_cells(sweep: Sweep, cells: list[str]) -> None:
    """Runs cells batch by batch; what has run is kept when it is interrupted."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=Console(stderr=True)) as progress:
        task = progress.add_task(sweep.name, total=len(cells), now="")
        for start in range(0, len(cells), sweep.batch):
            batch = cells[start : start + sweep.batch]
            began = time.monotonic()
            progress.update(task, now=batch[0])
            found = sweep.run(batch)
            each = (time.monotonic() - began) / len(batch)
            sweep.record([result_of(cell, found[cell], seconds=each) for cell in batch])
            progress.update(task, advance=len(batch))
            for cell in batch:
                passed, note = found[cell]
                if not (passed and progress.console.is_terminal):  # a log has no bar
                    outcome = "passed" if passed else "FAILED"
                    progress.console.print(f"{outcome} {cell}: {note}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
