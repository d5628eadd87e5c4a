"""What the benchmarks of GPU clients share: daemons with dummy tables, ids by column, medians, a CSV of results."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engram_client.layout import TableGeometry
from engram_client.protocol import State
from tests.support.daemon import Daemon

ROWS_GIB = (1 << 30) // 264
READY_LIMIT_S = 280.0


class Results:
    """Lines of `name, value, unit, note`, printed as they come and kept as CSV with GPU, driver, commit, and whether
    what is read was "cold" (rows never read before) or "warm" (read just before; files in the page cache), and of how
    many ranks or GPUs at once, where that is not said by the name."""

    def __init__(self, path: Path, commit: str, cache: str, gpu: str | None = None) -> None:
        """gpu: None = the first one's name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._machine = [torch.cuda.get_device_name() if gpu is None else gpu, driver_version(), commit]
        self._cache = cache
        self._writer.writerow(["name", "value", "unit", "note", "gpu", "driver", "commit", "cache", "ranks"])

    def close(self) -> None:
        self._file.close()

    def add(
        self, name: str, value: float, unit: str, note: str = "", cache: str | None = None, ranks: int | None = None
    ) -> None:
        """cache: None = what is said of all."""
        cache = self._cache if cache is None else cache
        self._writer.writerow([name, f"{value:.4g}", unit, note, *self._machine, cache, ranks])
        self._file.flush()
        of = "" if ranks is None else f"{ranks} ranks"
        print(f"{name:58s} {value:12.4g} {unit:6s} {of:7s} {note}", flush=True)


def sglang_kernel(path: Path | str | None) -> Any:
    """The module of SGLang's engram_gather.py; None without a path. Raises SystemExit."""
    if not path:
        return None
    spec = importlib.util.spec_from_file_location("sglang_engram_gather", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def commit_of() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def dummy_config(engram: dict[str, str], table_gib: float, layers: Sequence[int], **rest: Any) -> dict[str, Any]:
    """Of a daemon with a made table of `table_gib` GiB for each layer, without a checkpoint."""
    geometry = {
        "engram_layer_ids": list(layers),
        "engram_max_ngram_size": 4,
        "engram_vocab_size": int(table_gib * ROWS_GIB / 24),
        "engram_n_heads": 8,
    }
    config = {"load_format": "dummy", "geometry": geometry, "engram_config": engram, "load": {"verify": "off"}, **rest}
    # Some machines for rent grow their memory as it is touched and report too little before.
    config["host"] = {"memory_check": "warn", **rest.get("host", {})}
    return config


@contextlib.contextmanager
def dummy_daemon(engram: dict[str, str], table_gib: float, layers: Sequence[int], **rest: Any) -> Iterator[Daemon]:
    """A daemon of dummy_config(); says how long it took."""
    config = dummy_config(engram, table_gib, layers, **rest)
    with tempfile.TemporaryDirectory(prefix="eb-") as folder:
        begin = time.perf_counter()
        daemon = Daemon(Path(folder), config)
        try:
            daemon.wait_for(State.READY, READY_LIMIT_S)
            took = time.perf_counter() - begin
            print(f"daemon {engram}, {len(layers)} x {table_gib} GiB, {rest}: ready in {took:.1f} s", flush=True)
            yield daemon
        finally:
            try:
                daemon.stop()
            except subprocess.TimeoutExpired:
                daemon.kill()


class ColumnIds:
    """Sets of ids `[tokens, 24]` within their columns; `fresh()` draws all anew, the same on each rank."""

    def __init__(self, columns: tuple[int, ...], tokens: int, sets: int, device: torch.device) -> None:
        starts = TableGeometry(layer_id=0, columns=columns).column_starts
        self._base = torch.tensor(starts[:-1], device=device)
        self._span = min(columns)
        self._generator = torch.Generator(device).manual_seed(1)
        self.ids = [torch.empty(tokens, 24, dtype=torch.int64, device=device) for _ in range(sets)]
        self.fresh()

    def fresh(self) -> None:
        for ids in self.ids:
            ids.random_(0, self._span, generator=self._generator)
            ids += self._base


def replay_us(
    ids: ColumnIds,
    launch: Callable[[torch.Tensor], Any],
    replays: int = 7,
    line_up: Callable[[], None] | None = None,
) -> float:
    """Median device microseconds of a launch, in a graph of one launch a set, ids fresh before each replay.

    line_up: enqueues what lets all ranks' GPUs begin a replay at the same time."""
    launch(ids.ids[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for one in ids.ids:
            launch(one)
    times = []
    for _ in range(replays):
        ids.fresh()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if line_up is not None:
            line_up()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(ids.ids))
    return statistics.median(times)
