"""Which driver this process has: the real one, or the one that a test names.

ENGRAM_CUDA_DRIVER=module:object puts a test's driver in the place of the real one, in the daemon, its loader
and the ranks alike; `object` is called without arguments and returns a `Driver`.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Final

from engram_client.cuda.driver import Driver
from engram_client.errors import CudaUnavailable

DRIVER_VARIABLE: Final = "ENGRAM_CUDA_DRIVER"

_lock = threading.Lock()
_driver: Driver | None = None


def cuda_driver() -> Driver:
    """The driver, initialised at the first call and the same one afterwards.

    Raises NoDriver, CudaUnavailable or CudaCallFailed; a failure is not remembered.
    """
    global _driver
    with _lock:
        if _driver is None:
            _driver = _make(os.environ.get(DRIVER_VARIABLE))
        return _driver


def _make(named: str | None) -> Driver:
    if not named:
        from engram_client.cuda.real import RealDriver  # brings cuda.bindings

        return RealDriver()
    module, _, name = named.partition(":")
    try:
        driver: Driver = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise CudaUnavailable(
            problem=f"{DRIVER_VARIABLE}={named} names no driver ({error})", remedy="unset it outside of tests"
        ) from error
    return driver
