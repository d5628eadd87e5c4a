"""Stands in for torchvision, whose names SGLang's image models and transformers import and the Engram layer never uses.

PyPI's torchvision is built for CUDA and does not load beside a CPU build of torch.
"""

from __future__ import annotations

from _names_only import names_only

__path__: list[str] = []
__version__ = "0.0"
__getattr__ = names_only(__name__)
