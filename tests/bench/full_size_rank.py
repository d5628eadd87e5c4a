"""A rank of full_size.py: `python -m tests.bench.full_size_rank ENDPOINT RANK DEVICE SEED GROUP`.

Says that it is ready with a CUDA context and the kernels at hand, and does one thing for each line that it reads:
attaches; stops looking up, which it does from then on; closes. It answers each with a line of JSON. With a GROUP
(file:// and where the ranks of a collective find each other) it attaches and closes, each time.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from engram_client import Client, connect
from engram_client.gpu import prepare
from engram_server import generate
from tests.support.reference import dequantise

BATCHES, RUNS, IDS = 20, 16, 64


class Looking(threading.Thread):
    """Runs of rows from all over each table, again and again, each batch compared with the rows that the seed names."""

    def __init__(self, client: Client, seed: int, device: str) -> None:
        super().__init__(name="looking")
        self.done = self.wrong = 0
        self._client, self._seed, self._device = client, seed, device
        self._ending = threading.Event()

    def end(self) -> dict[str, int]:
        self._ending.set()
        self.join()
        return {"lookups": self.done, "wrong_rows": self.wrong}

    def run(self) -> None:
        batches = [self._batch(layer) for layer in self._client.layers for _ in range(BATCHES)]
        while not self._ending.is_set():
            layer, ids, expected = batches[self.done % len(batches)]
            found = self._client.table(layer).lookup(ids)
            self.wrong += int((found.view(torch.int16) != expected).any(dim=-1).sum())
            self.done += 1

    def _batch(self, layer: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        starts = np.random.default_rng().integers(0, self._client.table(layer).rows - IDS, RUNS)
        ids = np.concatenate([np.arange(start, start + IDS) for start in starts.tolist()])
        rows = [dequantise(*generate.rows(layer, self._seed, start, IDS)) for start in starts.tolist()]
        expected = torch.from_numpy(np.concatenate(rows).view(np.int16))
        return layer, torch.from_numpy(ids).to(self._device), expected.to(self._device)


def main(endpoint: str, rank: int, device: str, seed: int, group: str) -> None:
    def answer(**report: Any) -> None:
        print(json.dumps(report), flush=True)
        sys.stdin.readline()

    torch.zeros(1, device=device)
    prepare(torch.device(device).index)
    if group:  # a collective wants it from the start
        torch.distributed.init_process_group("gloo", init_method=group, rank=rank, world_size=2)
    answer(ready=True)
    while group:  # until it is ended
        begin = time.perf_counter()
        with connect(endpoint, rank=rank, world_size=2, device=device):
            attach_s = time.perf_counter() - begin
        answer(attach_s=attach_s)
    begin = time.perf_counter()
    client = connect(endpoint, rank=rank, world_size=2, device=device)
    attach_s = time.perf_counter() - begin
    client.table(client.layers[0]).lookup(torch.arange(24, device=device))
    torch.cuda.synchronize()
    first_row_s = time.perf_counter() - begin
    looking = Looking(client, seed, device)
    looking.start()
    answer(attach_s=attach_s, first_row_s=first_row_s)
    answer(**looking.end())
    begin = time.perf_counter()
    client.close()
    print(json.dumps({"close_s": time.perf_counter() - begin}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
