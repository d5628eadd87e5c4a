"""Behind `python -m engram_client.sglang`: what an engine in this environment would find, a line for each thing.

Ends at the first that would keep an engine from the daemon's tables. Attaches to nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from importlib.metadata import entry_points

from engram_client import sglang as plugin
from engram_client.control import query_status
from engram_client.cuda.access import cuda_driver
from engram_client.errors import CudaError, CudaUnavailable, EngramError, NoDriver
from engram_client.lookup import nvrtc

GROUP, NAME = "sglang.srt.plugins", "engram"
PLUGINS_VARIABLE = "SGLANG_PLUGINS"


class Problem(Exception):
    """What keeps an engine from the daemon's tables."""


def findings() -> Iterator[str]:
    """Raises Problem after those that came before it."""
    for check in (hooks, loader, daemon, gpus):
        yield check()


def hooks() -> str:
    _, problem = plugin.find_layer()
    if problem is not None:
        raise Problem(str(plugin.incompatible(problem)))
    return f"SGLang {plugin.version()}: {plugin.EMBEDDING} can be hooked ({', '.join(plugin.HOOKED)})"


def loader() -> str:
    """Whether SGLang's own loader would come by the plugin."""
    allowed = os.environ.get(PLUGINS_VARIABLE, "")
    if allowed and NAME not in [name.strip() for name in allowed.split(",")]:
        raise Problem(f"{PLUGINS_VARIABLE}={allowed} keeps SGLang from loading the plugin: add {NAME}, or unset it")
    if not any(each.name == NAME for each in entry_points(group=GROUP)):
        raise Problem("SGLang will not find the plugin: engram-table-server is not installed here, only importable")
    return f"SGLang finds the plugin {NAME}"


def daemon() -> str:
    endpoint = os.environ.get(plugin.ENDPOINT_VARIABLE)
    if not endpoint:
        raise Problem(f"{plugin.ENDPOINT_VARIABLE} is not set: the plugin changes nothing")
    try:
        status = query_status(endpoint, timeout=0, handover=os.environ.get("ENGRAM_HANDOVER") or None)
    except EngramError as error:
        raise Problem(f"{endpoint}: {error}") from error
    layers = ", ".join(str(table.geometry.layer_id) for table in status.tables)
    return f"{endpoint}: the daemon is {status.state}, layers {layers or 'not known yet'}"


def gpus() -> str:
    """Whether the kernels of the GPUs here can be had; they are compiled, if they have not been, and kept."""
    if not os.environ.get("ENGRAM_CUDA_DRIVER") and not _has_driver():
        return "no CUDA driver: lookups run on the CPU"
    try:
        driver = cuda_driver()
        ordinals = range(driver.device_count())
        parts = ("MAJOR", "MINOR")
        archs = {"sm_" + "".join(str(driver.attribute(k, f"COMPUTE_CAPABILITY_{p}")) for p in parts) for k in ordinals}
        for arch in sorted(archs):
            nvrtc.cubin(arch)
    except NoDriver as error:
        return f"no GPU ({error}): lookups run on the CPU"
    except CudaUnavailable as error:
        raise Problem(f"lookups on the GPUs here are not possible: {error}") from error
    except CudaError as error:
        raise Problem(f"lookups on the GPUs here fail: {error}") from error
    if not archs:
        return "no GPU to be seen: lookups run on the CPU"
    return f"{len(ordinals)} GPUs: the kernels for {', '.join(sorted(archs))} are there"


def _has_driver() -> bool:
    """Without the bindings, which an environment for CPUs need not have."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
