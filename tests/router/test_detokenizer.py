"""Whatever the steps of an answer's tokens, its pieces hold whole characters and join to the text of all tokens."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenizer import Detokenizer
from router.tokenizer import NumberTokenizer, TextTokenizer, Tokenizer
from tests.router.small_tokenizer import SAMPLES, make_tokenizer

TOKENIZER: Tokenizer = make_tokenizer()
VOCAB_SIZE = len(TOKENIZER.token_bytes)

steps = st.lists(st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=6), max_size=20)
texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=60) | st.sampled_from(SAMPLES)


def cut(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(at % (len(token_ids) + 1) for at in cuts), len(token_ids)]
    return [token_ids[start:end] for start, end in pairwise(edges)]


def run(tokenizer: Tokenizer, chunks: list[list[int]], stop: tuple[str, ...] = ()) -> tuple[list[str], int, bool]:
    """Returns the pieces, how many tokens were kept, and whether a stop string ended the text."""
    detokenizer = Detokenizer(tokenizer, stop)
    pieces, num_kept = [], 0
    for chunk in chunks:
        text, kept = detokenizer.push(chunk)
        pieces.append(text)
        num_kept += kept
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.finish()], num_kept, detokenizer.stopped


@given(steps)
def test_any_tokens_in_any_steps_join_to_their_text(chunks: list[list[int]]) -> None:
    token_ids = [token_id for chunk in chunks for token_id in chunk]
    pieces, num_kept, stopped = run(TOKENIZER, chunks)
    assert "".join(pieces) == TOKENIZER.decode(np.array(token_ids, dtype=np.int32))
    assert (num_kept, stopped) == (len(token_ids), False)


@given(texts, st.lists(st.integers(0, 1000), max_size=12))
def test_text_arrives_in_whole_characters(text: str, cuts: list[int]) -> None:
    pieces, _, _ = run(TOKENIZER, cut(TOKENIZER.encode(text).tolist(), cuts))
    assert "".join(pieces) == text
    assert sum(piece.count("�") for piece in pieces) == text.count("�")


def test_one_byte_at_a_time() -> None:
    emoji = "👩🏽‍🚀"
    byte_of = {data: token_id for token_id, data in enumerate(TOKENIZER.token_bytes)}
    pieces, _, _ = run(TOKENIZER, [[byte_of[bytes([byte])]] for byte in emoji.encode()])
    assert [piece for piece in pieces if piece] == list(emoji)


def test_an_unfinished_character_is_held_and_replaced_at_the_end() -> None:
    byte_of = {data: token_id for token_id, data in enumerate(TOKENIZER.token_bytes)}
    pieces, _, _ = run(TOKENIZER, [[byte_of[b"a"], byte_of[b"\xe2"]], [byte_of[b"\x82"]]])
    assert pieces == ["a", "", "�"]


@given(
    st.text(alphabet="ab€", max_size=40),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=12),
)
def test_stop_strings_against_a_plain_search(text: str, stop: list[str], cuts: list[int]) -> None:
    chunks = cut(TOKENIZER.encode(text).tolist(), cuts)
    pieces, num_kept, stopped = run(TOKENIZER, chunks, tuple(stop))
    ends = [text.find(word) + len(word) for word in stop if word in text]
    assert stopped == bool(ends)
    if not ends:
        assert "".join(pieces) == text
        return
    end = min(ends)
    start = min(end - len(word) for word in stop if text[:end].endswith(word))
    assert "".join(pieces) == text[:start]
    token_ids = [token_id for chunk in chunks for token_id in chunk]
    kept = TOKENIZER.decode(np.array(token_ids[:num_kept], dtype=np.int32))
    before = TOKENIZER.decode(np.array(token_ids[: num_kept - 1], dtype=np.int32))
    assert len(kept) >= end > len(before.rstrip("�")), "the answer ends with the token that completes the stop string"


@given(st.text(alphabet="ab", max_size=40), st.text(alphabet="ab", min_size=1, max_size=5))
def test_only_what_may_become_a_stop_string_is_held(text: str, stop: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, (stop,))
    piece, _ = detokenizer.push(TOKENIZER.encode(text).tolist())
    if not detokenizer.stopped:
        held = text[len(piece) :]
        assert stop.startswith(held)
        assert not any(stop.startswith(text[start:]) for start in range(len(piece))), "no longer beginning was let go"


@pytest.mark.parametrize("count", [0, 3])
def test_numbers(count: int) -> None:
    tokenizer = NumberTokenizer(100)
    pieces, _, _ = run(tokenizer, [[7] * count])
    assert "".join(pieces) == "<7> " * count


def test_the_small_tokenizer_is_of_the_kind_that_is_served() -> None:
    assert isinstance(TOKENIZER, TextTokenizer)
    assert any(len(data) > 1 and data.decode("utf-8", "ignore").encode() != data for data in TOKENIZER.token_bytes), (
        "a token cuts a character"
    )


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
    st.booleans(),
)
def test_stop_strings_count_only_past_the_least_number_of_tokens(
    text: str, stop: list[str], min_tokens: int, include_stop: bool
) -> None:
    """Each token is one character. A stop string may begin before `min_tokens`, but must not be complete by then."""
    byte_of = {data: token_id for token_id, data in enumerate(TOKENIZER.token_bytes)}
    detokenizer = Detokenizer(TOKENIZER, tuple(stop), include_stop=include_stop, min_tokens=min_tokens)
    token_ids = [byte_of[character.encode()] for character in text]
    piece, num_kept = detokenizer.push(token_ids)
    ends = [end for end in range(min_tokens + 1, len(text) + 1) if any(text[:end].endswith(word) for word in stop)]
    if not ends:
        assert (piece + detokenizer.finish(), num_kept, detokenizer.stopped) == (text, len(text), False)
        return
    longest = max(len(word) for word in stop if text[: ends[0]].endswith(word))
    assert (piece, num_kept) == (text[: ends[0] if include_stop else ends[0] - longest], ends[0])
    assert detokenizer.stopped
