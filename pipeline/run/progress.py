"""Progress of a run, as one value that the loop, its saves and its evaluations share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Progress of a run, in steps.

    Attributes:
        step: the last finished step.
        begun: the last step that was begun; the ranks' flags that come with it are of that moment.
        advanced: the last step begun when a save was advanced; flags of steps until then are out of date.
        agreed: the last step begun when the peak of memory was agreed on.
        slow: whether steps take so long that no device needs to work ahead.
    """

    step: int
    begun: int = 0
    advanced: int = 0
    agreed: int = 0
    slow: bool = False
