"""The gRPC dialect: messages of twopass/proto/twopass.proto from and to the plain types that the door's inside has."""

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from protocol.errors import InvalidRequest
from protocol.messages import FinishReason
from router.call import Piece
from router.call_request import CallRequest, ChatTurn, Guided, Prompt, SamplingOptions
from router.policy import ReplicaView
from twopass.proto import twopass_pb2 as pb

M = TypeVar("M", bound=Message)

_FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}
_SCALARS = [
    field.name
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and not field.name.startswith("guided_")  # lists and maps have none
]


def decode_bytes(kind: Callable[[], M], data: bytes, max_message_bytes: int) -> M:
    """Raises InvalidRequest for a message that is too large or damaged, or whose text is not UTF-8."""
    if len(data) > max_message_bytes:
        raise InvalidRequest("message", f"{len(data)} bytes", f"at most {max_message_bytes} bytes (max_message_bytes)")
    return decode_message(kind, data)


def decode_message(kind: Callable[[], M], data: bytes) -> M:
    """The same without a limit."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            "message", f"{len(data)} bytes", f"no {message.DESCRIPTOR.full_name} in valid UTF-8"
        ) from error
    return message


def decode_generate(message: pb.GenerateRequest) -> CallRequest:
    params = message.sampling
    given = {name: getattr(params, name) for name in _SCALARS if params.HasField(name)}
    return CallRequest(
        prompt=decode_prompt(message),
        sampling=SamplingOptions(
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            logit_bias=params.logit_bias,
            guided=_guided(params),
            **given,
        ),
        priority=message.priority,
        cache_salt=message.cache_salt,
        request_id=message.request_id if message.HasField("request_id") else None,
    )


def _guided(params: pb.SamplingParams) -> Guided | None:
    match field := params.WhichOneof("guided"):
        case "guided_json":
            return Guided(field, "json_schema", params.guided_json)
        case "guided_regex":
            return Guided(field, "regex", params.guided_regex)
        case "guided_choice":
            return Guided(field, "choice", choices=params.guided_choice.choices)
        case "guided_json_object" if params.guided_json_object:
            return Guided(field, "json_object")
    return None


def decode_prompt(message: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    if message.HasField("text"):
        return Prompt(text=message.text)
    if message.HasField("chat"):
        return Prompt(chat=[ChatTurn(turn.role, turn.content) for turn in message.chat.messages])
    if isinstance(message, pb.GenerateRequest) and message.HasField("token_ids"):
        return Prompt(token_ids=message.token_ids.ids)
    return Prompt()


def encode_piece(piece: Piece) -> pb.GenerateResponse:
    message = pb.GenerateResponse(text=piece.text, token_ids=piece.token_ids, index=piece.index)
    for values in piece.logprobs:
        message.logprobs.add(logprob=values.chosen, top_token_ids=values.top_token_ids, top_logprobs=values.top)
    if piece.request_id is not None and piece.prompt_tokens is not None:
        message.request_id, message.prompt_tokens = piece.request_id, piece.prompt_tokens
    if piece.finish_reason is not None:
        message.finish_reason = _FINISH_REASONS[piece.finish_reason]
    if piece.usage is not None and piece.timing is not None:
        message.usage.CopyFrom(pb.Usage(**piece.usage._asdict()))
        message.timing.CopyFrom(pb.Timing(**piece.timing._asdict()))
    return message


def encode_load(replica: ReplicaView, age_s: float) -> pb.ReplicaLoad:
    """`age_s`: seconds since the engine was last heard."""
    hello, status = replica.hello, replica.status
    load = pb.ReplicaLoad(
        replica_id=replica.address.replica_id,
        epoch=replica.address.epoch,
        role=hello.role,
        state=replica.state,
        in_flight=replica.in_flight,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_num_seqs=hello.max_num_seqs,
        age_s=age_s,
    )
    if status is not None:
        load.num_waiting, load.num_running = status.num_waiting, status.num_running
        load.num_free_blocks = status.num_free_blocks
        load.num_leases, load.num_pulls = status.num_leases, status.num_pulls
        load.transport = status.transport
        load.counters.update(status.counters)
        load.num_scheduled_tokens.extend(pb.ScheduledTokens(num_tokens=step) for step in status.num_scheduled_tokens)
    return load
