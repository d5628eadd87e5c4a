"""The owner of the tables: `engram-server` loads them once and hands out read-only handles.

Layering, tested in tests/unit/test_layering.py: this package imports `engram_client`'s vocabulary (layout,
identity, protocol, errors), never the other way round, and never torch.
"""
