"""What the commands of `engram-ctl` that speak to a daemon have in common."""

from __future__ import annotations

import argparse
import os
from typing import Any, TypeVar

from engram_client.control import ControlConnection
from engram_client.errors import TransferCut
from engram_client.handover import REPLY_LEAST_S, HandoverConnection
from engram_client.protocol import DEFAULT_ENDPOINT, Reply, Request, handover_path
from engram_server.config import load_config

_R = TypeVar("_R", bound=Reply)


def add_endpoint(parser: argparse.ArgumentParser, timeout: float = 5.0) -> None:
    """--endpoint or --config, and --timeout."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--endpoint", default=DEFAULT_ENDPOINT, help="control endpoint (default: %(default)s)")
    where.add_argument("--config", metavar="FILE", help="take the endpoint from this engram.json")
    parser.add_argument("--timeout", type=float, default=timeout, metavar="SECONDS")


def endpoint_of(options: argparse.Namespace) -> tuple[str, str | None]:
    """The control endpoint and, where it is configured, the handover socket's path."""
    if options.config is None:
        return options.endpoint, None
    control = load_config(options.config, None, os.environ).config.control
    return control.endpoint, control.handover


def ask(options: argparse.Namespace, request: Request, expected: type[_R], doing: str) -> _R:
    """The daemon's reply. Raises what `ControlConnection.request` and `HandoverConnection.open` do."""
    endpoint, handover = endpoint_of(options)
    with HandoverConnection.open(handover_path(endpoint, handover), options.timeout) as connection:
        with ControlConnection(endpoint, connection) as control:
            for reply in control.request(request, max(options.timeout, REPLY_LEAST_S), doing):
                if isinstance(reply, expected):
                    return reply
    raise TransferCut(doing=doing)


def add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")
