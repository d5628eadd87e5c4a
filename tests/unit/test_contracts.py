"""The real classes have exactly the signatures that `engram_client.api` promises."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from engram_client import api, connect
from engram_client.client import MappedClient
from engram_client.lookup.pending import PendingRows
from engram_client.table import MappedTable

PAIRS = [(api.Client, MappedClient), (api.Table, MappedTable), (api.Pending, PendingRows)]
REAL_NAMES = {"Table": MappedTable.__name__, "Pending": PendingRows.__name__}
PROMISES = [
    (promise, real, name)
    for promise, real in PAIRS
    for name, member in vars(promise).items()
    if (not name.startswith("_") or name in ("__enter__", "__exit__"))
    and (callable(member) or isinstance(member, property))
]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each; a promise may leave a default open with `...`."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_there_is_something_to_compare() -> None:
    assert {name for _, _, name in PROMISES} >= {"lookup", "table", "close", "rank", "identity", "__enter__"}


@pytest.mark.parametrize(("promise", "real", "name"), PROMISES)
def test_a_promised_member_exists_with_its_signature(promise: type, real: type, name: str) -> None:
    promised, actual = vars(promise)[name], inspect.getattr_static(real, name)
    assert isinstance(actual, property) == isinstance(promised, property)
    if isinstance(promised, property):
        promised, actual = promised.fget, actual.fget
    assert parameters(actual) == parameters(promised)
    promised_type = inspect.signature(promised).return_annotation
    assert inspect.signature(actual).return_annotation in (promised_type, REAL_NAMES.get(promised_type))


def test_connect_has_the_promised_signature() -> None:
    promised = parameters(api.Connect.__call__)[1:]
    actual = parameters(connect)
    assert [p[:2] for p in actual] == [p[:2] for p in promised]
    for (name, _, given), (_, _, open_or_same) in zip(actual, promised, strict=True):
        assert open_or_same is ... or given == open_or_same, name
