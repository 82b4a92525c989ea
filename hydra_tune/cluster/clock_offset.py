"""Estimates the seconds by which a node's clock is ahead of the coordinator's, from the beats of its line."""

from __future__ import annotations

from dataclasses import dataclass

AGES = 1.1
"""Factor by which the best round trip so far grows with each sample, so that a drifting clock is followed."""


@dataclass
class ClockOffset:
    """The offset from the sample with the shortest round trip; older samples count less."""

    seconds: float = 0.0
    """Add to the coordinator's time to get the node's."""
    error: float = float("inf")
    """Half of the round trip of that sample: the offset is at most this far off."""

    def sample(self, sent: float, there: float, received: float) -> None:
        """Take in a beat: when it was sent and its answer received here, and the node's time in between."""
        half = max(0.0, received - sent) / 2
        if half <= self.error * AGES:
            self.seconds, self.error = there - (sent + received) / 2, half
        else:
            self.error *= AGES
