"""Messages between a door and the core as bytes: MessagePack of their fields, whose types their classes declare."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from protocol.errors import ProtocolError, RequestError
from router.door_messages import Abort, AskLoads, Batch, Cancel, Counted, DoorMessage, Stop, Submit, Taken

_KINDS: tuple[type, ...] = (Submit, Cancel, Stop, Abort, AskLoads, Taken, Counted)
"""A door's message begins with the index of its class in here."""
_ERRORS: dict[str, type[RequestError]] = {kind.__name__: kind for kind in RequestError.__subclasses__()}


def encode_message(message: DoorMessage) -> bytes:
    return bytes((_KINDS.index(type(message)),)) + _encoder.encode(message)


def decode_message(data: bytes) -> DoorMessage:
    """Raises ProtocolError."""
    try:
        message: DoorMessage = _message_decoders[data[0]].decode(data[1:])
    except (msgspec.MsgspecError, IndexError) as error:
        raise ProtocolError(f"{len(data)} bytes are no message of a door: {error}") from None
    return message


def encode_batch(batch: Batch) -> bytes:
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> Batch:
    """Raises ProtocolError."""
    try:
        batch: Batch = _batch_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{len(data)} bytes are no batch for a door: {error}") from None
    return batch


def _plain(value: object) -> object:
    """What MessagePack has no word for: arrays of int32, and errors with their class, text and attributes."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, RequestError):
        fields = {name: field if isinstance(field, str | float) else str(field) for name, field in vars(value).items()}
        return type(value).__name__, str(value), fields
    raise ProtocolError(f"{type(value).__name__} cannot be sent to a door")


def _made(kind: Any, plain: Any) -> object:
    if kind is RequestError:
        return _error(*plain)
    return np.frombuffer(plain, np.int32).copy()


def _error(name: str, text: str, fields: dict[str, str | float]) -> RequestError:
    """Makes an error without its constructor, which makes the text from the attributes."""
    kind = _ERRORS[name]
    error: RequestError = kind.__new__(kind, text)
    for field, value in fields.items():
        setattr(error, field, value)
    return error


def _decoders(kinds: Sequence[type]) -> list[msgspec.msgpack.Decoder[Any]]:
    return [msgspec.msgpack.Decoder(kind, dec_hook=_made) for kind in kinds]


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_message_decoders = _decoders(_KINDS)
(_batch_decoder,) = _decoders((Batch,))
