"""`make demo`: a checkpoint, a daemon, two engines, verified rows, a clean end. Prints what a person wants to see.

Run as `demo.py --rank R ...` it is one rank of an engine, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from engram_client import connect
from engram_client.bar import load_bar
from engram_client.protocol import Progress, StatusReply
from engram_server.ctl import gib, print_status
from engram_server.make_checkpoint import make_checkpoint
from tests.support.daemon import Daemon
from tests.support.reference import CheckpointReference

VOCAB = 40_000
TOKENS = 2_000
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--endpoint")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--engine")
    options = parser.parse_args()
    if options.rank is not None:
        return rank_main(options)
    with tempfile.TemporaryDirectory(prefix="engram-demo-") as folder:
        return demo(Path(folder))


def demo(folder: Path) -> int:
    checkpoint = folder / "checkpoint"
    console.rule("a small checkpoint in DeepSeek-V4.1's own format")
    files = make_checkpoint(checkpoint, engram_vocab_size=VOCAB, seed=1)
    for file in files:
        console.print(f"{Path(file).stat().st_size:>16,}  {Path(file).name}")

    console.rule("engram-server loads it once")
    daemon = Daemon(
        folder / "daemon",
        {
            "model_path": str(checkpoint),
            "engram_config": {"placement": "cpu", "replication": "per_node"},
            "load": {"verify": "full"},
        },
    )
    try:
        show_load(daemon)
        console.rule("engine A: 4 ranks, then engine B: 2 ranks, on the same one copy")
        engines = [*start_engine("engine-a", 4, daemon, checkpoint)]
        reports = [first_line(process) for process in engines]
        engines += start_engine("engine-b", 2, daemon, checkpoint)
        reports += [first_line(process) for process in engines[4:]]
        status = daemon.status()
        print_status(status)
        shares = [ask_for_share(process) for process in engines]
        for process in engines:
            process.communicate(timeout=60)  # closes its stdin, which ends it
        console.rule("summary")
        summarise(status, reports, shares)
    finally:
        code = daemon.stop()
    left = daemon.names_left()
    failed = code or left or any(process.returncode for process in engines)
    console.print(f"engram-server drained and exited with {code}; left behind: {left or 'none'}")
    return 1 if failed else 0


def show_load(daemon: Daemon) -> None:
    """Waits for the load as any client does, and draws the progress it is sent."""
    bar = load_bar(console)
    task = bar.add_task("starting", total=None)

    def show(progress: Progress) -> None:
        if progress.load is not None:
            bar.update(
                task,
                description=progress.load.phase,
                completed=progress.load.done_bytes,
                total=progress.load.total_bytes,
            )

    with bar, connect(daemon.endpoint, rank=0, world_size=1, name="progress", on_progress=show):
        report = daemon.status().report
        if report is not None:
            bar.update(task, description="loaded", completed=report.bytes_read, total=report.bytes_read)


def start_engine(name: str, world_size: int, daemon: Daemon, checkpoint: Path) -> list[subprocess.Popen[str]]:
    arguments = ["--world-size", str(world_size), "--endpoint", daemon.endpoint, "--checkpoint", str(checkpoint)]
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), "--engine", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


def first_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    if process.stdout is None:
        raise RuntimeError("the rank has no stdout")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended with {process.wait()} before it reported")
    report: dict[str, Any] = json.loads(line)
    return report


def ask_for_share(process: subprocess.Popen[str]) -> int:
    """A rank's share of the table memory, now that all ranks have read all of theirs."""
    if process.stdin is None:
        raise RuntimeError("the rank has no stdin")
    process.stdin.write("share\n")
    process.stdin.flush()
    return int(first_line(process)["pss"])


def rank_main(options: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    reference = CheckpointReference(options.checkpoint)
    generator = np.random.default_rng(options.rank)
    started = time.perf_counter()
    client = connect(
        options.endpoint, rank=options.rank, world_size=options.world_size, name=options.engine, timeout=30
    )
    attach_s = time.perf_counter() - started
    verified = 0
    with client:
        for layer in client.layers:
            table = client.table(layer)
            starts = np.concatenate([[0], np.cumsum(table.columns)])
            ids = generator.integers(starts[:-1], starts[1:], (TOKENS, len(table.columns)))
            ids[0], ids[1] = starts[:-1], starts[1:] - 1  # the first and the last row of every column
            rows = table.lookup(torch.from_numpy(ids), hashed=True)
            expected = reference.rows(layer, ids)
            if not np.array_equal(rows.view(torch.int16).numpy(), expected.view(np.int16)):
                raise RuntimeError(f"layer {layer}: rows differ from the checkpoint's")
            verified += ids.size
        print(
            json.dumps(
                {
                    "engine": options.engine,
                    "rank": options.rank,
                    "attach_s": attach_s,
                    "rows": verified,
                }
            ),
            flush=True,
        )
        for _ in sys.stdin:  # stays attached until the demo has seen everybody
            print(json.dumps({"pss": table_pss()}), flush=True)
    return 0


def table_pss() -> int:
    """This process's proportional share of the table memory it has touched, in bytes."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = "memfd:engram" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def summarise(status: StatusReply, reports: list[dict[str, Any]], shares: list[int]) -> None:
    report = status.report
    if report is None:
        raise RuntimeError("the daemon has no load report")
    segment_bytes = sum(segment.info.nbytes for segment in status.segments)
    huge = sum(segment.huge_bytes for segment in status.segments)
    table = Table(show_header=False)
    table.add_row(
        "loaded",
        f"{gib(report.bytes_read)} in {report.seconds:.2f} s "
        f"({report.bytes_per_second / 1e9:.2f} GB/s while reading, digests included)",
    )
    table.add_row("backing", f"{status.segments[0].info.backing}, {len(status.segments)} segments, read-only")
    table.add_row("huge pages", f"{100 * huge / segment_bytes:.0f} % of {gib(segment_bytes)}")
    for entry in reports:
        table.add_row(
            f"{entry['engine']} rank {entry['rank']}",
            f"attached in {1e3 * entry['attach_s']:.1f} ms, {entry['rows']:,} rows verified",
        )
    table.add_row(
        "one copy",
        f"{len(reports)} ranks read {gib(segment_bytes)}; their shares of it add up to {gib(sum(shares))}",
    )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
