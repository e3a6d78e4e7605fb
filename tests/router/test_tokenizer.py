"""Byte-level tokenizers agree with the library; chat templates are rendered; numbers stand in for missing text."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from protocol.arrays import Int32
from protocol.errors import InvalidRequest, ModelError
from router.tokenizer import NumberTokenizer, TextTokenizer, Tokenizer, load_tokenizer
from tests.router.small_tokenizer import CHAT_TEMPLATE, SAMPLES, make_tokenizer, write_model_dir

SMALL = make_tokenizer()


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> Int32:
    return tokenizer.encode_chat(tokenizer.render(messages))


@pytest.mark.parametrize("text", ["", *SAMPLES, "<tool call> größer <|other|>"])
def test_text_survives(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text)) == text


def test_special_and_unknown_tokens_have_no_text() -> None:
    ids = SMALL.encode("a<|end|>b")
    assert len(ids) == 3
    assert SMALL.decode(ids) == "ab"
    assert SMALL.decode(np.array([-1, 10_000], dtype=np.int32)) == ""


def test_ids_agree_with_the_library(tmp_path: Path) -> None:
    library = write_model_dir(tmp_path)
    ours = load_tokenizer(tmp_path, 0)
    added = set(library.get_added_tokens_decoder())

    @given(
        st.lists(
            st.integers(0, library.get_vocab_size() - 1).filter(lambda token_id: token_id not in added), max_size=20
        )
    )
    def agrees(ids: list[int]) -> None:
        assert ours.decode(np.array(ids, dtype=np.int32)) == library.decode(ids)

    agrees()
    for text in SAMPLES:
        assert ours.encode(text).tolist() == library.encode(text).ids
        assert ours.encode(text).dtype == np.int32


def test_a_truncating_tokenizer_file_does_not_truncate_prompts(tmp_path: Path) -> None:
    library = write_model_dir(tmp_path)
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, 0).encode(SAMPLES[0]).tolist() == SMALL.encode(SAMPLES[0]).tolist()


def test_chat_template_from_either_file(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "größer?"}]
    expected = "<|start|>system\nBe brief.<|end|>\n<|start|>user\ngrößer?<|end|>\n<|start|>assistant\n"
    assert SMALL.has_chat_template
    assert chat_ids(SMALL, messages).tolist() == SMALL.encode(expected).tolist()

    write_model_dir(tmp_path, chat_template=None)
    assert not load_tokenizer(tmp_path, 0).has_chat_template
    with pytest.raises(InvalidRequest, match="chat template"):
        chat_ids(load_tokenizer(tmp_path, 0), messages)

    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    assert chat_ids(load_tokenizer(tmp_path, 0), messages).tolist() == SMALL.encode(expected).tolist()


def test_what_a_template_refuses_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="unknown role robot"):
        chat_ids(SMALL, [{"role": "robot", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ missing.attribute }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_templates_are_contained(tmp_path: Path, template: str) -> None:
    write_model_dir(tmp_path, chat_template=template)
    with pytest.raises(InvalidRequest, match="chat"):
        chat_ids(load_tokenizer(tmp_path, 0), [{"role": "user", "content": "x"}])


def test_damaged_model_directories(tmp_path: Path) -> None:
    write_model_dir(tmp_path, chat_template="{% if %}")
    with pytest.raises(ModelError, match="chat template"):
        load_tokenizer(tmp_path, 0)
    write_model_dir(tmp_path)
    source = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for damage in (
        "{",
        "{}",
        "[]",
        json.dumps({**source, "decoder": {"type": "Metaspace"}}),
        json.dumps({**source, "decoder": None}),
    ):
        (tmp_path / "tokenizer.json").write_text(damage, encoding="utf-8")
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            TextTokenizer(tmp_path)


def test_numbers_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    for path in (None, tmp_path):
        tokenizer = load_tokenizer(path, 20)
        assert isinstance(tokenizer, NumberTokenizer)
        ids = np.array([17, 0, 3], dtype=np.int32)
        assert tokenizer.decode(ids) == "<17> <0> <3> "
        assert tokenizer.encode("<17> <0> <3> ").tolist() == tokenizer.encode(" <17><0>\n<3>").tolist() == [17, 0, 3]
        assert tokenizer.encode("").tolist() == []
        assert chat_ids(
            tokenizer, [{"role": "user", "content": "<1>"}, {"role": "user", "content": "<2>"}]
        ).tolist() == [1, 2]
        for text in ("hello", "<1", "<1> x", "<-1>", "<12345678901>"):
            with pytest.raises(InvalidRequest):
                tokenizer.encode(text)


@given(st.text(max_size=60) | st.sampled_from(["<|start|>" * 9, "größer" * 9, "\x00\x04" * 9]))
def test_the_least_number_of_tokens_is_no_more_than_there_are(text: str) -> None:
    assert SMALL.least_tokens(text) <= len(SMALL.encode(text))
    assert SMALL.least_tokens(text) >= len(text.encode()) / 30


def test_no_least_number_is_named_where_tokens_swallow_text(tmp_path: Path) -> None:
    text = " " * 500 + "<mask>"
    library = write_model_dir(tmp_path)
    library.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    swallowing = TextTokenizer(tmp_path)
    assert (len(swallowing.encode(text)), swallowing.least_tokens(text)) == (1, 0)
    library = write_model_dir(tmp_path)
    library.normalizer = normalizers.Strip()
    library.save(str(tmp_path / "tokenizer.json"))
    stripping = TextTokenizer(tmp_path)
    assert (len(stripping.encode(" " * 500)), stripping.least_tokens(" " * 500)) == (0, 0)
    assert NumberTokenizer(20).least_tokens("<17> <18>" + " " * 500) == 2


def test_bytes_that_no_token_stands_for_count_for_nothing(tmp_path: Path) -> None:
    library = Library(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    assert (tokenizer.least_tokens("a€€€b"), len(tokenizer.encode("a€€€b"))) == (2, 2)
