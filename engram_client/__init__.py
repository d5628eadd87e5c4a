"""What a rank links: connect to the node's Engram table server, map its tables, look rows up in place.

    client = engram_client.connect("ipc:///run/engram/control.sock", rank=0, world_size=4)
    rows = client.table(1).lookup(ids)

Layering, tested in tests/unit/test_layering.py: this package never imports `engram_server`; importing it
does not import torch, and works on a machine without a GPU.
"""

from engram_client.api import Client, Table
from engram_client.client import connect
from engram_client.control import query_status
from engram_client.errors import EngramError

__all__ = ["Client", "EngramError", "Table", "connect", "query_status"]
