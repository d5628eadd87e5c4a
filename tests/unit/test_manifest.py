"""What one daemon writes down another one reads, also where they are not of the same version."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from engram_client.errors import ManifestVersionUnknown
from engram_server import manifest
from tests.support.kept import MANIFEST, earliest


def test_a_manifest_that_an_earlier_daemon_left_is_read_whole() -> None:
    """If this fails, an upgrade costs a load of all tables: give the new field a default, or, where it means
    something else now, raise MANIFEST_VERSION."""
    found = manifest.decode(MANIFEST, "kept")
    assert left_of(json.loads(MANIFEST), json.loads(manifest.encode(found))) == json.loads(MANIFEST)


def left_of(kept: Any, found: Any) -> Any:
    """`found` without the fields that `kept` does not have."""
    if isinstance(kept, dict) and isinstance(found, dict):
        return {name: left_of(kept[name], value) for name, value in found.items() if name in kept}
    if isinstance(kept, list) and isinstance(found, list) and len(kept) == len(found):
        return [left_of(*pair) for pair in zip(kept, found, strict=True)]
    return found


def test_the_first_manifests_lack_what_has_a_default() -> None:
    found = manifest.decode(earliest(MANIFEST), "kept")
    assert (found.damaged, found.gpus, found.tables[0].sample) == ((), None, None)
    assert found.result.pieces == manifest.decode(MANIFEST, "kept").result.pieces


def test_a_field_of_a_later_daemon_is_passed_over_as_long_as_the_version_is_known() -> None:
    """A daemon that is rolled back takes over what the newer one left."""
    later = json.loads(MANIFEST) | {"colour": "blue"}
    assert manifest.decode(json.dumps(later).encode(), "kept") == manifest.decode(MANIFEST, "kept")


@pytest.mark.parametrize("version", [0, manifest.MANIFEST_VERSION + 1, -1, 2**63 - 1])
def test_another_version_is_named_before_anything_else_is_looked_at(version: int) -> None:
    with pytest.raises(ManifestVersionUnknown) as caught:
        manifest.decode(json.dumps({"version": version, "tables": "elsewhere"}).encode(), "kept")
    assert (caught.value.found, caught.value.known) == (version, manifest.MANIFEST_VERSION)


def test_a_manifest_in_a_memfd_is_sealed_against_every_change() -> None:
    fd = manifest.to_memfd(manifest.decode(MANIFEST, "kept"))
    try:
        for attempt in (lambda: os.write(fd, b"x"), lambda: os.truncate(fd, 0), lambda: os.truncate(fd, 1 << 20)):
            with pytest.raises(PermissionError):
                attempt()
        assert manifest.from_memfd(fd) == manifest.decode(MANIFEST, "kept")
    finally:
        os.close(fd)
