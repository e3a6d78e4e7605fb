"""What the front door answers, as messages of the gRPC contract; router/parse.py reads the other direction."""

from protocol.messages import FinishReason
from router.call import Piece
from router.policy import ReplicaView
from twopass.proto import twopass_pb2 as pb

_FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}


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
