"""Segments with a name in /dev/shm. Mode 0440 and O_RDONLY descriptors protect them: less than seals do, since
root and the owner's uid can open them again for writing."""

from __future__ import annotations

import os
from typing import Any

import posix_ipc

from engram_client.errors import AllocationFailed, BackingUnavailable
from engram_client.protocol import SegmentInfo
from engram_server.segments.base import Segment

SHM_FOLDER = "/dev/shm"
SEALED_MODE = 0o440


class PosixShmSegment(Segment):
    def __init__(self, info: SegmentInfo, name: str, writable_fd: int | None, readable_fd: int | None = None) -> None:
        super().__init__(info, writable_fd, readable_fd)
        self.name = name

    @classmethod
    def create(cls, info: SegmentInfo, tag: str) -> PosixShmSegment:
        """An empty segment with a new name. Raises BackingUnavailable when the name is taken or /dev/shm
        refuses, AllocationFailed when the size is refused."""
        name = shm_name(tag, info.id)
        try:
            fd = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
        except posix_ipc.ExistentialError as error:
            raise BackingUnavailable(
                backing=info.backing,
                problem=f"{SHM_FOLDER}{name} exists",
                remedy="stop the daemon that owns it, or remove the file",
            ) from error
        except (OSError, posix_ipc.Error) as error:
            raise BackingUnavailable(
                backing=info.backing, problem=f"{SHM_FOLDER}{name}: {error}", remedy='set host.backing to "memfd"'
            ) from error
        segment = cls(info, name, fd)
        try:
            os.ftruncate(fd, info.nbytes)  # no memory is taken yet: the loader does, page by page
        except OSError as error:
            segment.discard()
            raise AllocationFailed(backing=info.backing, needed=info.nbytes, problem=str(error)) from error
        return segment

    @classmethod
    def adopt(cls, info: SegmentInfo, tag: str) -> PosixShmSegment:
        """The sealed segment of that name. Raises BackingUnavailable when there is none of that size and mode."""
        name = shm_name(tag, info.id)
        try:
            fd = posix_ipc.SharedMemory(name, read_only=True).fd
        except (OSError, posix_ipc.Error) as error:
            raise BackingUnavailable(
                backing=info.backing, problem=f"{SHM_FOLDER}{name}: {error}", remedy="load the tables again"
            ) from error
        check_sealed_file(fd, info, f"{SHM_FOLDER}{name}")
        return cls(info, name, None, fd)

    def discard(self) -> None:
        remove_shm_name(self.name)
        super().discard()

    def _seal(self, fd: int) -> int:
        os.fchmod(fd, SEALED_MODE)
        return int(posix_ipc.SharedMemory(self.name, read_only=True).fd)

    def _facts(self) -> dict[str, Any]:
        return {"name": self.name}


def shm_name(tag: str, segment_id: str) -> str:
    return f"/engram-{tag}-{segment_id}"


def remove_shm_name(name: str) -> bool:
    """Whether there was such a name to remove."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return False
    return True


def check_sealed_file(fd: int, info: SegmentInfo, path: str) -> None:
    """Closes `fd` and raises BackingUnavailable unless it is a whole segment that was sealed."""
    stat = os.fstat(fd)
    problem = None
    if stat.st_size != info.nbytes:
        problem = f"{path} has {stat.st_size} bytes, not {info.nbytes}"
    elif stat.st_mode & 0o777 != SEALED_MODE:
        problem = f"{path} has mode {stat.st_mode & 0o777:#o}: its load never ended"
    elif stat.st_uid not in (0, os.geteuid()):
        problem = f"{path} belongs to uid {stat.st_uid}"
    if problem:
        os.close(fd)
        raise BackingUnavailable(backing=info.backing, problem=problem, remedy="load the tables again")
