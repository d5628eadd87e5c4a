"""`engram-ctl logs-level`: what the daemon logs, while it runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from engram_client.control import ask_owner
from engram_client.errors import EXIT_OK
from engram_client.protocol import LogLevel, LogLevelReply, SetLogLevel
from engram_server.ctl_common import add_endpoint, add_json, endpoint_of


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("logs-level", help="show what the daemon logs, or change it")
    parser.add_argument("level", nargs="?", choices=[str(level) for level in LogLevel])
    add_endpoint(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    wanted = LogLevel(options.level) if options.level else None
    endpoint, handover = endpoint_of(options)
    reply = ask_owner(
        endpoint,
        lambda permit: SetLogLevel(permit=permit, level=wanted),
        timeout=options.timeout,
        handover=handover,
        expected=LogLevelReply,
    )
    if options.json:
        print(json.dumps(msgspec.to_builtins(reply)))
    else:
        print(reply.level if reply.level is reply.previous else f"{reply.level}, was {reply.previous}")
    return EXIT_OK
