"""Where the two sockets are: the rules for their paths, used by daemon and client alike."""

from __future__ import annotations

import hashlib
import os
from typing import Final

from engram_client.errors import SocketPathInvalid

DEFAULT_ENDPOINT: Final = "ipc:///run/engram/control.sock"
MAX_SOCKET_PATH: Final = 107
"""sun_path has 108 bytes, the last a NUL."""


def ipc_path(endpoint: str) -> str:
    """The file-system path of an `ipc://` endpoint.

    Raises SocketPathInvalid for another transport, an abstract name, a relative path or one too long.
    """
    scheme, separator, path = endpoint.partition("://")
    if (scheme, separator) != ("ipc", "://"):
        raise SocketPathInvalid(
            path=endpoint, problem="the control endpoint must start with ipc://", limit=MAX_SOCKET_PATH
        )
    return check_socket_path(path)


def check_socket_path(path: str) -> str:
    """`path` itself.

    Raises SocketPathInvalid for an abstract name, a relative path, a folder, or one that the kernel cannot bind.
    """
    problem = None
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError:
        size, problem = 0, "the path has a character that no file name can have"
    if path.startswith(("@", "\0")):
        problem = "abstract names have no permissions and are refused"
    elif not path.startswith("/"):
        problem = "the path must be absolute"
    elif path.endswith("/"):
        problem = "the path names a folder"
    elif "\0" in path:
        problem = "the path has a NUL byte"
    elif size > MAX_SOCKET_PATH:
        problem = f"the path has {size} bytes"
    if problem:
        raise SocketPathInvalid(path=path, problem=problem, limit=MAX_SOCKET_PATH)
    return path


def handover_path(endpoint: str, configured: str | None = None) -> str:
    """Where the descriptor socket is: as configured, else beside the control socket, by this rule.

    Raises SocketPathInvalid, as `ipc_path` does; the control socket's path has 98 bytes at most by this rule.
    """
    return check_socket_path(configured if configured is not None else ipc_path(endpoint) + ".handover")


def endpoint_tag(endpoint: str) -> str:
    """A short name for an endpoint: 12 hex digits that mark the named segments of its daemon."""
    return hashlib.sha256(os.fsencode(ipc_path(endpoint))).hexdigest()[:12]
