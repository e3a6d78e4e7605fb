"""Every message reaches another process as it was, and cannot be changed on the way."""

import dataclasses
import pickle
from typing import get_args

import numpy as np
import pytest

from protocol.messages import (
    AbortRequest,
    Address,
    Drain,
    End,
    EngineRequest,
    Envelope,
    Hello,
    KVHandoff,
    KVRelease,
    KVRenew,
    KVRevoke,
    Message,
    PeerDown,
    PeerGap,
    PeerUp,
    ReplicaStatus,
    RequestKey,
    RouterStatus,
    SamplingParams,
    StageSeconds,
    StepTokens,
)

KEY = RequestKey(1, "r", 2)
PREFILL = Address("prefill-0", 3)
IDS = np.array([5, 6], np.int32)
LAYOUT = b"0123456789abcdef"

EXAMPLES: list[Message] = [
    EngineRequest(
        key=KEY,
        request_number=4,
        role="prefill",
        peer=PREFILL,
        prompt_token_ids=IDS,
        offset=0,
        max_tokens=9,
        sampling=SamplingParams(seed=1),
    ),
    AbortRequest(key=KEY, reason="client"),
    KVHandoff(
        key=KEY,
        lease_id=3 << 32 | 1,
        lease_index=0,
        lease_s=30.0,
        block_ids=(1, 2),
        num_ready_tokens=16,
        final=True,
        first_token_id=7,
        layout_fingerprint=LAYOUT,
    ),
    KVRenew(leases=((KEY, 3 << 32 | 1),)),
    KVRelease(key=KEY, lease_id=3 << 32 | 1, outcome="consumed", num_bytes=1 << 40, seconds=0.5),
    KVRevoke(key=KEY, lease_id=3 << 32 | 1, reason="aborted"),
    StepTokens(
        router_epoch=1,
        request_numbers=np.array([4]),
        attempts=IDS[:1],
        offsets=IDS[:1],
        counts=IDS[:1],
        token_ids=IDS,
        ends=(End(4, 2, "finished", "stop"),),
        stages=(StageSeconds(4, 2, {"decode": 0.5}),),
    ),
    ReplicaStatus(
        state="up",
        seq=0,
        num_waiting=0,
        num_running=0,
        num_leases=0,
        num_pulls=0,
        num_early_handoffs=0,
        num_free_blocks=0,
        counters={"steps": 1.0},
        num_scheduled_tokens=({"r": 2},),
        hashes_added=(LAYOUT,),
    ),
    RouterStatus(router_epoch=1, seq=0, prefill_room_blocks=8, prefill_max_tokens=0),
    Hello(
        role="decode",
        layout_fingerprint=LAYOUT,
        block_size=16,
        num_blocks=8,
        max_num_seqs=4,
        max_model_len=64,
        max_prompt_tokens=63,
        endpoint=b"",
    ),
    PeerUp(peer=PREFILL, endpoint=b"x"),
    PeerDown(peer=PREFILL),
    Drain(deadline_s=1.0),
    PeerGap(peer=PREFILL),
]


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message in EXAMPLES} == set(get_args(Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    envelope = Envelope(PREFILL, Address("router", 1), 0, message)
    arrived = pickle.loads(pickle.dumps(envelope))
    assert arrived[:3] == envelope[:3]
    for field in dataclasses.fields(message):
        before, after = getattr(message, field.name), getattr(arrived.message, field.name)
        assert type(after) is type(before)
        if isinstance(before, np.ndarray):
            assert after.dtype == before.dtype
            assert after.tolist() == before.tolist()
        else:
            assert after == before


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_is_frozen_and_has_no_room_for_more(message: Message) -> None:
    name = dataclasses.fields(message)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(message, name, None)
    assert not hasattr(message, "__dict__")
