"""`engram-ctl`: look at a daemon, ask things of it, make a checkpoint to try it on."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from engram_client.control import query_status
from engram_client.errors import EXIT_OK, EXIT_OTHER, EngramError
from engram_client.protocol import BEAT_INTERVAL_S, DEFAULT_ENDPOINT, StatusReply
from engram_client.version import VERSION
from engram_server import ctl_doctor, ctl_owner
from engram_server.config import load_config

DEFAULT_VOCAB = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # tables have lines that an ASCII terminal has not
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except EngramError as error:
        print(f"engram-ctl: {error.code}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, `head` say, has seen enough; the interpreter's own flush must not fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OTHER
    except OSError as error:  # of the output: what else goes wrong has a name
        print(f"engram-ctl: {error.strerror or error}", file=sys.stderr)
        return EXIT_OTHER


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engram-ctl", description=__doc__)
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    status = commands.add_parser("status", help="state, tables, bytes, backing, coverage and clients of a daemon")
    where = status.add_mutually_exclusive_group()
    where.add_argument("--endpoint", default=DEFAULT_ENDPOINT, help="control endpoint (default: %(default)s)")
    where.add_argument("--config", metavar="FILE", help="take the endpoint from this engram.json")
    status.add_argument("--timeout", type=_seconds, default=5.0, metavar="SECONDS")
    status.add_argument("--json", action="store_true", help="the whole reply, for machines")
    status.set_defaults(run=_status)

    for module in (ctl_doctor, ctl_owner):
        module.add_parser(commands)

    make = commands.add_parser("make-checkpoint", help="write a small checkpoint in DeepSeek-V4.1's own format")
    make.add_argument("folder", metavar="DIR", help="a new or empty folder")
    make.add_argument(
        "--engram-vocab-size",
        type=int,
        default=DEFAULT_VOCAB,
        metavar="N",
        help="each of the 24 columns gets about N rows of 264 bytes (default: %(default)s; the real model: 16000000)",
    )
    make.add_argument("--seed", type=int, default=0, metavar="N", help="of the rows (default: %(default)s)")
    make.add_argument(
        "--every-code", action="store_true", help="use all FP8 codes and scale bytes, NaN included: for tests"
    )
    make.set_defaults(run=_make_checkpoint)
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if seconds >= 0:  # NaN is not
            return seconds
    raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")


def _status(options: argparse.Namespace) -> int:
    endpoint, handover = options.endpoint, None
    if options.config is not None:
        control = load_config(options.config, None, os.environ).config.control
        endpoint, handover = control.endpoint, control.handover
    reply = query_status(endpoint, timeout=options.timeout, handover=handover)
    if options.json:
        print(json.dumps(msgspec.to_builtins(reply), indent=2))
    else:
        print_status(reply)
    return EXIT_OK


def print_status(reply: StatusReply) -> None:
    """The reply as tables for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)  # names and paths may have square brackets
    console.print(
        f"{reply.state} — engram-server {reply.version}, pid {reply.pid}, up {reply.uptime_s:.0f} s", style="bold"
    )
    if reply.failure:
        console.print(f"failure: {reply.failure}")
    if reply.load is not None and reply.state == "loading":
        share = 100 * reply.load.done_bytes / max(reply.load.total_bytes, 1)
        console.print(f"{reply.load.phase}: {share:.0f} % of {gib(reply.load.total_bytes)}")
    if reply.check is not None:
        console.print(f"latest check: {reply.check.state} {'; '.join(reply.check.damage)}{reply.check.problem or ''}")
    if reply.outlook:
        console.print(reply.outlook)
    if reply.options is not None:
        chosen = reply.options
        console.print(
            f"placement {chosen.placement}, replication {chosen.replication}, lookup {chosen.lookup}, "
            f"tp_size {chosen.tp_size}; backing: {reply.backing_reason}"
        )
    segments = Table("segment", "rows", "bytes", "backing", "huge pages", "root", title="tables")
    roots = {table.geometry.layer_id: table.identity.root for table in reply.tables}
    for segment in reply.segments:
        info = segment.info
        coverage = 100 * segment.huge_bytes / info.nbytes if info.nbytes else 100
        root = roots.get(info.layer_id) or "-"
        segments.add_row(
            info.id, f"{info.shard.rows:,}", gib(info.nbytes), info.backing, f"{coverage:.0f} %", root[:16]
        )
    console.print(segments)
    clients = Table("lease", "name", "pid", "uid", "rank", "device", "layers", "age", "seen", title="clients")
    for lease in reply.leases:
        clients.add_row(
            str(lease.id),
            lease.name,
            str(lease.pid),
            str(lease.uid),
            f"{lease.rank} of {lease.world_size}",
            lease.device,
            ", ".join(map(str, lease.layers)),
            f"{lease.age_s:.0f} s",
            _seen(lease.last_seen_s),
        )
    console.print(clients)
    if len(reply.leases) < reply.lease_count:
        console.print(f"{len(reply.leases)} of {reply.lease_count} clients shown")


def _seen(seconds: float) -> str:
    """How long ago; a process that missed three signs of life hangs, or is stopped."""
    return f"{seconds:.0f} s ago" + (" [red](hangs?)[/]" if seconds > 3 * BEAT_INTERVAL_S else "")


def gib(nbytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"


def _make_checkpoint(options: argparse.Namespace) -> int:
    from engram_server.make_checkpoint import make_checkpoint  # brings numpy

    files = make_checkpoint(
        Path(options.folder),
        engram_vocab_size=options.engram_vocab_size,
        seed=options.seed,
        every_code=options.every_code,
    )
    for file in files:
        print(f"{Path(file).stat().st_size:>16,}  {file}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
