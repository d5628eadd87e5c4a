"""Predictions for larger groups: the document prints what the model says, which keeps to what was measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.bench import predict
from tests.bench.group_table import TOKENS, Times, by_group, read_rows, shown, times_of

HEAD = ["name", "value", "unit", "note", "gpu", "driver", "commit", "cache", "ranks"]


def test_the_document_has_exactly_the_table_that_is_printed() -> None:
    text = predict.DOCS.read_text(encoding="utf-8")
    made = text.split(predict.BEGIN)[1].split(predict.END)[0]
    assert made.strip() == predict.table()


@pytest.mark.parametrize("name", ["GPU memory, all-gather", "GPU memory, all-reduce", "GPU memory, `peer_read`"])
def test_two_ranks_are_predicted_as_they_were_measured(name: str) -> None:
    inputs = {
        "GPU memory, all-gather": predict.ALL_GATHER_US,
        "GPU memory, all-reduce": predict.ALL_REDUCE_US,
        "GPU memory, `peer_read`": predict.PEER_READ_US,
    }
    _, model = predict.MODEL[name]
    assert tuple(model(2, tokens) for tokens in TOKENS) == pytest.approx(inputs[name])


def test_a_larger_group_takes_longer_in_gpu_memory_and_splits_large_batches_of_host_memory() -> None:
    for name, (_, model) in predict.MODEL.items():
        times = [model(ranks, 8192) for ranks in predict.RANKS]
        if name == "host memory, `per_node`":
            assert len(set(times)) == 1
        else:
            assert times == sorted(times, reverse=name == "host memory, split reads")


def test_what_one_rank_reads_of_host_memory_is_what_was_measured() -> None:
    sorted_from = predict.SORT_FROM_IDS
    for rows, us in zip(predict.ROWS, predict.HOST_US, strict=True):
        assert predict.host_us(rows) == pytest.approx(us) or rows >= sorted_from
    for rows, us in zip(predict.ROWS[-2:], predict.HOST_SORTED_US, strict=True):
        assert predict.host_us(rows) == pytest.approx(us)
    assert predict.host_us(3) == predict.HOST_US[0]


def write(path: Path, lines: list[tuple[str, float, str, int]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEAD)
        writer.writeheader()
        writer.writerows({"name": name, "value": value, "unit": u, "ranks": n} for name, value, u, n in lines)


def test_what_was_measured_stands_beside_what_was_predicted(tmp_path: Path) -> None:
    twice = 2 * predict.peer_read_us(8, 128)
    write(
        tmp_path / "groups.csv",
        [
            ("peer_read: attach, median", 12.5, "ms", 8),
            ("peer_read, T=128: peer_read", 1.0, "us", 8),  # rank 0 alone
            ("peer_read, T=128: all ranks at once", twice, "us", 8),
            ("peer_read, T=128: all ranks at once", 7.0, "us", 2),
        ],
    )
    rows = read_rows(tmp_path / "groups.csv")
    lines = predict.beside(times_of(rows)).splitlines()
    (eight,) = [line for line in lines if line.startswith("| GPU memory, `peer_read` | 8 |")]
    assert "= 2.00" in eight
    assert eight.count("- / ") == len(TOKENS) - 1
    (two,) = [line for line in lines if line.startswith("| GPU memory, `peer_read` | 2 |")]
    assert f"7.0 / {shown(predict.PEER_READ_US[TOKENS.index(128)])}" in two
    printed = by_group(rows)
    assert "| peer_read: all ranks at once | 2 | 7.0 |" in printed
    assert "| peer_read: attach, median | 12.5 ms |" in printed


def test_only_what_the_model_was_not_given_can_prove_it() -> None:
    line = {128: 10.0}
    measured: Times = {arm: {2: line, 8: line} for arm, _ in predict.MODEL.values()}
    found = predict.proved(measured)
    assert set(found[predict.ALL_GATHER]) == {8}
    assert set(found[predict.SPLIT]) == {2, 8}
    lines = predict.beside(found, only_measured=True).splitlines()[2:]
    assert len(lines) == 3 * 1 + 2 * 2
    assert predict.proved({predict.ALL_GATHER: {2: line}, predict.PEER_READ_ALONE: {2: line}}) == {}


def test_a_table_that_is_given_as_the_documents_own_file_can_be_read() -> None:
    times = times_of(read_rows(predict.DOCS.parent / "measurements" / "groups.csv"))
    assert all(set(line) == set(TOKENS) for line in (sizes[2] for sizes in times.values()))
