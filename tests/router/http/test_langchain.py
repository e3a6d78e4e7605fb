"""LangChain's client for OpenAI against the HTTP door."""

import httpx
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.hang import HANG_S
from tests.router.http.serving import MODEL, http_scenario
from tests.router.scripted_core import ScriptedCore, Serving, echo


def test_it_invokes_and_streams() -> None:
    async def test(s: Serving, _: httpx.AsyncClient) -> None:
        model = ChatOpenAI(base_url=f"{s.address}/v1", api_key=SecretStr("none"), model=MODEL, timeout=HANG_S)
        answer = await model.ainvoke("<1> <2>")
        assert answer.content == "<1> <2> "
        assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 2
        assert "".join([str(chunk.content) async for chunk in model.astream("<3>")]) == "<3> "

    http_scenario(test, ScriptedCore(echo))
