"""A sample of a table tells checkpoints of equal shape apart, wherever the difference is in a sampled row."""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.errors import ReadFailed
from engram_client.layout import TableGeometry
from engram_server.checkpoint import TableSource, open_checkpoint
from engram_server.make_checkpoint import make_checkpoint
from engram_server.sample import SAMPLE_ROWS, generated_digests, sample_digests, sampled_rows


def sources(path: Path, seed: int) -> tuple[TableSource, ...]:
    make_checkpoint(path, engram_vocab_size=60, seed=seed)
    return open_checkpoint(path).sources


@given(st.integers(1, 10**9))
def test_the_rows_sampled_are_few_and_reach_from_the_first_to_the_last(rows: int) -> None:
    chosen = sampled_rows(rows)
    assert (chosen[0], chosen[-1]) == (0, rows - 1)
    assert len(chosen) == min(rows, SAMPLE_ROWS)
    assert all(low < high for low, high in pairwise(chosen))


def test_copies_have_one_sample_and_other_checkpoints_another(tmp_path: Path) -> None:
    first, copy, other = (
        sample_digests(sources(tmp_path / name, seed), threading.Event())
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == copy
    assert list(first) == [1, 14]
    assert not set(first.values()) & set(other.values())


@pytest.mark.parametrize("part", ["values", "scales"])
def test_a_byte_of_a_sampled_row_changes_the_sample(tmp_path: Path, part: str) -> None:
    found = sources(tmp_path / "model", 3)
    before = sample_digests(found, threading.Event())
    extent = getattr(found[1], part)
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset + extent.nbytes - 1)
        byte = file.read(1)[0]
        file.seek(extent.offset + extent.nbytes - 1)
        file.write(bytes([byte ^ 1]))
    after = sample_digests(found, threading.Event())
    assert after[1] == before[1]
    assert after[14] != before[14]


def test_a_file_that_is_gone_or_short_is_named(tmp_path: Path) -> None:
    found = sources(tmp_path / "model", 3)
    path = Path(found[1].scales.path)
    with path.open("r+b") as file:
        file.truncate(found[1].scales.offset + 5)
    for _ in range(2):
        with pytest.raises(ReadFailed) as failed:
            sample_digests(found, threading.Event())
        assert failed.value.path == str(path)
        path.unlink(missing_ok=True)


def test_generated_tables_are_told_apart_by_seed_layer_and_shape() -> None:
    tables = [TableGeometry(layer_id=layer, columns=columns) for layer in (1, 2) for columns in ((5,), (6,))]
    digests = [generated_digests([table], seed)[table.layer_id] for table in tables for seed in (0, 1)]
    assert len(set(digests)) == len(digests)
    assert generated_digests(tables[:1], 0) == generated_digests(tables[:1], 0)


def test_a_sample_that_nobody_wants_any_more_ends_with_its_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process does not end before it, and of a slow file system it may want minutes."""
    found, stop, reads = sources(tmp_path / "model", 3), threading.Event(), []

    def pread(fd: int, count: int, offset: int) -> bytes:
        reads.append(offset)
        if len(reads) == 5:
            stop.set()
        return bytes(count)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(CancelledError):
        sample_digests(found, stop)
    assert len(reads) <= 6
