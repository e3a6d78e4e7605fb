"""The client's command against a server on loopback."""

import asyncio

from typer.testing import CliRunner

from router.admission import ClientRequest
from tests.router.scripted_core import ScriptedCore, Serving, echo, scenario
from twopass.__main__ import app


def test_generate_streams_a_sampled_answer() -> None:
    seen: list[ClientRequest] = []

    def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
        seen.append(request)
        echo(core, request)

    async def test(s: Serving) -> None:
        options = ["--temperature", "0.5", "--top-p", "0.9", "--seed", "7"]
        arguments = ["generate", "<3> <4>", "--server", s.address, *options]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert (result.exit_code, result.stdout) == (0, "<3> <4> \n")
        arguments = ["generate", "<3>", "--server", s.address, "--top-p", "0"]
        refused = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert refused.exit_code == 2

    scenario(test, ScriptedCore(on_submit))
    (request,) = seen
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, request.max_tokens) == (0.5, 0.9, 7, 128)
