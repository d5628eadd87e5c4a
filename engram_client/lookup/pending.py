"""A lookup that was started and not waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class PendingRows:
    """See `engram_client.api.Pending`."""

    def __init__(self, finish: Callable[[], Tensor], what: str) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._rows: Tensor | None = None
        self._what = what

    def __repr__(self) -> str:
        return f"<prefetch of {self._what}, {'under way' if self._rows is None else 'done'}>"

    def wait(self) -> Tensor:
        if torch.compiler.is_compiling():
            from engram_client.lookup.uncompiled import eagerly

            found: Tensor = eagerly(self.wait)
            return found
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._rows = finish()
        if self._rows is None:
            raise RuntimeError(f"{self!r}: its wait() failed before")
        return self._rows
