"""The C extensions; everything else is in pyproject.toml."""

import sysconfig

from setuptools import Extension, setup

# One build serves every Python from 3.11 on. Builds without a GIL have no stable ABI.
stable_abi = not sysconfig.get_config_var("Py_GIL_DISABLED")


def extension(name: str) -> Extension:
    return Extension(
        name,
        sources=[name.replace(".", "/") + ".c"],
        extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra"],
        py_limited_api=stable_abi,
        # Without a compiler the package installs all the same and does the same in Python: engram_client/_pure.py,
        # engram_server/device_fill.py.
        optional=True,
    )


setup(
    ext_modules=[extension("engram_client._native"), extension("engram_server._pump")],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable_abi else {},
)
