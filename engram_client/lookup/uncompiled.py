"""For what torch.compile must leave to Python. Imported by code under compilation only: it brings torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


eagerly: Callable[..., Any] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _call, reason="a prefetch leaves its rows in a buffer that the compiler does not know of"
)
"""Calls `function` where the graph is broken. A compiler that moved a prefetch past a use of the table's buffer would
make wrong rows; nothing in an operator's signature would tell it."""
