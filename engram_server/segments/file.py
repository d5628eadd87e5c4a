"""Segments that are files in a folder of a tmpfs or hugetlbfs (`host.path`); protected as posix_shm is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engram_client.errors import AllocationFailed, BackingUnavailable, NotEnoughHugePages
from engram_client.protocol import Backing, SegmentInfo
from engram_server.machine import FileSystem, file_system
from engram_server.plan import check_memory_file_system
from engram_server.segments.base import Segment
from engram_server.segments.posix_shm import SEALED_MODE, check_sealed_file

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class FileSegment(Segment):
    def __init__(self, info: SegmentInfo, path: Path, writable_fd: int | None, readable_fd: int | None = None) -> None:
        super().__init__(info, writable_fd, readable_fd)
        self.path = path

    @classmethod
    def create(cls, info: SegmentInfo, tag: str, folder: str) -> FileSegment:
        """An empty segment as a new file. Raises BackingUnavailable when the folder is not in memory or the
        file exists, NotEnoughHugePages or AllocationFailed when the size is refused."""
        found = memory_folder(folder)
        path = segment_path(tag, info.id, folder)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        except FileExistsError as error:
            raise BackingUnavailable(
                backing=info.backing,
                problem=f"{path} exists",
                remedy="stop the daemon that owns it, or remove the file",
            ) from error
        except OSError as error:
            raise BackingUnavailable(
                backing=info.backing, problem=f"{path}: {error.strerror}", remedy="check the folder's permissions"
            ) from error
        segment = cls(info, path, fd)
        try:
            os.ftruncate(fd, info.nbytes)
            if found.kind == "hugetlbfs":
                # Here allocating in advance is safe: the pages are huge in any case.
                os.posix_fallocate(fd, 0, info.nbytes)
        except OSError as error:
            segment.discard()
            if found.kind == "hugetlbfs":
                raise NotEnoughHugePages(needed=info.nbytes, available=found.available) from error
            raise AllocationFailed(backing=info.backing, needed=info.nbytes, problem=str(error)) from error
        return segment

    @classmethod
    def adopt(cls, info: SegmentInfo, tag: str, folder: str) -> FileSegment:
        """The sealed segment of that name. Raises BackingUnavailable when there is none of that size and mode."""
        path = segment_path(tag, info.id, folder)
        try:
            fd = os.open(path, os.O_RDONLY | _FLAGS)
        except OSError as error:
            raise BackingUnavailable(
                backing=info.backing, problem=f"{path}: {error.strerror}", remedy="load the tables again"
            ) from error
        check_sealed_file(fd, info, str(path))
        return cls(info, path, None, fd)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        super().discard()

    def _seal(self, fd: int) -> int:
        os.fchmod(fd, SEALED_MODE)
        return os.open(self.path, os.O_RDONLY | _FLAGS)

    def _facts(self) -> dict[str, Any]:
        return {"path": self.path}


def segment_path(tag: str, segment_id: str, folder: str) -> Path:
    return Path(folder) / f"engram-{tag}-{segment_id}"


def memory_folder(folder: str) -> FileSystem:
    """The folder's file system. Raises BackingUnavailable when it is not a tmpfs or hugetlbfs."""
    return check_memory_file_system(file_system(Path("/"), folder), Backing.FILE, folder)
