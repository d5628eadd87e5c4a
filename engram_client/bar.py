"""The progress bar that the daemon and the tools draw for a load. Needs rich."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def load_bar(console: Console | None = None) -> Progress:
    """A bar with bytes, rate and time left, on stderr unless another console is given."""
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=40),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
    )
