"""What the commands of `engram-ctl` that speak to a daemon have in common."""

from __future__ import annotations

import argparse
import os
from typing import Any

from engram_client.protocol import DEFAULT_ENDPOINT
from engram_server.config import load_config


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


def add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")
