"""The consumers' figures as a table for people. No torch."""

from __future__ import annotations

from rich.table import Table

from foundation.task_figures import Figures

_COLUMNS = ("KL, mean", "max", "top-1", "perplexity", "original's", "same ids")


def consumer_table(figures: Figures, *, title: str) -> Table:
    """A row for each consumer that ran; below it versions, and why other consumers did not run. KL is in nats."""
    shown = Table(title=title)
    shown.add_column("consumer", no_wrap=True)
    for column in _COLUMNS:
        shown.add_column(column, justify="right", no_wrap=True)
    for name, each in figures.items():
        if "not_run" not in each:
            shown.add_row(name, *_cells(each))
    run = [f"{name} {each['version']}" for name, each in figures.items() if "not_run" not in each]
    not_run = [f"{name} not run: {each['not_run']}" for name, each in figures.items() if "not_run" in each]
    shown.caption = "\n".join([", ".join(run) or "no consumer was run", *not_run])
    return shown


def _cells(figures: Figures) -> list[str]:
    return [
        f"{figures['mean_kl']:.1e}",
        f"{figures['max_kl']:.1e}",
        f"{figures['top1_agreement']:.1%}",
        f"{figures['perplexity']:.3f}",
        f"{figures['original_perplexity']:.3f}",
        f"{figures['texts_with_equal_ids']}/{figures['texts']}",
    ]
