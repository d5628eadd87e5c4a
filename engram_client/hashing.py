"""Token ids to row ids: the reference, in numpy.

Engines hash on the GPU; tools and tests hash here. Two steps. A token id becomes a compressed id, shared by
all tokens that read alike (case, accents and white space aside). Then each n-gram that ends at a position is
hashed once a head, and each hash picks a row of its own column.

Source: the published model code of DeepSeek's Engram layers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from engram_client.errors import (
    CompressedVocabularyInvalid,
    IdsDtypeInvalid,
    IdsShapeInvalid,
    TokenInvalid,
    UnknownLayer,
)
from engram_client.layout import ModelGeometry

Ids = npt.NDArray[np.int64]

_LAYER_SEED = 10007
# What Unicode calls White_Space. str.strip() without arguments would also take U+001C to U+001F.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_WHITE_SPACE += "\u2028\u2029\u202f\u205f\u3000"


def compress_vocabulary(
    decode: Callable[[int], str], raw_token: Callable[[int], str], vocab_size: int
) -> tuple[Ids, int]:
    """The compressed id of every token id, int64 [vocab_size], and how many compressed ids there are.

    `decode` gives the text of one token id alone, special tokens included; `raw_token` gives the token as the
    vocabulary spells it, used where the bytes are no text of their own (U+FFFD). Compressed ids count up in
    order of first appearance.
    """
    known: dict[str, int] = {}
    compressed = np.empty(vocab_size, np.int64)
    for token in range(vocab_size):
        text = decode(token)
        key = raw_token(token) if "\ufffd" in text else normalise(text) or text
        compressed[token] = known.setdefault(key, len(known))
    return compressed, len(known)


def normalise(text: str) -> str:
    """The form in which tokens are compared; empty for white space other than spaces, tabs and line ends."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # Every combining mark counts as an accent, the spacing ones of Indic scripts too. Letter by letter, because
    # str.lower() spells a sigma at the end of a word in another way.
    text = "".join(letter.lower() for letter in text if unicodedata.category(letter)[0] != "M")
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip(_WHITE_SPACE)


def multipliers(layer_id: int, max_ngram: int, compressed_vocab: int) -> Ids:
    """One odd multiplier for each look-back, int64 [max_ngram].

    Bounded so that a compressed id times a multiplier stays below 2^63.
    """
    bound = max(1, (2**63 - 1) // compressed_vocab // 2)
    return np.random.default_rng(_LAYER_SEED * layer_id).integers(0, bound, max_ngram, dtype=np.int64) * 2 + 1


class Hasher:
    """Row ids of one model. Holds no state between calls; safe to share between threads."""

    def __init__(self, model: ModelGeometry, compressed: npt.ArrayLike) -> None:
        """`compressed`: the compressed id of every token id, integers [vocab], as from `compress_vocabulary`.

        Raises CompressedVocabularyInvalid when it has another number of compressed ids than the model, or no
        padding token.
        """
        self._compressed = _check_compressed(model, np.asarray(compressed))
        self._pad = int(self._compressed[model.engram_pad_token_id])
        self._max_ngram, self._heads = model.engram_max_ngram_size, model.engram_n_heads
        self._layers = {
            table.layer_id: (
                multipliers(table.layer_id, self._max_ngram, model.engram_compressed_vocab_size),
                np.array(table.columns, np.int64),
                np.array(table.column_starts[:-1], np.int64),
            )
            for table in model.tables()
        }

    def row_ids(self, tokens: npt.ArrayLike, layer_id: int, image_mask: npt.ArrayLike | None = None) -> Ids:
        """The rows that each position of one sequence reads, int64 [T, columns], columns in table order.

        `tokens`: int32 or int64 [T], from the sequence's first token on. `image_mask`: bool [T], true where a
        token stands for an image; what its token id is does not matter. Raises UnknownLayer, IdsDtypeInvalid,
        IdsShapeInvalid or TokenInvalid.
        """
        if layer_id not in self._layers:
            raise UnknownLayer(layer_id=layer_id, served=list(self._layers))
        factors, primes, starts = self._layers[layer_id]
        look_backs = self._look_backs(np.asarray(tokens), image_mask)
        rolling = np.bitwise_xor.accumulate(look_backs * factors[:, None], axis=0)
        # row n - 1 of `rolling` has n terms: the n-gram of size n, and each of its heads, takes that row
        ngrams = np.repeat(rolling[1:], self._heads, axis=0).T
        return ngrams % primes + starts

    def _look_backs(self, tokens: npt.NDArray[Any], image_mask: npt.ArrayLike | None) -> Ids:
        """Compressed ids int64 [max_ngram, T]: row s has the token s places back, or the pad id where that is
        before the sequence, an image, or older than an image."""
        if tokens.ndim != 1:
            raise IdsShapeInvalid(found=str(list(tokens.shape)), expected="[tokens of one sequence]")
        if tokens.size and tokens.dtype not in (np.int32, np.int64):
            raise IdsDtypeInvalid(found=str(tokens.dtype))
        length = len(tokens)
        image = np.zeros(length, np.bool_) if image_mask is None else np.asarray(image_mask)
        if image.shape != tokens.shape or image.dtype != np.bool_:
            raise IdsShapeInvalid(found=f"{image.dtype} {list(image.shape)}", expected=f"an image_mask bool [{length}]")
        ids = np.where(image, 0, tokens).astype(np.int64)
        outside = np.flatnonzero((ids < 0) | (ids >= len(self._compressed)))
        if outside.size:
            first = int(outside[0])
            raise TokenInvalid(token=int(ids[first]), position=first, vocab_size=len(self._compressed))
        position = np.arange(length)
        newest_barrier = np.maximum.accumulate(np.where(image, position, -1))
        back = position - np.arange(self._max_ngram)[:, None]
        visible = back > newest_barrier
        return np.where(visible, self._compressed[ids[np.where(visible, back, 0)]], self._pad)


def _check_compressed(model: ModelGeometry, compressed: npt.NDArray[Any]) -> Ids:
    expected = f"compressed ids 0 to {model.engram_compressed_vocab_size - 1}"
    if compressed.ndim != 1 or not np.issubdtype(compressed.dtype, np.integer):
        found = f"is {compressed.dtype} {list(compressed.shape)}"
        raise CompressedVocabularyInvalid(found=found, expected=f"integers [vocab], {expected}")
    if not 0 <= model.engram_pad_token_id < len(compressed):
        found = f"has {len(compressed)} tokens and no padding token {model.engram_pad_token_id}"
        raise CompressedVocabularyInvalid(found=found, expected="a token id for it")
    low, high = int(compressed.min()), int(compressed.max())
    if low < 0 or high + 1 != model.engram_compressed_vocab_size:
        raise CompressedVocabularyInvalid(found=f"holds ids {low} to {high}", expected=expected)
    return compressed.astype(np.int64)
