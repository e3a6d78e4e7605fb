"""What a field gets of the text that is written in a file or behind --set."""

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from cluster.config import ClusterConfig, PoolConfig, from_tree, load
from cluster.scalars import parse, typed
from engine.config import EngineConfig
from kv_transfer.config import TransferConfig
from protocol.errors import ConfigError
from router.config import RouterConfig

SECTIONS: dict[str, tuple[type, ...]] = {
    "": (ClusterConfig,),
    "prefill.": (PoolConfig, EngineConfig),
    "decode.": (PoolConfig, EngineConfig),
    "transfer.": (TransferConfig,),
    "router.": (RouterConfig,),
}
FIELDS = [
    (section + field.name, get_type_hints(kind)[field.name])
    for section, kinds in SECTIONS.items()
    for kind in kinds
    for field in fields(kind)
]
WORDS = [(path, word) for path, hint in FIELDS if get_origin(hint) is Literal for word in get_args(hint)]
TEXTS = ["off", "010", "1e5", "1:30", "2026-01-01", "0x1f", "1_000", "true", ".5", "/tmp/[/red] {x}", "Null-ish"]


def outcome(path: Path | None, *overrides: str) -> ClusterConfig | str:
    try:
        return load(path, overrides)
    except ConfigError as error:
        return str(error)


def write(path: Path, key: str, value: str) -> Path:
    section, _, name = key.rpartition(".")
    path.write_text(f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n")
    return path


def tree(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    base: dict[str, Any] = {"runner": "arithmetic"}
    return {**base, section: {name: value}} if section else {**base, name: value}


@pytest.mark.parametrize(("key", "word"), WORDS)
def test_every_word_of_the_configuration_is_taken_as_it_is_documented(tmp_path: Path, key: str, word: str) -> None:
    """A word may be refused beside other values, but then with the same error as when Python passes it."""
    try:
        expected: ClusterConfig | str = from_tree(tree(key, word))
    except ConfigError as error:
        expected = str(error)
    runner = [] if key == "runner" else ["runner=arithmetic"]
    assert outcome(None, *runner, f"{key}={word}") == expected
    assert outcome(write(tmp_path / "c.yaml", key, word), *runner) == expected
    assert outcome(write(tmp_path / "c.yaml", key, f"'{word}'"), *runner) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_text_stays_text(tmp_path: Path, text: str) -> None:
    assert load(None, ["runner=arithmetic", f"model={text}"]).model == text
    assert load(write(tmp_path / "c.yaml", "model", text), ["runner=arithmetic"]).model == text
    assert (
        load(None, ["runner=arithmetic", "router.insecure=true", f"router.grpc_host={text}"]).router.grpc_host == text
    )


@pytest.mark.parametrize(
    ("override", "model"),
    [
        ("model=/a #b", "/a #b"),
        ("model=#b", "#b"),
        ("model=/a: b", "/a: b"),
        ("model=[/red]x", "[/red]x"),
        ("model=*a", "*a"),
        ("model='#b'", "#b"),
        ('model="123"', "123"),
        ("model=null", None),
        ("model=", None),
    ],
)
def test_a_command_line_has_no_syntax_for_text_but_quotes(override: str, model: str | None) -> None:
    assert load(None, ["runner=arithmetic", override]).model == model
    assert load(None, ["runner=arithmetic", "router.insecure=true", "router.grpc_host=::"]).router.grpc_host == "::"


@pytest.mark.parametrize("word", ["true", "True", "on", "yes", "ON"])
def test_booleans_know_the_older_words_too(word: str) -> None:
    assert load(None, ["runner=arithmetic", f"transfer.checksum={word}"]).transfer.checksum
    assert load(None, ["runner=arithmetic", "transfer.checksum=off"]).transfer.checksum is False


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("0o17", 15),
        ("0x1f", 31),
        ("1_000", 1000),
        ("-3", -3),
        ("1e6", 1e6),
        ("1E-3", 1e-3),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", float("-inf")),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("off", "off"),
        ("True", True),
        ("~", None),
        ("'3'", "3"),
        ("[1, 2e1, x, '4']", [1, 20.0, "x", "4"]),
        ("{a: 1, b: {c: no}}", {"a": 1, "b": {"c": "no"}}),
    ],
)
def test_elsewhere_yaml_1_2_counts(text: str, value: object) -> None:
    assert typed(parse(text)) == value


def test_numbers_may_have_exponents_and_sections_may_be_merged(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "runner: arithmetic\n"
        "prefill: &pool\n  max_num_seqs: 3\n  watermark: 1e-2\n"
        "decode:\n  <<: *pool\n  preemption: auto\n"
    )
    config = load(path)
    assert (config.decode.engine.max_num_seqs, config.decode.engine.watermark) == (3, 0.01)
    with pytest.raises(
        ConfigError, match=r"decode\.max_num_seqs: 1000\.0 is not allowed: Input should be a valid integer"
    ):
        load(path, ["decode.max_num_seqs=1e3"])
    with pytest.raises(ConfigError, match=r"decode\.max_num_seqs: 'off' is not allowed"):
        load(path, ["decode.max_num_seqs=off"])
