"""Errors that a user can cause, and their exit codes.

Every error that a user can cause derives from `HeadraceError` and says what was found, why it cannot work and what to
do next. Entry points print it without a traceback and exit with its `exit_code`. `assert` is for our own bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

EXIT_USAGE = 2
"""Exit code of a refused run: the input or the config has to change before a retry can help."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C (128 + SIGINT), as shells report it."""

EXIT_REQUEUE = 75
"""Exit code of a run that was asked to stop and saved its state (EX_TEMPFAIL). A new start resumes it."""

EXIT_LOST = 76
"""Exit code of a run that lost a rank, dead or hanging. A new start resumes from its newest checkpoint."""

EXIT_FOLLOWED = 77
"""Exit code of a rank that ends because another rank failed; the other rank's error says what to do."""


class HeadraceError(Exception):
    """Base of all errors a user can cause.

    Attributes:
        exit_code: exit code of a process that ends because of this error.
    """

    exit_code = EXIT_USAGE

    @property
    def cause(self) -> str:
        """The problem, in one line."""
        return str(self).strip().partition("\n")[0]


class ConfigError(HeadraceError):
    """A config that cannot be run.

    Args:
        field: dotted path of the offending field, e.g. `zero_optimization.stage`.
        value: the value that was given, shown with `repr`; None shows none.
        why: the reason, with the numbers behind it.
        remedy: the nearest valid setting.
    """

    def __init__(self, field: str, value: object = None, *, why: str, remedy: str) -> None:
        self.field, self.value, self.why, self.remedy = field, value, why, remedy
        shown = "" if value is None else f" = {_short(value)}"
        super().__init__(f"{field}{shown}\n  why: {why}\n  try: {remedy}")

    @property
    def cause(self) -> str:
        """Key, value and reason of each problem, in one line."""
        causes = (str(each).partition("\n  try:")[0].replace("\n  why:", ":") for each in problems_in(self))
        return "; ".join(" ".join(cause.split()) for cause in causes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments: errors travel between ranks, and cannot be rebuilt from their message alone."""
        return partial(ConfigError, why=self.why, remedy=self.remedy), (self.field, self.value)


class RefusedValueError(ValueError):
    """An error that a validator of one value raises, with reason and remedy; `foundation.section` adds the key.

    Attributes:
        why: the reason.
        remedy: advice on a valid value, beginning with a verb.
    """

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.why, self.remedy = why, remedy


class CombinedConfigError(ConfigError):
    """Several problems of one config, in one message. Field, value and reason are those of the first problem.

    Args:
        problems: two or more errors.
    """

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        first = problems[0]
        super().__init__(first.field, first.value, why=first.why, remedy=first.remedy)
        self.problems = tuple(problems)
        self.args = ("\n".join([f"{len(problems)} things are wrong with the config:", *map(str, problems)]),)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the problems, from which the message is built again."""
        return CombinedConfigError, (self.problems,)


def refuse_all(problems: Sequence[ConfigError]) -> None:
    """Raises all problems of a config at once.

    Raises:
        ConfigError: the only problem, or `CombinedConfigError` for several distinct ones; nothing without a problem.
    """
    distinct = list({str(each): each for error in problems for each in problems_in(error)}.values())
    if distinct:
        raise distinct[0] if len(distinct) == 1 else CombinedConfigError(distinct)


def problems_in(error: ConfigError) -> tuple[ConfigError, ...]:
    """Returns the single problems in an error."""
    return error.problems if isinstance(error, CombinedConfigError) else (error,)


def found_by(checks: Sequence[Callable[[], object]]) -> list[ConfigError]:
    """Runs checks that do not depend on each other, and returns the problems they find."""
    found: list[ConfigError] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.extend(problems_in(error))
    return found


class DataError(HeadraceError):
    """Input text, a token directory or a model directory is missing, damaged or of the wrong kind."""


class CheckpointError(HeadraceError):
    """A checkpoint is missing or damaged, or belongs to another run."""


class TrainingError(HeadraceError):
    """A run cannot continue: a non-finite loss, or a rank that failed."""


class LostError(TrainingError):
    """A rank did not join or does not answer. The run can be started again without a fix."""

    exit_code = EXIT_LOST


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
