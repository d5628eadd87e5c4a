"""`engram-ctl bench`: lookups in the running daemon's tables, on this node, by every path that it allows."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engram_client.errors import EXIT_OK, PackageMissing, WriteFailed
from engram_client.version import VERSION
from engram_server.ctl_common import add_endpoint, add_json, endpoint_of

if TYPE_CHECKING:
    from engram_server.bench import Measurement

DEFAULT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time lookups in the running daemon's tables",
        description="Attaches as one rank more, or as a whole group of them where tables are split; looks up random "
        "rows, other ones each time, and detaches. Needs torch, and a user who may attach.",
    )
    add_endpoint(parser, timeout=60.0)
    parser.add_argument("--device", action="append", help="cpu or cuda:N, may be repeated (default: cpu)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=DEFAULT_TOKENS, metavar="T", help="(default: 1 to 8192)"
    )
    parser.add_argument("--repetitions", type=int, default=15, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--split",
        type=int,
        choices=range(2, 73),
        default=0,
        metavar="N",
        help="also N ranks that share out the reads of whole tables in host memory, on GPUs cuda:0 to N-1 or the CPU",
    )
    parser.add_argument("--csv", metavar="FILE", help="a row a measurement, with everything it depends on")
    parser.add_argument("--plot", metavar="FILE", help="microseconds over tokens, as PNG, SVG or PDF")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for package in ("torch", *(("matplotlib",) if options.plot else ())):
        if importlib.util.find_spec(package) is None:  # before minutes of measuring
            raise PackageMissing(doing="engram-ctl bench", package=package, extra="bench")
    from engram_server.bench import Order, measure  # brings torch

    endpoint, handover = endpoint_of(options)
    found: list[Measurement] = []
    for device in options.device or ["cpu"]:
        order = Order(
            endpoint=endpoint,
            handover=handover,
            device=device,
            tokens=tuple(options.tokens),
            repetitions=options.repetitions,
            timeout=options.timeout,
            split_ranks=options.split,
        )
        found += measure(order, print_progress)
    if options.csv:
        _write_csv(options.csv, found)
    if options.plot:
        plot(options.plot, found)
    if options.json:
        print(json.dumps({"machine": machine(), "measurements": msgspec.to_builtins(found)}, indent=2))
    else:
        _show(found)
    return EXIT_OK


def machine() -> dict[str, Any]:
    return {
        "version": VERSION,
        "host": platform.node(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def print_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def _write_csv(path: str, found: Sequence[Measurement]) -> None:
    about = machine()
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            rows = [{**msgspec.to_builtins(each), **about} for each in found]
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise WriteFailed(path=path, problem=error.strerror or str(error)) from error


def plot(path: str, found: Sequence[Measurement]) -> None:
    """Raises WriteFailed. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for key in sorted({(each.device, each.layer, each.lookup, each.ids) for each in found}):
        line = [each for each in found if (each.device, each.layer, each.lookup, each.ids) == key]
        label = f"{key[0]}, layer {key[1]}, {key[2]}, {key[3]} ids"
        axes.plot([each.tokens for each in line], [each.median_us for each in line], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds a lookup")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: a format that it does not know
        raise WriteFailed(path=path, problem=str(error)) from error


def _show(found: Sequence[Measurement]) -> None:
    """A table for each device and way of looking up; 80 columns hold it."""
    from rich.console import Console
    from rich.table import Table

    for device, lookup in dict.fromkeys((each.device, each.lookup) for each in found):
        table = Table(title=f"lookups on {device}, {lookup}: microseconds")
        table.add_column("layer")
        table.add_column("ids")
        for name in ("tokens", "median", "best", "worst", "Mrows/s", "GB/s"):
            table.add_column(name, justify="right", no_wrap=True)
        for each in found:
            if (each.device, each.lookup) == (device, lookup):
                table.add_row(
                    str(each.layer),
                    each.ids,
                    f"{each.tokens:,}",
                    f"{each.median_us:,.1f}",
                    f"{each.best_us:,.1f}",
                    f"{each.worst_us:,.1f}",
                    f"{each.rows_per_second / 1e6:,.1f}",
                    f"{each.bytes_per_second / 1e9:.2f}",
                )
        Console().print(table)
