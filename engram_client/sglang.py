"""The plugin `engram` of SGLang: its Engram layers read from the node's daemon instead of tables of their own.

SGLang finds it through the entry-point group `sglang.srt.plugins` and calls `plugin()` in every process. Without
ENGRAM_ENDPOINT nothing happens. With it three methods of one class are hooked through SGLang's own registry, and
nothing is connected before the model builds an embedding. docs/sglang.md says which names and why.

SGLang logs and drops what a plugin raises, and hooks on names that it does not have; it would then run on its
own tables unnoticed. So a failure waits in the class and is raised where the model builds it, which no one drops.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from engram_client.errors import IncompatibleSGLang

if TYPE_CHECKING:
    from engram_client.sglang_layer import Hook

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "ENGRAM_ENDPOINT"
REQUIRED_VARIABLE = "ENGRAM_REQUIRED"
SUPPORTED = "0.5.23"
"""Versions of SGLang that tests/sglang passed with. Others are served as long as the names below are theirs too."""

LAYER_MODULE = "sglang.srt.layers.engram"
EMBEDDING = "EngramEmbedding"
MODEL_CONFIG = "sglang.srt.configs.model_config.ModelConfig.__init__"

Parameters = tuple[tuple[str, str, bool], ...]
"""Name, kind and whether there is a default, of each parameter."""

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD.name
KEYWORD = inspect.Parameter.KEYWORD_ONLY.name

HOOKED: dict[str, Parameters] = {
    "__init__": tuple(
        (name, POSITIONAL, False) for name in ("self", "num_embeddings", "dim", "layer_id", "column_bounds")
    ),
    "forward": (
        ("self", POSITIONAL, False),
        ("indices", POSITIONAL, False),
        ("forward_batch", POSITIONAL, True),
        ("cp_all_tokens", KEYWORD, True),
    ),
    "finish_load": (("self", POSITIONAL, False), ("label", POSITIONAL, False)),
}
"""What is hooked, and the signatures that the hooks were written for."""

USED = (
    (LAYER_MODULE, f"{EMBEDDING}.new_rows"),
    (LAYER_MODULE, f"{EMBEDDING}.shared_host_table_without_ats"),
    (LAYER_MODULE, "Engram.embed_rows"),
    ("sglang.srt.runtime_context", "get_parallel"),
    ("sglang.srt.layers.dp_attention", "get_dp_global_num_tokens"),
)
"""What else the embedding that is built here relies on."""


def plugin() -> None:
    """SGLang's loader calls this, in every one of its processes. Connects to nothing."""
    if not os.environ.get(ENDPOINT_VARIABLE):
        return
    module, problem = find_layer()
    if problem is not None and not required():
        logger.warning("%s Running on SGLang's own tables, as %s=0 allows.", incompatible(problem), REQUIRED_VARIABLE)
    elif problem is not None:
        refuse(module, problem)
    else:
        install(getattr(module, EMBEDDING))


def find_layer() -> tuple[ModuleType | None, str | None]:
    """SGLang's module of Engram layers, and what keeps it from being hooked."""
    try:
        module = importlib.import_module(LAYER_MODULE)
        return module, problem_of(module)
    except ImportError as error:
        return None, f"{LAYER_MODULE} cannot be imported ({error})"


def required() -> bool:
    """Whether a model must not run on SGLang's own tables. Anything but a clear no means that it must not."""
    return os.environ.get(REQUIRED_VARIABLE, "1").strip().lower() not in ("0", "false", "no", "off")


