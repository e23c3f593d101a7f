"""The manifests that training writes: for the run's directory, and a checkpoint's details about the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foundation.directory import write_manifest
from pipeline.checkpoint.checkpoint import BRANCH, IMPORTED, CheckpointInfo
from pipeline.data.dataset import tokenizer_details
from pipeline.data.skips import Skips
from pipeline.run.prepare import PreparedRun
from pipeline.run.uneven.measure_stages import MeasuredStages


@dataclass(frozen=True)
class RunManifest:
    """Writes the manifest of a run's directory and describes its checkpoints.

    Attributes:
        prepared: the run.
        rank: global rank of this process; only rank 0 writes.
        stages: speeds of the pipeline stages, if measured.
        imported: kind, path, step and fingerprint of the foreign checkpoint with which the run began, if any.
        branch: run, step, samples, ledger and lineage of the checkpoint with which the run began, if any.
    """

    prepared: PreparedRun
    rank: int
    stages: MeasuredStages | None = None
    imported: Mapping[str, Any] | None = None
    branch: Mapping[str, Any] | None = None

    @property
    def begun(self) -> int:
        """Last step of the other run with whose checkpoint the run began; 0 without one."""
        return 0 if self.branch is None else int(self.branch["step"])

    def write(self, step: int) -> None:
        """Records the number of saved steps, the resolved config and the parents. Called on every rank; rank 0 writes.

        Raises:
            OSError: the file cannot be written.
        """
        if self.rank != 0:
            return
        prepared, run = self.prepared, self.prepared.run
        details: dict[str, Any] = {"step": step, "steps": run.steps, "finished": step == run.steps}
        if run.place is not None:  # absent from other runs, whose steps are all alike
            details["ledger"] = run.accounts.ledger(run.steps)
        if self.stages is not None:
            details["stages"] = self.stages.row()
        if self.branch is not None:
            details[BRANCH] = {key: value for key, value in self.branch.items() if key not in ("lineage", "ledger")}
        config = run.written_config.model_dump(mode="json")
        write_manifest(prepared.run_dir, kind="run", config=config, parents=prepared.parents, details=details)

    def write_if_possible(self, step: int, warn: Callable[[str], None]) -> None:
        """Calls `write`, but only warns of a full disk: training goes on, and the next start repeats the write."""
        try:
            self.write(step)
        except OSError as error:
            warn(f"warning: the manifest of {self.prepared.run_dir} cannot be written: {error}")

    def checkpoint(
        self,
        step: int,
        *,
        skips: Skips,
        anomalies: Mapping[str, Any],
        groups: dict[str, Any] | None = None,
        targets: Mapping[int, int] | None = None,
    ) -> CheckpointInfo:
        """Returns the details for the manifest of the checkpoint of `step`, besides its files.

        Args:
            step: the last step the checkpoint holds.
            skips: data that the run has left out.
            anomalies: statistics of losses and gradient norms, as plain JSON.
            groups: position of an island or a replica among others, as plain JSON; None in an ordinary run.
            targets: first step of a span of equal steps -> tokens trained in it that were targets, as far as counted.
        """
        prepared, run = self.prepared, self.prepared.run
        details = {
            "step": step,
            "samples": skips.consumed(step, run.accounts),
            "skips": skips.plain(),
            "anomalies": dict(anomalies),
            "topology": str(run.topology),
            "engine": run.config.engine,
            "curve": prepared.curve,
            "hf_config": prepared.hf_config,
            "generation": prepared.generation,
            "tokenizer": tokenizer_details(prepared.mixture.sources[0].manifest),
        }
        if prepared.extra_weights is not None:  # absent from other checkpoints, and from those older than the key
            details["extra_weights"] = prepared.extra_weights
        if self.imported is not None:
            details[IMPORTED] = dict(self.imported)
        if self.branch is not None:
            details[BRANCH] = dict(self.branch)
        if run.place is not None:  # absent from other runs, whose steps are all alike
            details["ledger"] = self._ledger(step, skips, targets or {})
        details |= groups or {}
        return CheckpointInfo(step, run.written_config.model_dump(mode="json"), prepared.parents, details)

    def _ledger(self, step: int, skips: Skips, targets: Mapping[int, int]) -> list[dict[str, Any]]:
        """Returns the record of the first steps: spans, their tokens and targets, each source's epochs at their end.

        Steps up to the beginning of a branch are as the other run has recorded them, and later epochs are those of the
        branch's own steps: its config may have other sources, of which the other run has read nothing.
        """
        accounts, orders = self.prepared.run.accounts, self.prepared.orders
        before: dict[int, float] = {}  # key of a source's shuffles -> epochs that lie before the branch
        for row in accounts.ledger(self.begun):
            order = orders[accounts.stage(row["first_step"])]
            epochs = order.epochs(skips.consumed(row["last_step"], accounts) - order.start.first)
            before |= zip(order.start.keys, epochs, strict=True)
        rows = [] if self.branch is None else list(self.branch["ledger"])
        for row in accounts.ledger(step, since=self.begun):
            order, last = orders[accounts.stage(row["first_step"])], row["last_step"]
            span = accounts.span(last).first_step
            reached = order.epochs(skips.consumed(last, accounts) - order.start.first)
            epochs = [now - before.get(key, 0.0) for key, now in zip(order.start.keys, reached, strict=True)]
            counted = {"targets": targets[span]} if span in targets else {}
            rows.append({**row, **counted, "epochs": [round(each, 6) for each in epochs]})
        return rows
