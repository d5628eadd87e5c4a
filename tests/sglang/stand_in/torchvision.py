"""Stands in for torchvision, whose names SGLang's image models and transformers import and the Engram layer never uses.

PyPI's torchvision is built for CUDA and does not load beside a CPU build of torch. Every submodule and every
name can be imported; none can be called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

__path__: list[str] = []
__version__ = "0.0"


class _Missing:
    """Any attribute of anything: hashable, and may stand in a type expression."""

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __or__(self, other: object) -> _Missing:
        return self

    __ror__ = __or__

    def __call__(self, *arguments: object, **options: object) -> NoReturn:
        raise NotImplementedError("torchvision is a stand-in here: only its names exist")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = __getattr__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing()


sys.meta_path.append(_Submodules())