def install(embedding: type) -> None:
    """Hooks the embedding through SGLang's registry, which applies hooks after the plugins have run.

    Should it fail to apply the hook on `__init__`, the guard that stands there meanwhile is what remains.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from engram_client import sglang_layer

    hooks: dict[str, Hook] = {
        "__init__": sglang_layer.build,
        "forward": sglang_layer.forward,
        "finish_load": sglang_layer.finish_load,
    }
    build_own = embedding.__init__  # type: ignore[misc]
    embedding.__init__ = _guard(build_own, "SGLang did not apply the plugin's hook on __init__")  # type: ignore[misc]
    for name, hook in hooks.items():
        around = _Around(hook, build_own if name == "__init__" else None)
        HookRegistry.register(f"{LAYER_MODULE}.{EMBEDDING}.{name}", around, HookType.AROUND)


def unhooked(embedding: type) -> list[str]:
    """Names of `HOOKED` that calls on this class would not bring here; asked when an embedding is built."""
    return [name for name in HOOKED if not _reaches_hook(getattr(embedding, name, None))]


def problem_of(module: ModuleType) -> str | None:
    """What keeps this SGLang from being hooked; None when every name and signature is the one expected."""
    embedding = getattr(module, EMBEDDING, None)
    if not isinstance(embedding, type):
        return f"{LAYER_MODULE} has no class {EMBEDDING}"
    for name, expected in HOOKED.items():
        method = getattr(embedding, name, None)
        found = parameters_of(method) if callable(method) else None
        if found != expected:
            return f"{EMBEDDING}.{name} takes {_spell(found)}, expected {_spell(expected)}"
    for where, path in USED:
        try:
            functools.reduce(getattr, path.split("."), importlib.import_module(where))
        except (ImportError, AttributeError):
            return f"{where} has no {path}"
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    if not callable(getattr(getattr(registry, "HookRegistry", None), "register", None)):
        return "sglang.srt.plugins.hook_registry has no HookRegistry.register"
    if not hasattr(getattr(registry, "HookType", None), "AROUND"):
        return "sglang.srt.plugins.hook_registry has no HookType.AROUND"
    return None


def parameters_of(function: Callable[..., Any]) -> Parameters:
    return tuple(
        (each.name, each.kind.name, each.default is not inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
    )


def refuse(module: ModuleType | None, problem: str) -> None:
    """Makes the first thing that a V4.1 model needs raise IncompatibleSGLang: its embedding, else its layer,
    else its configuration. Raises it here when there is none of them."""
    for name in (EMBEDDING, "Engram"):
        found = getattr(module, name, None)
        if isinstance(found, type):
            found.__init__ = _guard(found.__init__, problem)  # type: ignore[misc]
            return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def refuse_engram(result: object, config: Any, *arguments: object, **options: object) -> None:
            inner = getattr(config, "hf_config", None)
            for keys in (inner, getattr(inner, "text_config", None)):
                if getattr(keys, "engram_layer_ids", ()):
                    raise incompatible(problem)

        HookRegistry.register(MODEL_CONFIG, refuse_engram, HookType.AFTER)
    except (ImportError, AttributeError, TypeError) as error:
        raise incompatible(problem) from error


def incompatible(problem: str) -> IncompatibleSGLang:
    return IncompatibleSGLang(found=version(), supported=SUPPORTED, problem=problem)


def version() -> str:
    try:
        from sglang.version import __version__
    except ImportError:
        return "of unknown version"
    return str(__version__)


class _Around:
    """An AROUND hook. `original` takes the place of what the registry would pass on, where that is the guard."""

    def __init__(self, hook: Hook, original: Callable[..., Any] | None) -> None:
        self._hook = hook
        self._original = original

    def __call__(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._hook(self._original or original, *arguments, **options)


def _reaches_hook(method: Any) -> bool:
    """Whether `method`, or what it wraps, is the registry's wrapper around one of our hooks."""
    while method is not None:
        if any(isinstance(cell.cell_contents, _Around) for cell in getattr(method, "__closure__", None) or ()):
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _guard(original: Callable[..., Any], problem: str) -> Callable[..., NoReturn]:
    @functools.wraps(original)
    def refuse_to_build(*arguments: object, **options: object) -> NoReturn:
        raise incompatible(problem)

    return refuse_to_build


def _spell(parameters: Parameters | None) -> str:
    if parameters is None:
        return "nothing (it is not there)"
    return f"({', '.join(f'{name}=' if default else name for name, _, default in parameters)})"


def main() -> int:
    """`python -m engram_client.sglang`: what an engine in this environment would find. Exit code 0 if it would run."""
    from engram_client import sglang_check

    try:
        for finding in sglang_check.findings():
            sys.stdout.write(f"{finding}\n")
    except sglang_check.Problem as problem:
        sys.stdout.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
