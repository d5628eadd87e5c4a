"""The GPUs of this node, asked from NVML: no CUDA context, no import on a machine without a driver."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def count() -> int:
    """How many GPUs the driver shows; 0 without a driver."""
    import pynvml  # costs 40 ms, so only when asked

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.debug("no GPU: %s", error)
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
