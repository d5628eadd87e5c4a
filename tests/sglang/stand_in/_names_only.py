"""Makes a package whose every submodule and every name can be imported, and none be called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn


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
        raise NotImplementedError("a stand-in was called: only its names exist")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(self._prefix):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _any_name


def _any_name(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing()


def names_only(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of the module `package`, whose submodules exist from now on."""
    sys.meta_path.append(_Submodules(package))
    return _any_name
