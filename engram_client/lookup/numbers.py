"""Tables and clients by number: torch's operators take tensors and plain values. Imports nothing of torch."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from engram_client.errors import ClientClosed

_numbers = itertools.count()
_registered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(one: Any) -> int:
    """A number for `one` (a MappedTable or a MappedClient), for as long as it lives."""
    number = next(_numbers)
    _registered[number] = one
    return number


def registered(number: int) -> Any:
    """Raises ClientClosed when it is gone."""
    found = _registered.get(number)
    if found is None:
        raise ClientClosed(what="a table in compiled code")
    return found
