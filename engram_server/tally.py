"""What has happened since the daemon started, in plain numbers: for the metrics, and kept when they are off."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from typing import Final

ATTACH_BUCKETS_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


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
        self.refused: Counter[str] = Counter()
        """Requests answered with an error, by its code."""
        self.verified: Counter[str] = Counter()
        """Verifications by result, `ok` or `failed`."""
        self.verified_at = 0.0
        """Wall-clock time of the last one, 0 for never."""

    def __repr__(self) -> str:
        return f"<Tally: {self.attach_s!r}, refused {dict(self.refused)}, verified {dict(self.verified)}>"

    def count_verified(self, ok: bool) -> None:
        self.verified["ok" if ok else "failed"] += 1
        self.verified_at = time.time()
