"""What has happened since the daemon started, in plain numbers: for the metrics, and kept when they are off."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from typing import Final

from engram_client.errors import EngramError

ATTACH_BUCKETS_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


CONNECT: Final = "connect"
"""For a peer that is turned away at the descriptor socket before it has asked for anything."""
UNREADABLE: Final = "unreadable"
"""For what is no request, or none of this version."""


class Histogram:
    """Counts of observations by upper bound, as Prometheus has them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def __repr__(self) -> str:
        return f"<Histogram of {sum(self._counts)} observations>"

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, observations up to it), `+Inf` last."""
        found, running = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            running += count
            found.append((bound, running))
        return found


class Tally:
    """One daemon's events."""

    def __init__(self) -> None:
        self.attach_s = Histogram(ATTACH_BUCKETS_S)
        self.refused: Counter[tuple[str, str]] = Counter()
        """Requests answered with an error, by the request's name and the error's: few of each, whatever comes."""
        self.verified: Counter[str] = Counter()
        """Verifications by result, `ok` or `failed`."""
        self.verified_at = 0.0
        """Wall-clock time of the last one, 0 for never."""

    def __repr__(self) -> str:
        return f"<Tally: {self.attach_s!r}, refused {dict(self.refused)}, verified {dict(self.verified)}>"

    def count_refused(self, request: str, error: EngramError) -> None:
        """request: a message's name, CONNECT or UNREADABLE."""
        self.refused[request, error.code] += 1

    def count_verified(self, ok: bool) -> None:
        self.verified["ok" if ok else "failed"] += 1
        self.verified_at = time.time()
