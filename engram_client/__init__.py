"""What a rank links: connect to the node's Engram table server, map its tables, look rows up in place.

Layering, tested in tests/unit/test_layering.py: this package never imports `engram_server`; importing it
does not import torch, and works on a machine without a GPU.
"""
