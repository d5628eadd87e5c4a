"""The C extension; everything else is in pyproject.toml."""

import sysconfig

from setuptools import Extension, setup

# One build serves every Python from 3.11 on. Builds without a GIL have no stable ABI.
stable_abi = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "engram_client._native",
            sources=["engram_client/_native.c"],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra"],
            py_limited_api=stable_abi,
            # Without a compiler the package installs all the same and uses engram_client/_pure.py.
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable_abi else {},
)
