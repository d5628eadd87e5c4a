"""Where tables came from, so that a restarted daemon can tell whether it would read the same ones again.

The tables themselves are never read for it: the configuration's words, and size, time and inode of the files.
"""

from __future__ import annotations

import json
import os

import msgspec

from engram_server.checkpoint import CONFIG_NAME, INDEX_NAME, TableSource
from engram_server.config import Config


class FileStamp(msgspec.Struct, frozen=True):
    """What a file looked like; an unread file that looks the same is taken to be the same."""

    path: str
    size: int
    mtime_ns: int
    inode: int


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What the tables in memory were made from, and what kind of memory was asked for."""

    model_path: str | None
    load_format: str
    geometry: str
    """The configuration's geometry as JSON with sorted keys."""
    seed: int
    backing: str
    path: str | None
    huge_pages: str
    numa: str
    files: tuple[FileStamp, ...]
    """Of the checkpoint, as they were before they were read."""


_KEYS = {"backing": "host.backing", "path": "host.path", "huge_pages": "host.huge_pages", "numa": "host.numa"}


def origin_of(config: Config, sources: tuple[TableSource, ...] | None) -> Origin:
    """The origin of tables that are about to be loaded. Files that cannot be looked at are left out."""
    paths: list[str] = []
    if config.model_path is not None:
        folder = os.path.abspath(config.model_path)
        paths = [os.path.join(folder, name) for name in (CONFIG_NAME, INDEX_NAME)]
        paths += [extent.path for source in sources or () for extent in (source.values, source.scales)]
    stamps = (_stamp(path) for path in dict.fromkeys(paths))
    return Origin(
        model_path=config.model_path,
        load_format=config.load_format,
        geometry=json.dumps(config.geometry, sort_keys=True),
        seed=config.seed if config.load_format == "dummy" else 0,
        backing=config.host.backing,
        path=config.host.path,
        huge_pages=config.host.huge_pages,
        numa=config.host.numa,
        files=tuple(stamp for stamp in stamps if stamp is not None),
    )


def changes(origin: Origin, config: Config) -> list[str]:
    """What a load by `config` would do differently, in words; empty where it would read the same tables."""
    now = msgspec.structs.replace(origin_of(config, None), files=origin.files)
    found = [
        f"{_KEYS.get(name, name)} was {getattr(origin, name)} and is {getattr(now, name)}"
        for name in origin.__struct_fields__
        if getattr(origin, name) != getattr(now, name)
    ]
    if not found:
        found = [f"{stamp.path} has changed" for stamp in origin.files if _differs(stamp)]
    return found


def unreadable(origin: Origin) -> list[str]:
    """Files of the origin that are not there any more, or may not be looked at."""
    return [stamp.path for stamp in origin.files if _stamp(stamp.path) is None]


def _differs(before: FileStamp) -> bool:
    # A file that is gone makes no other tables: those in memory are then the only ones there are.
    now = _stamp(before.path)
    return now is not None and now != before


def _stamp(path: str) -> FileStamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return FileStamp(path=path, size=found.st_size, mtime_ns=found.st_mtime_ns, inode=found.st_ino)
