"""One rank that asks its tables in every way there is and compares each answer with the checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from engram_client.api import Client
from engram_client.errors import InvalidIds
from engram_client.layout import TableGeometry
from tests.support.reference import CheckpointReference

TOKENS = 5


def starts_of(columns: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.array(TableGeometry(layer_id=0, columns=columns).column_starts)


def hashed_ids(columns: tuple[int, ...], tokens: int, seed: int) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    ids = np.stack([generator.integers(low, high, tokens) for low, high in pairwise(starts_of(columns))], axis=1)
    if tokens > 2:
        ids[0] = 0  # an idle slot
        ids[1, 3], ids[2, 5] = -1, -(2**62)
    return torch.from_numpy(ids)


class Asking:
    """`device` is where ids and rows live; `settle` waits for it."""

    def __init__(
        self, client: Client, reference: CheckpointReference, device: torch.device, settle: Callable[[], None]
    ) -> None:
        self.client, self.reference, self.device, self.settle = client, reference, device, settle
        self.compared = 0

    def same(self, rows: torch.Tensor, layer: int, ids: torch.Tensor, hashed: bool = False) -> None:
        batch = ids.cpu().numpy()
        expected = self.reference.rows(layer, batch).view(np.int16)
        if hashed:
            starts = starts_of(self.client.table(layer).columns)
            inside = (batch >= starts[:-1]) & (batch < starts[1:])
            expected = np.where(inside[..., None], expected, 0)
        np.testing.assert_array_equal(rows.view(torch.int16).cpu().numpy(), expected)
        self.compared += batch.size

    def raw_is(self, found: Any, layer: int, ids: torch.Tensor) -> None:
        batch = ids.cpu().numpy()
        values, scales = self.reference.raw(layer, np.maximum(batch, 0))
        good = (batch >= 0)[..., None]
        np.testing.assert_array_equal(found.values.cpu().numpy(), np.where(good, values.reshape(*ids.shape, 256), 0))
        np.testing.assert_array_equal(found.scales.cpu().numpy(), np.where(good, scales.reshape(*ids.shape, 8), 0))

    def everything(self) -> int:
        """The number of rows compared."""
        for layer in self.client.layers:
            table = self.client.table(layer)
            hashed = hashed_ids(table.columns, TOKENS, seed=layer).to(self.device)
            plain = torch.from_numpy(np.random.default_rng(layer).integers(-1, table.rows, (TOKENS, 24)))
            plain = plain.to(self.device)
            self.same_tokens(layer, hashed, True)
            self.same_tokens(layer, plain, False)
            self.own_tokens(layer, hashed, True)
            self.own_tokens(layer, plain, False)
            self.odd_shapes(layer, plain)
            self.stored(layer, plain)
            self.invalid(layer, hashed)
        self.all_layers()
        return self.compared

    def same_tokens(self, layer: int, ids: torch.Tensor, hashed: bool) -> None:
        table = self.client.table(layer)
        out = torch.full((*ids.shape, 256), 5.0, dtype=torch.bfloat16, device=self.device)
        self.same(table.lookup(ids, hashed=hashed), layer, ids, hashed)
        for _ in range(2):
            assert table.lookup(ids, out, hashed=hashed) is out
            self.same(out, layer, ids, hashed)
            out.fill_(7)
        self.same(table.lookup(ids.int(), hashed=hashed), layer, ids.int().long(), hashed)
        strided = torch.stack([ids, ids.flip(0), ids], dim=1)
        for at in range(2):
            self.same(table.lookup(strided[:, at], out, hashed=hashed), layer, strided[:, at], hashed)
        self.same(table.lookup(strided, hashed=hashed), layer, strided, hashed)
        pending = table.prefetch(ids, hashed=hashed)
        self.same(pending.wait(), layer, ids, hashed)
        assert pending.wait() is pending.wait()

    def own_tokens(self, layer: int, ids: torch.Tensor, hashed: bool) -> None:
        """Ranks 0, 3, ... have no tokens."""
        table, how = self.client.table(layer), {"hashed": hashed, "tokens": "own"}
        own = ids[: self.client.rank % 3]
        counts = [rank % 3 for rank in range(self.client.world_size)]
        for given in (counts, None):
            self.same(table.lookup(own, counts=given, **how), layer, own, hashed)  # type: ignore[call-overload]
        self.same(table.prefetch(own, counts=counts, **how).wait(), layer, own, hashed)  # type: ignore[arg-type]

    def odd_shapes(self, layer: int, ids: torch.Tensor) -> None:
        table = self.client.table(layer)
        for odd in (
            ids.reshape(-1)[:7],
            ids.reshape(-1)[::3],
            ids[0, 0],
            ids.view(TOKENS, 12, 2),
            ids.view(TOKENS, 12, 2).transpose(0, 1),  # which is copied on its way
            ids[:, :2],
            ids.t(),
            ids[:1].expand(4, 24),
            ids[:0],
            ids.view(TOKENS, 2, 12)[:, :0],
        ):
            self.same(table.lookup(odd), layer, odd)

    def stored(self, layer: int, ids: torch.Tensor) -> None:
        table = self.client.table(layer)
        self.raw_is(table.lookup(ids, raw=True), layer, ids)
        given = tuple(torch.empty(*ids.shape, width, dtype=torch.uint8, device=self.device) for width in (256, 8))
        found = table.lookup(ids, (given[0], given[1]), raw=True)
        assert found.values is given[0]
        assert found.scales is given[1]
        self.raw_is(found, layer, ids)

    def invalid(self, layer: int, ids: torch.Tensor) -> None:
        table = self.client.table(layer)
        self.settle()
        assert table.invalid_ids == 0
        self.client.check()
        bad = ids.clone()
        bad[1, 0], bad[2, 1], bad[3, 23], bad[0, 2] = table.rows, 2**62, table.columns[0], 0
        self.same(table.lookup(bad, hashed=True), layer, bad, True)
        self.settle()
        assert table.invalid_ids == 3
        with pytest.raises(InvalidIds) as caught:
            self.client.check()
        assert (caught.value.layer_id, caught.value.count) == (layer, 3)
        assert bad.view(-1)[caught.value.position].item() == caught.value.first
        self.client.check()
        self.same(table.lookup(ids, hashed=True), layer, ids, True)

    def all_layers(self) -> None:
        layers = self.client.layers
        columns = [self.client.table(layer).columns for layer in layers]
        both = torch.stack([hashed_ids(each, TOKENS, seed=9) for each in columns], dim=1).to(self.device)
        for hashed in (True, False):
            rows = self.client.lookup_all(both, hashed=hashed)
            assert rows.shape == (TOKENS, len(layers), 24, 256)
            for index, layer in enumerate(layers):
                assert rows[:, index].is_contiguous()
                self.same(rows[:, index], layer, both[:, index], hashed)
