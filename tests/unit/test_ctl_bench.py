"""What `engram-ctl bench` prints can be read on a terminal of 80 columns."""

from __future__ import annotations

import pytest

from engram_server.bench import Measurement
from engram_server.ctl_bench import _show


def measured(device: str, tokens: int, us: float) -> Measurement:
    return Measurement(
        device=device,
        layer=14,
        ids="hashed",
        placement="gpu",
        replication="none",
        lookup="collective",
        ranks=8,
        tokens=tokens,
        rows=24 * tokens,
        repetitions=15,
        median_us=us,
        best_us=us,
        worst_us=us,
        rows_per_second=4.1e9,
        bytes_per_second=1082.4e9,
    )


def test_no_number_is_cut_off_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _show([measured("cuda:7", 1, 8.8), measured("cuda:7", 8192, 12_345.6), measured("cpu", 16, 57.0)])
    printed = capsys.readouterr().out
    assert "…" not in printed
    for number in ("8,192", "12,345.6", "4,100.0", "1082.40", "57.0"):
        assert number in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.count("median") == 2, "a table for each device"
