"""Runs jobs in the process of the test: no worker has to be started, and a bug is an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from data_prep.chat.encoder import open_chat_encoder
from data_prep.config.corpus import load
from data_prep.dedup.minhash_task import open_minhasher
from data_prep.executors.base import attempt_task
from data_prep.job import phases, prepare
from data_prep.task import Counts
from data_prep.tokenizer.encoder import open_encoder
from foundation.errors import DataError


class InProcess:
    """An executor that runs the tasks one after the other in this process."""

    def run(self, tasks: Any, *, report: Callable[[Counts], None]) -> Iterator[Any]:
        for task in tasks:
            kind, value = attempt_task(task, report)
            assert kind != "bug", value
            if kind == "error":
                raise DataError(value)
            yield task, value


def run_job(config: str, *, until: str | None = None) -> None:
    """Runs a job in this process, or its phases up to and including `until`."""
    for opened in (open_encoder, open_chat_encoder, open_minhasher):
        opened.cache_clear()  # by the folder, which is a relative path; a worker has one working directory
    inspected = prepare.inspect(load(config))
    if prepare.output_is_complete(inspected):
        return
    with prepare.open_job(inspected):
        for phase in phases.phases_of(inspected.job.config):
            phases.run_phase(inspected.job, phase, InProcess())  # type: ignore[arg-type]
            if phase.name == until:
                return
        phases.commit_output(inspected.job, tokenizer=inspected.identity["tokenizer"])
