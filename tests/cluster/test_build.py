"""Builds a pair of engines from a configuration, without Ray: two loops in this process, real shared memory, and a test
that plays the router.
"""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster import build, served_model
from cluster.config import ClusterConfig, load
from engine.loop import EngineLoop
from engine.runners.arithmetic_model import expected_tokens
from protocol.errors import ConfigError
from protocol.messages import (
    ROUTER_ID,
    Address,
    EngineRequest,
    Envelope,
    Hello,
    Message,
    PeerUp,
    RequestKey,
    RouterStatus,
    SamplingParams,
    StepTokens,
)
from tests.engine.tiny_llama import TINY, random_tensors, write_model_dir
from tests.hang import HANG_S

ROUTER, PREFILL, DECODE = Address(ROUTER_ID, 1), Address("prefill-0", 2), Address("decode-0", 3)
PREFIX = "twopass-test-build-"


def small(*overrides: str) -> ClusterConfig:
    return load(None, ["runner=arithmetic", "prefill.num_blocks=32", "decode.num_blocks=32", *overrides])


class Wire:
    """Carries envelopes between two loops. Messages for the router lie in `inbox`."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.loops: dict[Address, EngineLoop] = {}
        self._seq = dict.fromkeys((PREFILL, DECODE), 0)

    def __call__(self, envelope: Envelope) -> None:
        if envelope.receiver == ROUTER:
            self.inbox.put(envelope.message)
        else:
            self.loops[envelope.receiver].deliver(envelope)

    def say(self, receiver: Address, message: Message) -> None:
        self.loops[receiver].deliver(Envelope(ROUTER, receiver, self._seq[receiver], message))
        self._seq[receiver] += 1

    def hear(self, kind: type[Message]) -> Message:
        """The next message of this kind. Messages of other kinds are skipped."""
        while not isinstance(message := self.inbox.get(timeout=HANG_S), kind):
            continue
        return message


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire, config = Wire(), small()
    with ExitStack() as resources:
        wire.loops[PREFILL] = build.build_prefill(config, PREFILL, wire, PREFIX, resources)
        wire.loops[DECODE] = build.build_decode(config, DECODE, wire, PREFIX, resources)
        for loop in wire.loops.values():
            loop.start()
            resources.callback(loop.stop)
        yield wire
    assert list(Path("/dev/shm").glob(f"{PREFIX}*")) == []


def test_a_pair_answers_through_shared_memory(wire: Wire) -> None:
    wire.say(PREFILL, RouterStatus(router_epoch=1, seq=1, prefill_room_blocks=0, prefill_max_tokens=0))
    hello = wire.hear(Hello)
    assert isinstance(hello, Hello)
    assert (hello.role, hello.num_blocks, hello.block_size) == ("prefill", 32, 16)
    wire.say(DECODE, PeerUp(peer=PREFILL, endpoint=hello.endpoint))
    prompt, num_tokens = list(range(40)), 10
    for role, receiver, peer in (("prefill", PREFILL, DECODE), ("decode", DECODE, PREFILL)):
        request = EngineRequest(
            key=RequestKey(1, "r", 1),
            request_number=0,
            role=role,  # type: ignore[arg-type]
            peer=peer,
            prompt_token_ids=np.array(prompt, np.int32),
            offset=0,
            max_tokens=num_tokens,
            sampling=SamplingParams(),
        )
        wire.say(receiver, request)
    answer: dict[int, int] = {}
    while len(answer) < num_tokens:
        step = wire.hear(StepTokens)
        assert isinstance(step, StepTokens)
        for offset in step.offsets.tolist():
            answer |= enumerate(step.token_ids.tolist(), offset)
    assert [answer[i] for i in range(num_tokens)] == expected_tokens(prompt, num_tokens)


def test_blocks_come_from_the_number_or_the_bytes() -> None:
    config = small("decode.num_blocks=0", "decode.kv_cache_bytes=8192")
    served = served_model.serve_model(config)
    assert served_model.num_blocks(config, config.prefill, served) == 32
    assert served_model.num_blocks(config, config.decode, served) == 8192 // served.layout(config.decode).block_bytes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode.num_blocks=1", r"decode\.kv_cache_bytes: too few for two blocks of 256 bytes"),
        ("decode.num_gpus=1", r"decode\.num_gpus: 1, but the arithmetic runner computes on the CPU"),
        ("device=cuda", r"device: cuda, but the arithmetic runner computes on the CPU"),
        ("prefill.max_model_len=9999999", r"prefill\.max_model_len: 9999999 is more than the model's"),
    ],
)
def test_knobs_that_the_model_cannot_satisfy_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        served_model.serve_model(small(override))


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "float16"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_the_layout_has_the_dtype_of_the_checkpoint_or_the_one_that_was_named(
    tmp_path: Path, dtype: str, expected: str
) -> None:
    write_model_dir(tmp_path, tensors=random_tensors(TINY, torch.float16), torch_dtype="float32")
    config = load(
        None, [f"model={tmp_path}", f"dtype={dtype}", "prefill.max_model_len=512", "decode.max_model_len=512"]
    )
    if dtype == "auto":
        with pytest.raises(ConfigError, match="dtype: auto has not been replaced"):
            served_model.serve_model(config)
    config = served_model.with_dtype(config)
    assert config.dtype == served_model.serve_model(config).layout(config.decode).dtype == expected


def test_engines_with_quantised_weights_pair_with_none_that_has_others(tmp_path: Path) -> None:
    write_model_dir(tmp_path, torch_dtype="float32")
    fingerprints = {
        served_model.serve_model(config).layout(config.decode).fingerprint()
        for quantization in ("none", "int8")
        for config in [
            load(
                None,
                [f"model={tmp_path}", f"quantization={quantization}", "dtype=float32"]
                + [f"{pool}.max_model_len=512" for pool in ("prefill", "decode")],
            )
        ]
    }
    assert len(fingerprints) == 2


def test_the_arithmetic_runner_reads_no_dtype() -> None:
    config = small("model=nowhere")
    assert served_model.with_dtype(config) is config


def on_gpus(*overrides: str) -> ClusterConfig:
    return load(None, ["model=somewhere", "prefill.num_gpus=1", "decode.num_gpus=1", *overrides])


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_engines_that_were_given_a_gpu_compute_on_it(device: str) -> None:
    config = on_gpus(f"device={device}")
    assert [config.device_of(pool) for pool in (config.prefill, config.decode)] == ["cuda", "cuda"]


def test_each_pool_computes_on_what_it_was_given() -> None:
    config = on_gpus("prefill.num_gpus=0")
    assert [config.device_of(pool) for pool in (config.prefill, config.decode)] == ["cpu", "cuda"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("device=cuda", "decode.num_gpus=0"),
            r"decode\.num_gpus: 0, but device cuda needs 1: an engine takes one GPU",
        ),
        (("device=cpu",), r"prefill\.num_gpus: 1, but device cpu needs 0"),
        (("transfer.checksum=true",), r"transfer\.checksum: reads KV on the host, but prefill\.num_gpus is 1"),
    ],
)
def test_devices_and_gpus_that_contradict_each_other_are_named(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        on_gpus(*overrides)


def test_only_an_engine_with_a_gpu_and_no_number_of_blocks_looks_for_room() -> None:
    assert served_model.is_profiled(on_gpus().decode)
    for override in ("decode.num_blocks=9", "decode.kv_cache_bytes=9999999", "decode.num_gpus=0"):
        assert not served_model.is_profiled(on_gpus(override).decode)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import launch  # only now: the tests of kernels choose how Triton runs

    monkeypatch.setattr(launch, "INTERPRETED", False)
    served = served_model.serve_model(small())
    with pytest.raises(ConfigError, match="GPU kernels need"):
        build._prepare(on_gpus(), on_gpus().decode, served, ExitStack())


def test_an_absent_pool_is_not_checked() -> None:
    served_model.serve_model(small("prefill.replicas=0", "prefill.max_model_len=9999999"))


def test_what_the_limits_of_one_engine_mean_is_said_at_the_start() -> None:
    def warned(*overrides: str) -> list[str]:
        config = small("decode.max_model_len=400", *overrides)
        return served_model.limit_warnings(config, served_model.serve_model(config))

    assert warned() == []
    assert warned("prefill.num_blocks=3") == [
        "prompts of more than 32 tokens are computed by decode engines themselves: prefill engines do not take them"
    ]
    assert warned("decode.num_blocks=3", "prefill.replicas=0")[0].startswith(
        "prompts of more than 32 tokens are refused"
    )


def test_swap_space_counts_in_blocks() -> None:
    config = small("decode.preemption=swap", "decode.swap_space_bytes=100000")
    served = served_model.serve_model(config)
    assert served_model.num_host_blocks(config.decode, served) == 100000 // served.layout(config.decode).block_bytes > 0
    assert served_model.num_host_blocks(config.prefill, served) == 0
    assert served_model.num_host_blocks(small("decode.preemption=auto", "decode.num_host_blocks=7").decode, served) == 7
