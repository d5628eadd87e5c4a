from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

def pack(values: Buffer, scales: Buffer, packed: Buffer) -> None: ...
def unpack(packed: Buffer, values: Buffer, scales: Buffer) -> None: ...
def dequantise(packed_rows: Buffer, out: Buffer) -> None: ...
def count_invalid(
    ids: npt.NDArray[np.signedinteger[Any]], table_rows: int, column_starts: Buffer | None
) -> tuple[int, int, int]: ...
def gather(
    segment: Buffer,
    packed: bool,
    row_start: int,
    row_stop: int,
    table_rows: int,
    column_starts: Buffer | None,
    ids: npt.NDArray[np.signedinteger[Any]],
    out: Buffer,
    raw: bool,
) -> tuple[int, int, int]: ...
