"""Tokenizers of SentencePiece's kind agree with the library, and their answers arrive as whole characters."""

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers

from protocol.errors import ModelError
from router.detokenizer import Detokenizer
from router.tokenizer import TextTokenizer
from tests.router.small_tokenizer import SAMPLES, write_sentence_piece_dir


def make(legacy: bool) -> tuple[Library, TextTokenizer]:
    with tempfile.TemporaryDirectory() as path:
        return write_sentence_piece_dir(Path(path), legacy=legacy), TextTokenizer(Path(path))


BOTH = [make(False), make(True)]
LIBRARY, TOKENIZER = BOTH[0]
ID_OF: dict[str, int] = LIBRARY.get_vocab()
VOCAB_SIZE, BYTE_0 = len(ID_OF), ID_OF["<0x00>"]

texts = (
    st.text(alphabet=st.characters(codec="utf-8"), max_size=40)
    | st.text(alphabet="ab ▁ö日", max_size=40)
    | st.sampled_from(SAMPLES)
)


def pieces_of(token_ids: list[int], cuts: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """Returns the pieces that a client gets when the tokens come in steps with these edges."""
    detokenizer = Detokenizer(TOKENIZER, stop)
    edges = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    pieces = [detokenizer.push(token_ids[start:end])[0] for start, end in pairwise(edges)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("both", BOTH, ids=["metaspace", "legacy"])
@given(text=texts)
def test_prompts_are_those_of_the_library(both: tuple[Library, TextTokenizer], text: str) -> None:
    library, ours = both
    ids = ours.encode(text)
    assert ids.tolist() == library.encode(text).ids
    assert ours.least_tokens(text) <= len(ids)
    assert not text or ours.least_tokens(text) >= 1


@given(texts, st.lists(st.integers(0, 1000), max_size=12))
def test_an_answer_arrives_in_whole_characters_and_keeps_its_first_blank(text: str, cuts: list[int]) -> None:
    """The tokens after the first read as the rest of the text, so a prompt and its answer join to it exactly."""
    ids = TOKENIZER.encode("a" + text).tolist()
    first = TOKENIZER.decode(np.array(ids[:1], dtype=np.int32))
    pieces = pieces_of(ids[1:], cuts)
    if first.endswith("\ufffd"):
        return
    assert (first + "".join(pieces)).removeprefix(" ") == ("a" + text).replace("▁", " ")
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20), st.lists(st.integers(0, 1000), max_size=12))
def test_any_tokens_read_as_the_library_reads_them_after_others(ids: list[int], cuts: list[int]) -> None:
    marker = ID_OF["a"]
    text = "".join(pieces_of(ids, cuts))
    assert text == TOKENIZER.decode(np.array(ids, dtype=np.int32))
    expected = LIBRARY.decode([marker, *ids]).removeprefix("a")
    if "\ufffd" not in text and "\ufffd" not in expected:  # the library replaces a broken run of bytes as a whole
        assert text == expected


def test_a_character_is_held_until_its_last_byte() -> None:
    ids = [BYTE_0 + byte for byte in "日".encode()]
    assert pieces_of(ids, [1, 2]) == ["", "", "日", ""]
    assert pieces_of(ids[:2], [1]) == ["", "", "\ufffd"]
    assert "".join(pieces_of([*ids[:2], ID_OF["a"]], [1, 2])) == "\ufffda"


def test_stop_strings_across_byte_tokens() -> None:
    ids = [ID_OF["a"], *[BYTE_0 + byte for byte in "日本".encode()], ID_OF["b"]]
    detokenizer = Detokenizer(TOKENIZER, ("日本",))
    assert detokenizer.push(ids) == ("a", 7)
    assert detokenizer.stopped


def test_special_tokens_have_no_text_and_added_ones_their_own() -> None:
    ids = TOKENIZER.encode("<s>a<tool call></s>")
    assert TOKENIZER.decode(ids).strip() == "a<tool call>"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ],
    ids=str,
)
def test_other_decoders_of_the_kind(tmp_path: Path, decoder: Any) -> None:
    library = write_sentence_piece_dir(tmp_path)
    library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    ids = library.encode("a größer word").ids
    marker = ID_OF["a"]
    assert "a" + TextTokenizer(tmp_path).decode(np.array(ids, dtype=np.int32)) == library.decode([marker, *ids])


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Metaspace(replacement="_"),
        decoders.WordPiece(),
        decoders.ByteFallback(),
    ],
    ids=str,
)
def test_decoders_that_need_more_than_one_token_are_refused(tmp_path: Path, decoder: Any) -> None:
    library = write_sentence_piece_dir(tmp_path)
    library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"tokenizer\.json: decoder .* is not served"):
        TextTokenizer(tmp_path)


def test_no_least_number_is_named_where_text_may_vanish(tmp_path: Path) -> None:
    library = write_sentence_piece_dir(tmp_path, legacy=True)
    library.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", "▁")])
    library.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer(tmp_path).least_tokens(" " * 500) == 0
    source = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    source["normalizer"], source["model"]["byte_fallback"] = None, False
    (tmp_path / "tokenizer.json").write_text(json.dumps(source), encoding="utf-8")
    assert TextTokenizer(tmp_path).least_tokens("日" * 500) == 0, "unknown characters fuse into one token"


def test_unigram_models_are_of_the_kind_too(tmp_path: Path) -> None:
    library = Library(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("▁a", -1.5)], unk_id=0))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a aa")) == " a aa"
    assert tokenizer.least_tokens("a aa") == 0
