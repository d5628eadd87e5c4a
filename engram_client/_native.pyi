from typing import Any

import numpy as np
import numpy.typing as npt

from engram_client._pure import AnyBuffer

def pack(values: AnyBuffer, scales: AnyBuffer, packed: AnyBuffer) -> None: ...
def unpack(packed: AnyBuffer, values: AnyBuffer, scales: AnyBuffer) -> None: ...
def dequantise(packed_rows: AnyBuffer, out: AnyBuffer) -> None: ...
def count_invalid(
    ids: npt.NDArray[np.signedinteger[Any]], table_rows: int, column_starts: AnyBuffer | None
) -> tuple[int, int, int]: ...
def gather(
    segment: AnyBuffer,
    packed: bool,
    row_start: int,
    row_stop: int,
    table_rows: int,
    column_starts: AnyBuffer | None,
    ids: npt.NDArray[np.signedinteger[Any]],
    out: AnyBuffer,
    raw: bool,
) -> tuple[int, int, int]: ...
def make(key: int, row_start: int, every_code: bool, values: AnyBuffer, scales: AnyBuffer) -> None: ...
