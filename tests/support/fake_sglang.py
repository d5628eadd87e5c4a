"""A package tree that looks like SGLang to the plugin, so that its refusals are tested where SGLang is not installed.

Only names, signatures and the order of calls are SGLang's; tests/sglang proves the same on the real one.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "version.py": '__version__ = "9.9.9"',
    "srt/environ.py": """
import os

class _Variable:
    def __init__(self, name, default, read):
        self.name, self.default, self.read = name, default, read
    def get(self):
        return self.read(os.environ[self.name]) if self.name in os.environ else self.default

def _yes(text):
    return text.lower() in ("1", "true")

class envs:
    SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE = _Variable("SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE", False, _yes)
    SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT = _Variable("SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT", "shared", str)
    SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS = _Variable("SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS", False, _yes)
    SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING = _Variable("SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING", False, _yes)
""",
    "srt/runtime_context.py": """
class _Parallel:
    tp_rank, tp_size, attn_dp_size, tp_group = 0, 1, 1, None

class _Arguments:
    pass

_parallel, _arguments = _Parallel(), _Arguments()

def get_parallel():
    return _parallel

def get_server_args():
    return _arguments
""",
    "srt/layers/dp_attention.py": """
def get_dp_global_num_tokens():
    return None
""",
    "srt/layers/engram.py": """
import torch
from torch import nn

class EngramEmbedding(nn.Module):
    def __init__(self, num_embeddings, dim, layer_id, column_bounds):
        super().__init__()
        self.own = True
    @property
    def shared_host_table_without_ats(self):
        return False
    def new_rows(self, indices):
        return torch.empty(*indices.shape, 256, dtype=torch.bfloat16)
    def forward(self, indices, forward_batch=None, *, cp_all_tokens=False):
        return self.new_rows(indices)
    def finish_load(self, label):
        self.finished = label

class Engram(nn.Module):
    def __init__(self, layer_id, bounds):
        super().__init__()
        self.embed = EngramEmbedding(bounds[-1], 256, layer_id, column_bounds=bounds)
    def embed_rows(self, hash_ids, forward_batch, cp_all_tokens):
        return self.embed(hash_ids, forward_batch, cp_all_tokens=cp_all_tokens)
""",
    "srt/configs/model_config.py": """
class ModelConfig:
    def __init__(self, hf_config):
        self.hf_config = hf_config
""",
    "srt/plugins/hook_registry.py": """
import enum, functools, pkgutil

class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"

def _wrap(original, hook, kind):
    if kind is HookType.AROUND:
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return hook(original, *args, **kwargs)
    else:
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            result = original(*args, **kwargs)
            changed = hook(result, *args, **kwargs)
            return result if changed is None else changed
    return wrapper

class HookRegistry:
    registered = []

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls.registered.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        for target, hook, kind in cls.registered:
            path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(path)
            setattr(owner, name, _wrap(getattr(owner, name), hook, kind))
""",
}


def write_tree(folder: Path, **changed: str | None) -> None:
    """Writes `sglang` into `folder`; `changed` replaces files (None leaves one out), named with __ for /."""
    files = dict(FILES)
    for name, text in changed.items():
        path = name.replace("__", "/") + ".py"
        if text is None:
            del files[path]
        else:
            files[path] = text
    for path, text in files.items():
        target = folder / "sglang" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        for parent in (target.parent, *target.parent.parents):
            if parent == folder:
                break
            (parent / "__init__.py").touch()
