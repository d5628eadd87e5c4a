"""Results of groups.py, read again: microseconds by arm, ranks and tokens, and as a table by group size."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TOKENS = (1, 16, 128, 1024, 8192)


class Arm(NamedTuple):
    kind: str
    """How the tables lie: collective, peer_read, per_node."""
    name: str


Times = dict[Arm, dict[int, dict[int, float]]]
"""Microseconds by arm, ranks and tokens."""


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def times_of(rows: Sequence[dict[str, str]]) -> Times:
    found: Times = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        match = re.fullmatch(r"(\w+), T=(\d+): (.*)", row["name"])
        if match:
            found[Arm(match[1], match[3])][int(row["ranks"])][int(match[2])] = float(row["value"])
    return found


def by_group(rows: Sequence[dict[str, str]]) -> str:
    """All that was measured, a line for each number of ranks: lookups, then the rest."""
    times = times_of(rows)
    tokens = sorted({count for sizes in times.values() for line in sizes.values() for count in line})
    lines = [heading("microseconds", tokens)]
    for (kind, name), sizes in times.items():
        for ranks, line in sorted(sizes.items()):
            cells = [shown(line[count]) if count in line else "" for count in tokens]
            lines.append(f"| {kind}: {name} | {ranks} | {' | '.join(cells)} |")
    others = [row for row in rows if not re.match(r"\w+, T=", row["name"])]
    sizes_of = sorted({int(row["ranks"]) for row in others})
    lines += ["", f"| ranks | {' | '.join(map(str, sizes_of))} |", "|---|" + "---|" * len(sizes_of)]
    values = {(row["name"], int(row["ranks"])): row for row in others}
    for name in dict.fromkeys(row["name"] for row in others):
        cells = [
            f"{values[name, ranks]['value']} {values[name, ranks]['unit']}" if (name, ranks) in values else ""
            for ranks in sizes_of
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def heading(what: str, tokens: Sequence[int]) -> str:
    return f"| {what} | ranks | {' | '.join(f'T={count:,}' for count in tokens)} |\n|---|---|" + "---|" * len(tokens)


def shown(us: float) -> str:
    us += 1e-6  # a half is rounded up, as people do
    return f"{us:.1f}" if us < 99.95 else f"{us:,.0f}"
