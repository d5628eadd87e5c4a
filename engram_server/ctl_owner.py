"""What the daemon's owner may ask of it: `engram-ctl verify, evict, drain, purge`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from engram_client.control import ask_owner, query_status
from engram_client.errors import (
    EXIT_CHECKPOINT,
    EXIT_OK,
    EXIT_OTHER,
    ConnectTimeout,
    NoServer,
    ServerDraining,
    ServerRefused,
    TransferCut,
)
from engram_client.handover import HandoverConnection
from engram_client.protocol import CheckState, CheckStatus, Done, Drain, Evict, Verify, handover_path
from engram_server.config import load_config
from engram_server.ctl_common import add_endpoint, add_json, endpoint_of

POLL_S = 0.1
ANSWER_S = 30.0
"""How long to wait for the daemon's answer, which it gives between other work."""
_EXIT = {CheckState.PASSED: EXIT_OK, CheckState.DAMAGED: EXIT_CHECKPOINT, CheckState.FAILED: EXIT_OTHER}


def add_parser(commands: Any) -> None:
    """Puts the commands into an argparse subparsers object; each sets `run`."""
    verify = commands.add_parser(
        "verify", help="compare all rows in memory with the digests of the load; exit code 4 where they differ"
    )
    verify.add_argument("--show", action="store_true", help="only show the latest check, start none")
    _add_common(verify)
    verify.set_defaults(run=_verify)

    evict = commands.add_parser("evict", help="end a lease; its process keeps reading what it has mapped")
    evict.add_argument("lease", type=int, metavar="LEASE", help="its number in `engram-ctl status`")
    _add_common(evict)
    evict.set_defaults(run=_evict)

    drain = commands.add_parser("drain", help="end the daemon as SIGTERM does, and wait for its end")
    drain.add_argument("--free", action="store_true", help="free the memory that would be kept for the next daemon")
    _add_common(drain)
    drain.set_defaults(run=_drain)

    purge = commands.add_parser(
        "purge", help="free tables that a daemon which does not run any more has left in memory"
    )
    purge.add_argument("--config", metavar="FILE", required=True, help="the engram.json of that daemon")
    add_json(purge)
    purge.set_defaults(run=_purge)


def _add_common(command: argparse.ArgumentParser) -> None:
    add_endpoint(command, timeout=ANSWER_S)
    add_json(command)


def _say(options: argparse.Namespace, facts: dict[str, Any], words: str) -> None:
    """For a person, or one JSON object for a program."""
    print(json.dumps(facts) if options.json else words)


def _ask(options: argparse.Namespace, make: Callable[[bytes], Verify | Evict | Drain]) -> tuple[str, str | None]:
    """Asks for what `make` makes of a permit, which is answered by Done; returns where the daemon is."""
    endpoint, handover = endpoint_of(options)
    ask_owner(endpoint, make, expected=Done, timeout=options.timeout, handover=handover)
    return endpoint, handover


def _verify(options: argparse.Namespace) -> int:
    if options.show:
        endpoint, handover = endpoint_of(options)
    else:
        endpoint, handover = _ask(options, lambda permit: Verify(permit=permit))
    while True:
        check = query_status(endpoint, timeout=options.timeout, handover=handover).check
        if check is None or options.show or check.state is not CheckState.RUNNING:
            break
        time.sleep(POLL_S)
    _say(options, {"check": msgspec.to_builtins(check)}, _words(check))
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
    lease = options.lease
    _ask(options, lambda permit: Evict(permit=permit, lease=lease))
    _say(options, {"lease": lease, "ended": True}, f"lease {lease} has ended")
    return EXIT_OK


def _drain(options: argparse.Namespace) -> int:
    free = options.free
    endpoint, handover = endpoint_of(options)
    with _process_of(endpoint, handover, options.timeout) as process:
        _ask(options, lambda permit: Drain(permit=permit, free=free))
        if process is not None:
            select.select([process], [], [])
        else:
            _wait_for_silence(endpoint, handover)
    _say(options, {"ended": True, "free": free}, "the daemon has ended")
    return EXIT_OK


@contextlib.contextmanager
def _process_of(endpoint: str, handover: str | None, timeout: float) -> Iterator[int | None]:
    """A pidfd of the daemon: its sockets go first, and then it may take seconds to free its memory. None where its
    process cannot be seen from here, as from another container."""
    with HandoverConnection.open(handover_path(endpoint, handover), timeout) as connection:
        pid = connection.server_pid
    try:
        process = os.pidfd_open(pid) if pid else None
    except OSError:
        process = None
    try:
        yield process
    finally:
        if process is not None:
            os.close(process)


def _wait_for_silence(endpoint: str, handover: str | None) -> None:
    while True:
        with contextlib.suppress(ServerDraining, ConnectTimeout):  # its last words, to us among others
            try:
                query_status(endpoint, timeout=0, handover=handover)
            except (NoServer, ServerRefused, TransferCut):
                return
        time.sleep(POLL_S)


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
    if options.json or removed:
        _say(options, {"removed": removed}, "\n".join(f"removed {path}" for path in removed))
    return EXIT_OK
