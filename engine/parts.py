"""How one engine is put together, whoever drives it: an actor, the simulator, the GPU check or a test.

parts = assemble(config, role=..., address=..., num_blocks=..., ...)    scheduler, greeting, clock
service = PrefillService(parts, ...) or DecodeService(parts, ...)   the pool's own
loop = parts.loop(service, runner, send)                            the threads, where there are some
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.grammars import Grammars, NoGrammars
from engine.loop import EngineLoop, Service
from engine.runner import Runner
from engine.scheduler.scheduler import Proposer, Scheduler
from protocol.clock import Clock
from protocol.messages import Address, Envelope, Hello, PoolName
from protocol.router_link import LinkConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine has in either pool."""

    address: Address
    scheduler: Scheduler
    hello: Hello
    link: LinkConfig
    clock: Clock
    grammars: Grammars

    def loop(
        self,
        service: Service,
        runner: Runner,
        send: Callable[[Envelope], None],
        *,
        on_failure: Callable[[BaseException], None] | None = None,
        strict: bool = False,
    ) -> EngineLoop:
        """Not yet started. For the arguments see `EngineLoop`."""
        config = self.scheduler.config
        return EngineLoop(
            service,
            runner,
            address=self.address,
            clock=self.clock,
            send=send,
            asynchronous=config.async_scheduling,
            on_failure=on_failure,
            stall_timeout_s=config.stall_timeout_s,
            strict=strict,
        )


def assemble(
    config: EngineConfig,
    *,
    role: PoolName,
    address: Address,
    num_blocks: int,
    num_host_blocks: int,
    fingerprint: bytes,
    link: LinkConfig,
    clock: Clock,
    endpoint: bytes = b"",
    eos_token_ids: tuple[int, ...] = (),
    proposer: Proposer | None = None,
    grammars: Grammars | None = None,
) -> EngineParts:
    """`num_blocks`, block 0 included, and `num_host_blocks`: what the engine really has, whatever the configuration
    leaves open. `fingerprint`: of the KV layout. `endpoint`: of a prefill engine's cache. `grammars`: None where no
    answer can be written under one.
    """
    scheduler = Scheduler(
        config,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        fingerprint=fingerprint,
        eos_token_ids=eos_token_ids,
        proposer=proposer,
        clock=clock,
    )
    hello = Hello(
        role=role,
        layout_fingerprint=fingerprint,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_prompt_tokens=config.max_prompt_tokens(num_blocks),
        endpoint=endpoint,
    )
    return EngineParts(
        address=address, scheduler=scheduler, hello=hello, link=link, clock=clock, grammars=grammars or NoGrammars()
    )
