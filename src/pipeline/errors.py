"""The one error that a user can fix."""

from __future__ import annotations


class PipelineError(ValueError):
    """Something the user can mend. The message is one sentence: the knob, the value, the remedy.

    shown: what was worked out before, and is printed all the same.
    """

    def __init__(self, message: str = "", shown: str = "") -> None:
        super().__init__(message)
        self.shown = shown
