"""`make bench`: every benchmark that needs no GPU, each a ratio or a bound, as a table and as JSON."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tests.bench import attach, forecast, load, lookup_cpu, restart

BENCHES = {
    "load": load.run,
    "lookup_cpu": lookup_cpu.run,
    "attach": attach.run,
    "restart": restart.run,
    "forecast": forecast.run,
}


def main() -> int:
    chosen = sys.argv[1:] or list(BENCHES)
    machine = {
        "kernel": platform.release(),
        "cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }
    results: dict[str, Any] = {"machine": machine}
    table = Table("benchmark", "result", "value")
    for name in chosen:
        results[name] = BENCHES[name]()
        for key, value in flat(results[name]):
            table.add_row(name, key, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)
    folder = Path("bench-results")
    folder.mkdir(exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}.json"
    path.write_text(json.dumps(results, indent=2))
    print(path)
    return 0


def flat(result: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested results as `outer.inner` and value."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


if __name__ == "__main__":
    sys.exit(main())
