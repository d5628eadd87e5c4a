"""A small table of random rows, batches of ids with odd ones among them, and what a lookup of them must return."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from engram_client.layout import TableGeometry
from engram_client.lookup.checks import Invalid
from tests.support.tables import random_table, reference_gather

GEOMETRY = TableGeometry(layer_id=1, columns=tuple(range(31, 31 + 24)))
ROWS = GEOMETRY.rows


def batch(tokens: int, seed: int) -> torch.Tensor:
    """Hashed ids `[tokens, 24]` with padding, zeros and ids that name no row of their column among them."""
    generator = np.random.default_rng(seed)
    ids = np.stack([generator.integers(low, high, tokens) for low, high in pairwise(GEOMETRY.column_starts)], axis=1)
    odd = generator.choice([0, -1, -(2**63), 1, ROWS - 1, ROWS, ROWS + 1, 2**62], ids.shape)
    return torch.from_numpy(np.where(generator.random(ids.shape) < 0.1, odd, ids))


def odd_shapes() -> list[tuple[torch.Tensor, bool]]:
    """Ids of unusual shapes, types and strides, and whether they are hashed."""
    ids = batch(12, seed=5)
    roomy = torch.full((12, 40), -1)
    roomy[:, 8:32] = ids
    return [
        (ids.view(3, 4, 24), True),
        (ids.int().clamp(-1), False),
        (roomy[:, 8:32], True),
        (roomy[::2, 8:32:3], False),
        (ids[0], True),  # one token without a dimension for it
        (ids[0, 0], False),
    ]


def stored_rows(ids: torch.Tensor, hashed: bool) -> tuple[np.ndarray, Invalid]:
    """The bytes of the rows, uint8 `[*ids.shape, 264]`, of the table `random_table(ROWS)`."""
    values, scales = random_table(ROWS)
    starts = list(GEOMETRY.column_starts) if hashed else None
    packed, offence = reference_gather(values, scales, ids.numpy(), (0, ROWS), starts)
    return packed, Invalid(*offence)
