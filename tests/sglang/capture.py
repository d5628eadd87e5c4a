"""Decode steps of the engine's Engram layers, captured and replayed by SGLang's own CUDA graph backend.

A step is what a captured model does with these layers: it hashes the last tokens with the requests' history, and
each layer looks up and gates. Tokens, positions and inputs live in buffers that are rewritten between replays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

HIDDEN_SHAPE = (4, 64)
"""Streams and hidden size of the engine of these tests."""
BATCH_SIZES = (32, 8, 1)
"""Largest first, as an engine captures them, so that they share the memory of one pool."""
CAPTURES = 2
REPLAYS = 6

Outputs = list[torch.Tensor]


class SGLangGraphs:
    """One graph a batch size, made and replayed as SGLang's decode runner does it."""

    def __init__(self) -> None:
        from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

        self._backend = FullCudaGraphBackend(SimpleNamespace(device_module=torch.cuda))

    @contextmanager
    def session(self) -> Iterator[None]:
        with get_parallel().tp_group.graph_capture() as context, self._backend.capture_session(context.stream):
            yield

    def capture(self, size: int, step: Callable[[], Outputs]) -> None:
        self._backend.capture_one(size, step)

    def replay(self, size: int) -> Outputs:
        outputs: Outputs = self._backend.replay(size, None)
        return outputs

    def drop(self) -> None:
        self._backend.cleanup()


class Decoding:
    """Buffers of the largest batch, and the steps over their first `size` requests."""

    def __init__(self, layers: Sequence[Any], hasher: Any, device: torch.device) -> None:
        size = BATCH_SIZES[0]
        self._layers = layers
        self._hasher = hasher
        hasher.init_history(size, device)
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._slots = torch.arange(size, device=device)
        self._cache_places = torch.arange(1, size + 1, device=device)
        self._inputs = torch.zeros(size, *HIDDEN_SHAPE, dtype=torch.bfloat16, device=device)

    def run(self, facts: dict[str, Any], graphs: Callable[[], Any] = SGLangGraphs) -> dict[str, np.ndarray]:
        """Captures all sizes, replays each with new tokens, drops the graphs, and does it all again.

        The arrays are what the replays returned. facts["captured"] counts them; facts["replays_unlike_eager"] names
        those that differ from the same step without a graph. Ends without a CUDA error left behind, or raises it.
        """
        arrays: dict[str, np.ndarray] = {}
        unlike: list[str] = []
        for round_ in range(CAPTURES):
            made = graphs()
            with made.session():
                for size in BATCH_SIZES:
                    made.capture(size, functools.partial(self.step, size))
            for number in range(REPLAYS):
                for size in BATCH_SIZES:
                    name = f"{round_}_{size}_{number}"
                    found = self._from(size, number, functools.partial(made.replay, size))
                    expected = self._from(size, number, functools.partial(self.step, size))
                    for index, (array, eager) in enumerate(zip(found, expected, strict=True)):
                        kind = "rows" if index % 2 == 0 else "out"
                        arrays[f"{kind}_replay_{name}_{index // 2}"] = array
                        if not np.array_equal(array, eager):
                            unlike.append(f"{kind}_{name}_{index // 2}")
            made.drop()
        facts["captured"] = CAPTURES * REPLAYS * len(BATCH_SIZES)
        facts["replays_unlike_eager"] = unlike
        return arrays

    def step(self, size: int) -> Outputs:
        """Rows and result of each layer; advances the hasher's history, as a decode step does."""
        tokens = self._tokens[:size]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            positions=self._positions[:size],
            req_pool_indices=self._slots[:size],
            engram_history=None,
            engram_staged_rows=None,
            out_cache_loc=self._cache_places[:size],
        )
        ids = self._hasher(tokens, batch)
        outputs: Outputs = []
        for layer in self._layers:
            mine = ids[:, layer.layer_hash_index]
            outputs.append(layer.embed(mine, batch))
            outputs.append(layer(self._inputs[:size], mine, batch, input_ids=tokens))
        return outputs

    def _from(self, size: int, number: int, step: Callable[[], Outputs]) -> list[np.ndarray]:
        """What `step` returns for the number's tokens and history, written into the buffers first."""
        generator = torch.Generator().manual_seed(1000 * size + number)
        count = len(self._tokens)
        self._tokens.copy_(torch.randint(0, 129_280, (count,), generator=generator))
        self._positions.copy_(torch.randint(0, 9, (count,), generator=generator))
        history = torch.randint(0, 129_280, self._hasher.history.shape, generator=generator)
        self._hasher.history.copy_(history)
        self._inputs.copy_(torch.randn(self._inputs.shape, generator=generator, dtype=torch.float32))
        return [each.view(torch.int16).cpu().numpy() for each in step()]
