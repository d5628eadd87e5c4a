"""Stands in for sgl_kernel, SGLang's compiled kernels, which it imports wherever there is a GPU.

They weigh half a gigabyte, and the Engram layer uses none: its kernels are Triton's, in SGLang's own wheel. Calling
one of these names raises.
"""

from __future__ import annotations

from _names_only import names_only

__path__: list[str] = []
__version__ = "0.0"
__getattr__ = names_only(__name__)
