"""`engram-server --config engram.json`: parse, build, serve, drain. Only this file ends the process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

import uvloop

from engram_client.errors import EXIT_OTHER, EngramError, TooFewDescriptors
from engram_client.version import VERSION
from engram_server.config import LoadedConfig, load_config
from engram_server.fdstore import ServiceManager
from engram_server.service import Service
from engram_server.sockets import EndpointLock

log = logging.getLogger("engram_server")

_EXIT_CODES = """exit codes: 0 drained, 1 anything else, 2 configuration, 3 resources, 4 checkpoint,
5 already running. A unit should not restart on 2, 4 and 5."""


LEAST_FILES = 128
"""Descriptors for sockets, event loop, loader, two tables and a few dozen clients. libzmq aborts the process
when it finds none left at its start."""


def main(arguments: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    options = _parse(arguments)
    _log_to_stderr(options.log_level)
    manager = ServiceManager.from_environ(os.environ, os.getpid())
    try:
        loaded = load_config(options.config, options.engram_config, os.environ)
        for remark in loaded.remarks:
            log.warning("%s", remark)
        _raise_file_limit()
        lock = EndpointLock(loaded.config.control)
        return uvloop.run(_serve(loaded, lock, manager))
    except EngramError as error:
        log.error("%s: %s", error.code, error)
        return error.exit_code
    except KeyboardInterrupt:  # before the loop had its signal handlers: nothing was loaded yet
        return 128 + signal.SIGINT
    except Exception:
        log.exception("the daemon failed")
        return EXIT_OTHER


async def _serve(loaded: LoadedConfig, lock: EndpointLock, manager: ServiceManager) -> int:
    service = Service(loaded, lock, manager)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    return await service.run()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="engram-server",
        description="Loads DeepSeek-V4.1's Engram tables once and hands them to the ranks of this node.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="engram.json")
    parser.add_argument(
        "--engram-config", metavar="JSON", help="object that replaces the file's engram_config as a whole"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--version", action="version", version=VERSION)
    return parser.parse_args(arguments)  # bad arguments end with 2, as any bad configuration does


def _log_to_stderr(level: str) -> None:
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _open_standard_streams() -> None:
    """Started with closed streams, their numbers would be given to sockets and to the tables' memory, and the
    first traceback of the loader would be written into a table."""
    null = os.open(os.devnull, os.O_RDWR)
    while null <= 2:
        os.set_inheritable(null, True)
        null = os.open(os.devnull, os.O_RDWR)
    os.close(null)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  as long as the process


def _raise_file_limit() -> None:
    """Each client holds one descriptor here; the usual soft limit of 1024 is for programs that select().

    Raises TooFewDescriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < LEAST_FILES and hard != resource.RLIM_INFINITY:
        raise TooFewDescriptors(limit=hard, needed=LEAST_FILES)


if __name__ == "__main__":
    sys.exit(main())
