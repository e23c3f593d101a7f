"""How far a run has come, as one value that the loop, its saves and its evaluations share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: the last finished step.
        begun: the last step that was begun; what the ranks have said with it is of that moment.
        advanced: the last step begun when a save was advanced: what was said until then is out of date.
        agreed: the last step begun when the peak of memory was agreed on.
        slow: steps take so long that no device needs to work ahead.
    """

    step: int
    begun: int = 0
    advanced: int = 0
    agreed: int = 0
    slow: bool = False
