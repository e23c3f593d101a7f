"""Skipped data of a run: after a rollback, training continues after the data that led to the bad step.

The data order stays a pure function: step s trains on the samples of data step `data_step(s)`, which is s plus the
data steps skipped before it. A run without skips trains on data step s in step s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.accounts import StepAccounts


@dataclass(frozen=True)
class Skip:
    """From step `at` on, `steps` more data steps are skipped.

    Attributes:
        samples: number of skipped samples; None where all steps of the run have the same number.
    """

    at: int
    steps: int
    samples: int | None = None


@dataclass(frozen=True)
class Skips:
    """All skips of a run, in chronological order."""

    skips: tuple[Skip, ...] = ()

    def data_step(self, step: int) -> int:
        """Returns the data step, from 1, that a step trains on."""
        return step + sum(skip.steps for skip in self.skips if skip.at <= step)

    def past(self, bad_step: int, *, since: int, accounts: StepAccounts | None = None) -> Skips:
        """Adds a skip of all data from a checkpoint up to and including a bad step.

        Skips after the checkpoint are dropped, since the new one covers their data.

        Args:
            bad_step: a step after the checkpoint.
            since: the step of the checkpoint.
            accounts: samples of every step; None where all have the same number.
        """
        assert since < bad_step, (since, bad_step)
        window = self.data_step(bad_step) - self.data_step(since + 1) + 1
        before = (skip for skip in self.skips if skip.at <= since + 1)
        samples = None
        if accounts is not None and not accounts.constant_batch:
            samples = self.consumed(bad_step, accounts) - self.samples(since + 1, accounts)[0]
        return Skips((*before, Skip(since + 1, window, samples)))

    def samples(self, step: int, accounts: StepAccounts) -> range:
        """Returns the global sample numbers of a step.

        Args:
            step: a step of the run, from 1.
            accounts: samples of every step.
        """
        end = self.consumed(step, accounts)
        return range(end - accounts.samples_in(step), end)

    def consumed(self, step: int, accounts: StepAccounts) -> int:
        """Returns the number of samples in the run's order up to the end of a step, skipped samples included."""
        if accounts.constant_batch:
            return self.data_step(step) * accounts.samples_in(step)
        skipped = (
            skip.steps * accounts.samples_in(skip.at) if skip.samples is None else skip.samples
            for skip in self.skips
            if skip.at <= step
        )
        return accounts.samples(step) + sum(skipped)

    def place_of(self, sample: int, accounts: StepAccounts) -> tuple[int, int]:
        """Returns the step that has a global sample, and the sample's index in it.

        A skipped sample has the step that read it before its rollback.

        Args:
            sample: global number of the sample, from 0.
            accounts: samples of every step.
        """
        last = accounts.step_of_sample(sample)  # skips only add to the samples before a step
        step = bisect_right(range(1, last + 1), sample, key=lambda each: self.consumed(each, accounts)) + 1
        offset = sample - (self.consumed(step - 1, accounts) if step > 1 else 0)
        for skip in self.skips:
            if skip.at == step:
                samples = skip.steps * accounts.samples_in(step) if skip.samples is None else skip.samples
                if offset < samples:
                    break
                offset -= samples
        begun = accounts.samples(step - 1)
        step = accounts.step_of_sample(begun + offset)
        return step, begun + offset - accounts.samples(step - 1)

    def plain(self) -> list[list[int]]:
        """Returns the skips as plain JSON: [[at, steps], ...], with a third number, samples, where it is known."""
        return [[skip.at, skip.steps, *([] if skip.samples is None else [skip.samples])] for skip in self.skips]

    @classmethod
    def of(cls, plain: Iterable[Sequence[int]] | None) -> Skips:
        """Makes skips from the lists that `plain` returns; None gives no skips."""
        return cls(tuple(Skip(*map(int, each)) for each in plain or ()))


NO_SKIPS = Skips()


def skips_of(details: Mapping[str, Any], events: Iterable[Mapping[str, Any]], *, step: float) -> Skips:
    """Returns the skips of a run that resumes after a step.

    These are the skips of the newest rollback up to that step, or else of the checkpoint: a rollback is in the journal
    before the next checkpoint records it.

    Args:
        details: details in the manifest of the resumed checkpoint; may have no skips.
        events: event rows of the journal, in order.
        step: the step of the checkpoint; infinity for all known skips.
    """
    ordered = [row["skips"] for row in events if row.get("event") == "rollback" and row["step"] <= step]
    return Skips.of(ordered[-1] if ordered else details.get("skips"))
