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


def load_bar() -> Progress:
    """A bar on stderr with bytes, rate and time left."""
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=40),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
