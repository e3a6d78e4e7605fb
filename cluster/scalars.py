"""Reads YAML whose scalars are typed by the field they are for: a text field takes `off`, `010` or `1e5` literally.

Where the field has no type that decides, the words and numbers of YAML 1.2 count: `true` and `false`, decimal, 0o17,
0x1f, 1e-3. A boolean field also takes the older `on`, `off`, `yes` and `no`. A scalar in quotes is text everywhere.
"""

import re
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

_BOOLEANS = {"true": True, "false": False}
_BOOLEAN_WORDS = {**_BOOLEANS, "yes": True, "on": True, "no": False, "off": False}
_NULLS = ("", "~", "null")
_INT = re.compile(r"[-+]?[0-9](_?[0-9])*")
_PREFIXED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"([-+]?)\.(inf|nan)")


class Plain(str):
    """A scalar without quotes, exactly as it is written."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):
    """A YAML loader that leaves every scalar untyped. A `<<` still merges."""


def _construct(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    return Plain(text) if node.style is None else text


_Loader.yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("<<"))]}
_Loader.add_constructor("tag:yaml.org,2002:str", _construct)


def parse(text: str) -> Any:
    """A document of `Plain` and quoted scalars, lists and mappings; None if it is empty. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def argument(text: str, hint: Any = None) -> Any:
    """Reads the part after KEY= on a command line. A text field gets all of it literally, unless it is in quotes.

    Raises yaml.YAMLError where the field is not text.
    """
    text = text.strip()
    try:
        value = parse(text)
    except yaml.YAMLError:
        if _is_text(hint):
            return Plain(text)
        raise
    in_quotes = isinstance(value, str) and not isinstance(value, Plain)
    one_scalar = value is None or isinstance(value, Plain)  # None: in a file it would be empty or a comment
    return Plain(text) if one_scalar or (_is_text(hint) and not in_quotes) else value


def typed(value: Any, hint: Any = None) -> Any:
    """Types a parsed value for a field of type `hint`. Items of lists and mappings follow YAML 1.2."""
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, dict):
        return {str(key): typed(item) for key, item in value.items()}
    if not isinstance(value, Plain):
        return value
    if _is_text(hint):
        return None if NoneType in _kinds(hint) and value.lower() in _NULLS else str(value)
    if bool in _kinds(hint) and value.lower() in _BOOLEAN_WORDS:
        return _BOOLEAN_WORDS[value.lower()]
    return _untyped(value)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if NoneType in get_args(hint) else (hint,)


def _is_text(hint: Any) -> bool:
    return any(kind is str or get_origin(kind) is Literal for kind in _kinds(hint))


def _untyped(text: str) -> Any:
    word = text.lower()
    if word in _NULLS:
        return None
    if word in _BOOLEANS:
        return _BOOLEANS[word]
    if _INT.fullmatch(text):
        return int(text)
    if _PREFIXED_INT.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _SPECIAL_FLOAT.fullmatch(word):
        return float(match[1] + match[2])
    return str(text)
