"""The parts of an engine agree with each other and with its configuration."""

import queue

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.parts import EngineParts, assemble
from engine.runners.arithmetic import ArithmeticRunner
from engine.scheduler.proposer import NGramProposer
from protocol.clock import VirtualClock
from protocol.messages import Address, Envelope
from protocol.router_link import LinkConfig
from tests.engine.test_loop import FakeService

HERE = Address("decode-0", 3)
LINK = LinkConfig(status_interval_s=0.5)


def parts(config: EngineConfig, num_blocks: int = 9) -> EngineParts:
    return assemble(
        config,
        role="decode",
        address=HERE,
        num_blocks=num_blocks,
        num_host_blocks=4,
        fingerprint=b"layout",
        link=LINK,
        clock=VirtualClock(),
        endpoint=b"here",
        eos_token_ids=(2,),
        proposer=NGramProposer(),
    )


def test_the_greeting_says_what_the_scheduler_has() -> None:
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=8, block_size=4, num_blocks=5, max_model_len=64)
    made = parts(config)
    hello, scheduler = made.hello, made.scheduler
    assert (made.address, made.link, hello.role, hello.endpoint) == (HERE, LINK, "decode", b"here")
    assert scheduler.config is config
    assert (hello.num_blocks - 1, hello.block_size) == (scheduler.num_free_blocks, config.block_size)
    assert (hello.max_num_seqs, hello.max_model_len, hello.layout_fingerprint) == (3, 64, b"layout")
    assert hello.max_prompt_tokens == config.max_prompt_tokens(9) == 32


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_loop_is_as_its_configuration_says(asynchronous: bool) -> None:
    made = parts(EngineConfig(async_scheduling=asynchronous, stall_timeout_s=7.0))
    sent: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
    loop = made.loop(FakeService(), ArithmeticRunner(np.zeros((9, 16), np.int64)), sent.put, strict=True)
    assert loop.address == HERE
    assert (loop._depth, loop._stall_timeout_s, loop._strict) == (2 if asynchronous else 1, 7.0, True)
