"""The independent reference: rows straight from a checkpoint's files, decoded by other people's code.

`safetensors` finds the bytes and `ml_dtypes` decodes them; nothing of this project is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def dequantise(values: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[Any]:
    """bfloat16 `[n, 256]` of FP8 `[n, 256]` and E8M0 `[n, 8]` codes, by the project's value rule."""
    fp8 = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factor = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    exact = fp8 * np.repeat(factor, 32, axis=1)
    # Four significant bits at most, so float32 holds every product exactly, or as infinity.
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    bits = rounded.view(np.uint16).copy()
    bits[np.isnan(exact)] = 0x7FC0
    bits[bits == 0x8000] = 0
    return bits.view(ml_dtypes.bfloat16)


class CheckpointReference:
    """A checkpoint folder read the slow way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self._open: dict[str, NDArray[np.uint8]] = {}

    def tensor(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as uint8 `[rows, width]`, mapped, not read."""
        if name not in self._open:
            path = self._folder / self._index[name]
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                entry = json.loads(file.read(header_bytes))[name]
            self._open[name] = np.memmap(
                path, np.uint8, "r", 8 + header_bytes + entry["data_offsets"][0], tuple(entry["shape"])
            )
        return self._open[name]

    def raw(self, layer: int, ids: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        name = f"layers.{layer}.engram.embed"
        flat = ids.reshape(-1)
        return np.asarray(self.tensor(f"{name}.weight")[flat]), np.asarray(self.tensor(f"{name}.scale")[flat])

    def rows(self, layer: int, ids: NDArray[Any]) -> NDArray[Any]:
        """bfloat16 `[*ids.shape, 256]`; negative ids and ids past the end give zero rows."""
        count = len(self.tensor(f"layers.{layer}.engram.embed.weight"))
        valid = (ids >= 0) & (ids < count)
        rows = dequantise(*self.raw(layer, np.where(valid, ids, 0))).reshape(*ids.shape, 256).copy()
        rows.view(np.uint16)[~valid] = 0
        return rows
