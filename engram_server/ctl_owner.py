"""What the daemon's owner may ask of it: `engram-ctl verify, evict, drain, purge`."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from engram_client.control import ask_owner, query_status
from engram_client.errors import EXIT_CHECKPOINT, EXIT_OK, EXIT_OTHER, NoServer, ServerRefused, TransferCut
from engram_client.protocol import DEFAULT_ENDPOINT, CheckState, CheckStatus, Drain, Evict, Verify
from engram_server.config import load_config

POLL_S = 0.1
_EXIT = {CheckState.PASSED: EXIT_OK, CheckState.DAMAGED: EXIT_CHECKPOINT, CheckState.FAILED: EXIT_OTHER}


def add_parser(commands: Any) -> None:
    """Puts the commands into an argparse subparsers object; each sets `run`."""
    verify = commands.add_parser(
        "verify", help="compare all rows in memory with the digests of the load; exit code 4 where they differ"
    )
    verify.add_argument("--show", action="store_true", help="only show the latest check, start none")
    _add_where(verify)
    verify.set_defaults(run=_verify)

    evict = commands.add_parser("evict", help="end a lease; its process keeps reading what it has mapped")
    evict.add_argument("lease", type=int, metavar="LEASE", help="its number in `engram-ctl status`")
    _add_where(evict)
    evict.set_defaults(run=_evict)

    drain = commands.add_parser("drain", help="end the daemon as SIGTERM does, and wait for its end")
    drain.add_argument("--free", action="store_true", help="free the memory that would be kept for the next daemon")
    _add_where(drain)
    drain.set_defaults(run=_drain)

    purge = commands.add_parser(
        "purge", help="free tables that a daemon which does not run any more has left in memory"
    )
    purge.add_argument("--config", metavar="FILE", required=True, help="the engram.json of that daemon")
    purge.set_defaults(run=_purge)


def _add_where(command: argparse.ArgumentParser) -> None:
    where = command.add_mutually_exclusive_group()
    where.add_argument("--endpoint", default=DEFAULT_ENDPOINT, help="control endpoint (default: %(default)s)")
    where.add_argument("--config", metavar="FILE", help="take the endpoint from this engram.json")
    command.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="for the daemon's answer")


def _where(options: argparse.Namespace) -> tuple[str, str | None]:
    if options.config is None:
        return options.endpoint, None
    control = load_config(options.config, None, os.environ).config.control
    return control.endpoint, control.handover


def _verify(options: argparse.Namespace) -> int:
    endpoint, handover = _where(options)
    if not options.show:
        ask_owner(endpoint, lambda permit: Verify(permit=permit), timeout=options.timeout, handover=handover)
    while True:
        check = query_status(endpoint, timeout=options.timeout, handover=handover).check
        if check is None or options.show or check.state is not CheckState.RUNNING:
            break
        time.sleep(POLL_S)
    print(_words(check))
    return _EXIT.get(check.state, EXIT_OK) if check else EXIT_OK


def _words(check: CheckStatus | None) -> str:
    if check is None:
        return "no check has run since the daemon started"
    if check.state is CheckState.RUNNING:
        return f"running: {check.done_bytes} of {check.total_bytes} bytes, {check.elapsed_s:.0f} s"
    if check.state is CheckState.FAILED:
        return f"the check could not be carried out: {check.problem}"
    if check.state is CheckState.DAMAGED:
        return "\n".join(check.damage)
    return f"all {check.done_bytes} bytes are as loaded ({check.elapsed_s:.1f} s)"


def _evict(options: argparse.Namespace) -> int:
    endpoint, handover = _where(options)
    lease = options.lease
    ask_owner(endpoint, lambda permit: Evict(permit=permit, lease=lease), timeout=options.timeout, handover=handover)
    print(f"lease {lease} has ended")
    return EXIT_OK


def _drain(options: argparse.Namespace) -> int:
    endpoint, handover = _where(options)
    free = options.free
    ask_owner(endpoint, lambda permit: Drain(permit=permit, free=free), timeout=options.timeout, handover=handover)
    while True:
        try:
            query_status(endpoint, timeout=0, handover=handover)
        except (NoServer, ServerRefused, TransferCut):
            break
        time.sleep(POLL_S)
    print("the daemon has ended")
    return EXIT_OK


def _purge(options: argparse.Namespace) -> int:
    """Raises AlreadyRunning when the daemon runs."""
    from engram_server.keep import purge  # brings posix_ipc
    from engram_server.sockets import EndpointLock

    config = load_config(options.config, None, os.environ).config
    lock = EndpointLock(config.control)
    try:
        removed = purge(config)
    finally:
        lock.release()
    for path in removed:
        print(f"removed {path}")
    return EXIT_OK
