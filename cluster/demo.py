"""`make demo`: a whole deployment on one machine answers eight prompts at once and shows where their time went.

1. It fetches the model (once), starts a private Ray, the router, one prefill engine and one decode engine.
2. It sends all prompts through the gRPC client. The answers grow on the screen.
3. It prints two tables: the time to first token of each request and its parts; the last steps, blocks and transfers of
   each engine.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cluster.config import ClusterConfig, from_tree
from cluster.demo_prompts import prompts
from cluster.demo_report import Answer, answer_table, engine_facts, engine_table, request_facts, request_table
from cluster.fetch import demo_model_dir
from cluster.serve import Deployment, Progress
from cluster.timings import COMMAND, timings_table
from protocol.messages import Address
from protocol.start_times import note, now, phase, phases
from router.policy import ReplicaView
from twopass.client import AsyncClient
from twopass.console import plain_console

REFRESH_S = 0.1
"""Interval at which the answers on the screen are drawn again."""
STATUS_S = 0.2
"""Interval of the engines' statuses, which the demo waits for at its end."""
SAMPLE_S = 0.5
"""Interval at which the engines are looked at while they work."""


def run(model: Path | None, out: Path | None, timings: bool = False) -> None:
    """Runs the demo with the given model, else with the fetched one, and writes the facts to `out` as JSON. With
    `timings` it also prints where the time went.

    Raises TwopassError. It leaves nothing running.
    """
    console = plain_console()
    with ExitStack() as running:
        with _waiting(console) as progress:
            with phase("model"):
                model_dir = model or demo_model_dir(progress)
            deployment = running.enter_context(Deployment(_config(model_dir), progress))
        answers = [Answer(prompt) for prompt in prompts()]
        with phase("answers"):
            busiest = asyncio.run(_answer_all(deployment, answers, console))
        console.print(request_table(answers))
        with _waiting(console) as progress:
            progress("collecting the engines' figures")
            with phase("figures"):
                engines = [
                    engine_facts(replica, busiest.get(replica.address, replica)) for replica in _final_loads(deployment)
                ]
            times = deployment.start_times() if timings else {}
            progress("stopping")
            with phase("stop"):
                running.close()
    console.print(engine_table(engines))
    if timings:
        console.print(timings_table({**times, COMMAND: phases()}))
    if out is not None:
        facts = {
            "model": str(model_dir),
            "requests": [request_facts(answer) for answer in answers],
            "engines": engines,
        }
        out.write_text(json.dumps(facts, indent=2, ensure_ascii=False))


def _config(model_dir: Path) -> ClusterConfig:
    pool = {"max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 8, "kv_cache_bytes": 128 * 1024**2}
    prefill = {**pool, "long_prefill_token_threshold": 128}  # so the long prompt leaves half of each step
    return from_tree(
        {
            "model": str(model_dir),
            "prefill": prefill,
            "decode": pool,
            "router": {"grpc_port": 0, "metrics_port": 0, "status_interval_s": STATUS_S},
        }
    )


@contextmanager
def _waiting(console: Console) -> Iterator[Progress]:
    """Yields a function that says what is being waited for; on a terminal a spinner turns beside it."""
    started_at = time.monotonic()
    with console.status("") if console.is_terminal else nullcontext() as status:

        def progress(text: str) -> None:
            console.print(f"{time.monotonic() - started_at:5.1f} s  {text}", style="dim", soft_wrap=True)
            if status is not None:
                status.update(Text(text))  # a str would be read as markup

        yield progress


async def _answer_all(deployment: Deployment, answers: list[Answer], console: Console) -> dict[Address, ReplicaView]:
    """Sends all prompts at once and shows the answers as they grow.

    Returns each engine as it was seen when it had the fewest free blocks.
    """
    busiest: dict[Address, ReplicaView] = {}
    stopping = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(_watch, deployment, busiest, stopping))
    try:
        async with AsyncClient(f"127.0.0.1:{deployment.ports.grpc_port}") as client:
            tasks = [asyncio.create_task(_answer(client, answer)) for answer in answers]
            if console.is_terminal:
                with Live(console=console, auto_refresh=False) as live:
                    while not all(task.done() for task in tasks) and not watching.done():
                        live.update(answer_table(answers, console.width), refresh=True)
                        await asyncio.wait(tasks, timeout=REFRESH_S)
                    live.update(answer_table(answers, console.width), refresh=True)
            for answer, task in zip(answers, tasks, strict=True):
                await asyncio.wait([task, watching], return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()
                await task
                if not console.is_terminal:
                    console.print(f"{answer.prompt.name}: {answer.text!r}", soft_wrap=True)
    finally:
        stopping.set()
    await watching
    return busiest


def _watch(deployment: Deployment, busiest: dict[Address, ReplicaView], stopping: threading.Event) -> None:
    """Keeps the deployment alive and notes in `busiest` each engine's status with the fewest free blocks.

    Raises StartupError when the router is gone.
    """
    while not stopping.is_set():
        for replica in deployment.loads():
            before = busiest.get(replica.address)
            if replica.status is not None and (
                before is None
                or before.status is None
                or replica.status.num_free_blocks < before.status.num_free_blocks
            ):
                busiest[replica.address] = replica
        deployment.watch(SAMPLE_S)


async def _answer(client: AsyncClient, answer: Answer) -> None:
    prompt, sent = answer.prompt, now()
    if prompt.chat:
        stream = client.chat(
            [{"role": "user", "content": prompt.text}], max_tokens=prompt.max_tokens, request_id=prompt.name
        )
    else:
        stream = client.generate(prompt.text, max_tokens=prompt.max_tokens, request_id=prompt.name)
    async for chunk in stream:
        note("first token", sent)
        answer.text += chunk.text
        answer.token_times_s += [time.monotonic() - sent.at] * len(chunk.token_ids)
        answer.num_prompt_tokens = chunk.prompt_tokens or answer.num_prompt_tokens
        answer.finish_reason = chunk.finish_reason or ""
        answer.timing = chunk.timing or answer.timing


def _final_loads(deployment: Deployment) -> list[ReplicaView]:
    """Every engine with a status that it sent after the last answer, so its counters are final. Prefill comes first."""
    seen = {replica.address: replica.status.seq if replica.status else 0 for replica in deployment.loads()}
    while True:
        loads = deployment.loads()
        if all(
            replica.status is not None and replica.status.seq > seen.get(replica.address, 0) + 1 for replica in loads
        ):
            return sorted(loads, key=lambda replica: replica.hello.role, reverse=True)
        deployment.watch(0.1)
