"""The real CUDA driver, for the tests of this folder that need no torch."""

from __future__ import annotations

import os

import pytest

from engram_client.cuda.access import DRIVER_VARIABLE, cuda_driver
from engram_client.cuda.driver import Driver
from engram_client.errors import EngramError


def real_driver() -> Driver:
    """Skips the module that asks while it is imported where there is none, or where the fake one is chosen."""
    if os.environ.get(DRIVER_VARIABLE):
        pytest.skip("needs the real driver", allow_module_level=True)
    try:
        return cuda_driver()
    except EngramError as error:
        pytest.skip(f"needs a CUDA GPU: {error}", allow_module_level=True)
