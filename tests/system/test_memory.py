"""A load takes little memory beside the tables themselves: neither the loader nor the page cache holds them twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engram_client.errors import ConnectError
from engram_client.protocol import State, StatusReply
from engram_server.make_checkpoint import make_checkpoint
from tests.support.daemon import Daemon, wait_until
from tests.support.page_cache import cached_bytes, drop

MIB = 1 << 20
VOCAB = 10_000
"""128 MiB in two tables."""
BESIDE_BYTES = 96 * MIB
"""The loader's interpreter, its libraries and its buffers, at most; half of the tables may come on top."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "model"
    make_checkpoint(folder, engram_vocab_size=VOCAB, seed=5)
    return folder


@pytest.fixture
def files(model: Path) -> Iterator[list[Path]]:
    """The checkpoint's files, none of them in the page cache; none is left there."""
    found = sorted(model.glob("*.safetensors"))
    for path in found:
        drop(path)
    if sum(map(cached_bytes, found)) > MIB:
        pytest.skip("this file system is a memory of its own: nothing of it can leave the page cache")
    yield found
    for path in found:
        drop(path)


@pytest.mark.parametrize("state", ["cold", "warm"])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_the_loader_and_the_page_cache_hold_no_second_copy_of_the_tables(
    direct_io: str, state: str, folder: Path, model: Path, files: list[Path]
) -> None:
    if state == "warm":
        for path in files:
            path.read_bytes()
        assert sum(map(cached_bytes, files)) > 100 * MIB
    config = {
        "model_path": str(model),
        "engram_config": {"placement": "cpu", "replication": "per_node"},
        "host": {"keep": "off"},
        "load": {"direct_io": direct_io},
    }
    grown: list[int] = []
    before = sum(map(cached_bytes, files))
    daemon = Daemon(folder, config)

    def loaded() -> StatusReply | None:
        assert daemon.process.poll() is None, daemon.log
        grown.append(sum(map(cached_bytes, files)) - before)
        try:
            status = daemon.status()
        except ConnectError:  # not there yet
            return None
        return status if status.state is State.READY else None

    try:
        status = wait_until(loaded, "the load")
        report, tables = status.report, sum(segment.info.nbytes for segment in status.segments)
        assert report is not None
        assert 120 * MIB < report.bytes_read <= tables
        assert report.peak_rss_bytes + max(grown) < tables // 2 + BESIDE_BYTES
        assert sum(map(cached_bytes, files)) < tables // 8, "what was read must not stay in the page cache"
    finally:
        daemon.stop()
