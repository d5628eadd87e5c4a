"""Where tables outlive the daemon: written down beside their names, or given to the service manager.

One rule for both: the manifest goes last when memory is kept and first when it is given up, so that a manifest
that can be read always speaks of memory that is whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engram_client.errors import AdoptError, WriteFailed
from engram_client.protocol import Backing, endpoint_tag
from engram_server import manifest as manifests
from engram_server.config import Config
from engram_server.fdstore import ServiceManager
from engram_server.manifest import Manifest
from engram_server.segments import Segment, remove_stale

log = logging.getLogger(__name__)

NAMED = (Backing.POSIX_SHM, Backing.FILE)
MANIFEST_NAME = "engram-manifest"
SEGMENT_PREFIX = "engram-segment-"
_STORE_HINT = "systemd needs FileDescriptorStoreMax="


@dataclass(frozen=True)
class Kept:
    """What an earlier daemon left: its manifest, and descriptors by segment id where it stored any."""

    manifest: Manifest
    fds: dict[str, int]


class Keeper:
    """Finds, keeps and gives up the tables of one endpoint."""

    def __init__(self, config: Config, tag: str, manager: ServiceManager) -> None:
        self._config = config
        self._tag = tag
        self._manager = manager
        self._paths = manifests.paths(config, tag)
        self._stored: set[str] = set()
        self.kept = False
        """Whether the next daemon would find what this one serves."""
        self.outlook = "a restart loads the tables again"
        """What a restart will cost, in words."""

    def __repr__(self) -> str:
        return f"<Keeper of {self._tag}: {self.outlook}>"

    def find(self) -> Kept | None:
        """What is there to adopt. Whatever cannot be used is logged and given up."""
        stored, names = self._take_stored()
        found: Manifest | None = None
        try:
            if MANIFEST_NAME in stored:
                found = manifests.from_memfd(stored[MANIFEST_NAME])
            elif names:
                log.warning("%d descriptors came back without a manifest and are dropped", len(names))
            if found is None:
                found = next((each for path in self._paths if (each := manifests.read(path)) is not None), None)
        except AdoptError as error:
            log.warning("%s: %s", error.code, error)
            found = None
        finally:
            if MANIFEST_NAME in stored:
                os.close(stored.pop(MANIFEST_NAME))
        if found is not None and found.tag != self._tag and re.fullmatch("[0-9a-f]{12}", found.tag):
            # The socket's folder was mounted at another path. Its lock is ours, so nobody serves that memory.
            log.warning("the tables of %s were kept under another endpoint and are dropped", self._paths[0])
            remove_stale(found.tag, found.folder)
            found = None
        if found is None:
            self._close_all(names)
            self.forget(None)
            return None
        return Kept(found, names)

    def _take_stored(self) -> tuple[dict[str, int], dict[str, int]]:
        """Our descriptors out of those that the manager gave back: the manifest's, and segments' by id."""
        ours: dict[str, int] = {}
        segments: dict[str, int] = {}
        for name in list(self._manager.received):
            if name == MANIFEST_NAME or name.startswith(SEGMENT_PREFIX):
                self._stored.add(name)
                fd = self._manager.received.pop(name)
                if name == MANIFEST_NAME:
                    ours[name] = fd
                else:
                    segments[name.removeprefix(SEGMENT_PREFIX)] = fd
        return ours, segments

    def keep(self, manifest: Manifest, segments: Sequence[Segment]) -> None:
        """Makes `segments`, which are sealed, findable for the next daemon, if there is a way. Raises nothing:
        what cannot be kept is loaded again one day, and the log and `outlook` say so."""
        if self._config.host.keep == "off":
            self.outlook = 'a restart loads the tables again: host.keep is "off"'
        elif all(segment.info.backing in NAMED for segment in segments):
            self._keep_by_name(manifest)
        else:
            self._keep_in_store(manifest, segments)
        if not self.kept:
            self.forget(None)

    def let_go(self) -> None:
        """What is served will not be kept after all: it ends with this daemon."""
        self.kept = False
        self._remove_manifests()
        self.outlook = "a restart loads the tables again: its memory was given up"

    def _keep_by_name(self, manifest: Manifest) -> None:
        problems = []
        for path in self._paths:
            try:
                manifests.write(manifest, path)
                self.kept = True
            except WriteFailed as error:
                problems.append(error)
        for problem in problems:
            # a hugetlbfs takes no ordinary files: there the one beside the socket has to do
            log.log(logging.INFO if self.kept else logging.WARNING, "%s", problem)
        self.outlook = (
            "the next daemon takes the tables over by their names"
            if self.kept
            else "a restart loads the tables again: no manifest could be written"
        )

    def _keep_in_store(self, manifest: Manifest, segments: Sequence[Segment]) -> None:
        count = len(segments) + 1
        if not self._manager.present:
            self.outlook = (
                "a restart loads the tables again: this memory has no name and no service manager keeps it "
                f"(run under systemd with FileDescriptorStoreMax={count}, or set host.backing to posix_shm or file)"
            )
            return
        if not self._manager.can_store(count):
            self.outlook = (
                f"a restart loads the tables again: the service manager stores {self._manager.store_limit} "
                f"descriptors and {count} are needed ({_STORE_HINT}{count})"
            )
            return
        self._unstore()
        try:
            fd = manifests.to_memfd(manifest)
        except OSError as error:
            self.outlook = f"a restart loads the tables again: no manifest could be made ({error.strerror})"
            return
        try:
            named = [(SEGMENT_PREFIX + segment.info.id, segment.readable_fd) for segment in segments]
            self.kept = all(self._store(name, each) for name, each in (*named, (MANIFEST_NAME, fd)))
        finally:
            os.close(fd)
        if not self.kept:
            self.outlook = "a restart loads the tables again: the service manager did not take them"
        elif self._manager.store_limit is None:
            # systemd before 254 does not say how many it takes
            self.outlook = f"the service manager keeps the tables for the next daemon, if it has {_STORE_HINT}{count}"
        else:
            self.outlook = "the service manager keeps the tables for the next daemon"

    def _store(self, name: str, fd: int) -> bool:
        self._stored.add(name)
        return self._manager.store(name, fd)

    def confirm(self, manifest: Manifest, by_name: bool) -> None:
        """Memory that was found is served on unchanged: it stays where it is kept."""
        if self._config.host.keep == "off":
            self._remove_manifests()
            self.outlook = 'a restart loads the tables again: host.keep is "off"'
        elif by_name:
            self._keep_by_name(manifest)
        else:
            self.kept = True
            self.outlook = "the service manager keeps the tables for the next daemon"

    def forget(self, folder: str | None, keep: Sequence[str] = ()) -> list[str]:
        """Gives up what earlier daemons kept, but for the segments whose ids are in `keep`. Readers that map
        it keep it until they leave. `folder`: where segments of another configuration lie. Returns their paths."""
        self.kept = False
        self._remove_manifests()
        removed = [
            path for parent in {folder, self._config.host.path} for path in remove_stale(self._tag, parent, keep)
        ]
        for path in removed:
            log.info("removed %s, which an earlier daemon had left", path)
        return removed

    def _remove_manifests(self) -> None:
        for path in self._paths:
            manifests.remove(path)
        self._unstore()

    def _unstore(self) -> None:
        for name in sorted(self._stored, key=lambda name: name != MANIFEST_NAME):
            self._manager.remove(name)
        self._stored.clear()

    def _close_all(self, fds: dict[str, int]) -> None:
        for fd in fds.values():
            with contextlib.suppress(OSError):
                os.close(fd)


def purge(config: Config) -> list[str]:
    """Frees the named segments that daemons of this configuration left; the caller holds the endpoint's lock.
    Returns what was removed."""
    keeper = Keeper(config, endpoint_tag(config.control.endpoint), ServiceManager())
    kept = keeper.find()
    return keeper.forget(kept.manifest.folder if kept else None)
