"""The geometry of the released DeepSeek-V4.1 tables: 768,022,850 rows, 188.83 GiB."""

from __future__ import annotations

from engram_client.layout import parse_model_geometry

CONFIG = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}
"""As config.json has it."""

RELEASED = parse_model_geometry(CONFIG, "released")
