"""What is in memory, written down: enough for a later daemon to serve it without reading the checkpoint.

JSON, so that a person can read it. It lies in a file beside the control socket (and in `host.path`, which may
outlive that folder in a container), or travels as a sealed memfd in the service manager's store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from engram_client.errors import ManifestInvalid, ManifestVersionUnknown, WriteFailed
from engram_client.layout import ModelGeometry
from engram_client.protocol import ResolvedOptions, TableInfo, ipc_path
from engram_server.config import Config
from engram_server.gpus import Gpus
from engram_server.load_job import LoadResult
from engram_server.origin import Origin
from engram_server.segments.memfd import F_ADD_SEALS, F_GET_SEALS, F_SEAL_SHRINK, SEALS

MANIFEST_VERSION: Final = 1
LIMIT_BYTES: Final = 64 << 20
"""No manifest is larger: the digests of 188 GiB take half a MiB."""
_WRITTEN_SEALS = SEALS | 0x8
"""With F_SEAL_WRITE, which is possible here: nobody maps a manifest."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields are only added, with defaults; any other change raises MANIFEST_VERSION."""

    version: int
    epoch: str
    """Of the daemon that loaded the tables."""
    tag: str
    """Of the endpoint, part of the names of named segments."""
    options: ResolvedOptions
    folder: str | None
    """Folder of backing file."""
    origin: Origin
    model: ModelGeometry
    tables: tuple[TableInfo, ...]
    """With identity and segments: sizes, shards, row formats, page sizes, backing."""
    result: LoadResult
    """Digests of every piece, huge pages, and the report of the load."""
    damaged: tuple[str, ...] = ()
    """Ids of segments that a check has found damaged: never taken over."""
    gpus: Gpus | None = None
    """As the loading daemon found them: to try what they can do takes a tenth of a second."""


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def decode(data: bytes, where: str) -> Manifest:
    """Raises ManifestVersionUnknown for a version that this daemon does not know, ManifestInvalid otherwise."""
    try:
        # The version first: a manifest of the future may differ in all else.
        version = msgspec.json.decode(data, type=_Versioned).version
        if version == MANIFEST_VERSION:
            return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestInvalid(where=where, problem=str(error)[:300]) from error
    raise ManifestVersionUnknown(where=where, found=version, known=MANIFEST_VERSION)


class _Versioned(msgspec.Struct):
    version: int


# As a file


def paths(config: Config, tag: str) -> tuple[str, ...]:
    """Where the manifest of named segments is written, and looked for in this order."""
    beside = ipc_path(config.control.endpoint) + ".manifest"
    if config.host.path is None:
        return (beside,)
    return (beside, os.path.join(config.host.path, f"engram-{tag}.manifest"))


def write(manifest: Manifest, path: str) -> None:
    """Whole or not at all, mode 0600. Raises WriteFailed."""
    temporary = f"{path}.new"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _write_all(fd, encode(manifest))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise WriteFailed(path=path, problem=error.strerror or str(error)) from error


def read(path: str) -> Manifest | None:
    """The manifest at `path`; None where there is none. Raises ManifestInvalid or ManifestVersionUnknown."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ManifestInvalid(where=path, problem=error.strerror or str(error)) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            # whoever may write a manifest decides which memory ranks are handed
            raise ManifestInvalid(where=path, problem="it is no file that only this user may write")
        return decode(_read_all(fd, path), path)
    finally:
        os.close(fd)


def remove(path: str) -> None:
    for name in (path, f"{path}.new"):
        with contextlib.suppress(OSError):
            os.unlink(name)


# As a descriptor


def to_memfd(manifest: Manifest) -> int:
    """A sealed memfd that holds the manifest; the caller closes it. Raises OSError."""
    fd = os.memfd_create("engram-manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write_all(fd, encode(manifest))
        fcntl.fcntl(fd, F_ADD_SEALS, _WRITTEN_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def from_memfd(fd: int) -> Manifest:
    """The manifest behind `fd`, which stays the caller's. Raises ManifestInvalid or ManifestVersionUnknown."""
    where = "the service manager's store"
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        raise ManifestInvalid(where=where, problem="it is no memfd") from error
    if not seals & F_SEAL_SHRINK:
        raise ManifestInvalid(where=where, problem="it is not sealed")
    return decode(_read_all(fd, where), where)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, where: str) -> bytes:
    return b"".join(_chunks(fd, where))


def _chunks(fd: int, where: str) -> Iterator[Any]:
    offset = 0
    while True:
        try:
            chunk = os.pread(fd, 1 << 20, offset)
        except OSError as error:
            raise ManifestInvalid(where=where, problem=error.strerror or str(error)) from error
        if not chunk:
            return
        offset += len(chunk)
        if offset > LIMIT_BYTES:
            raise ManifestInvalid(where=where, problem=f"it has more than {LIMIT_BYTES} bytes")
        yield chunk
