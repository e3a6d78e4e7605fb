"""Answers under a grammar through both doors: they parse, and are the same by gRPC and HTTP, split and colocated."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

import engine.models.loading as loading
from cluster.config import from_tree
from tests.doors_deployment import DoorsDeployment
from tests.hang import HANG_S
from twopass import Client, Completion, InvalidRequest

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "happy": {"type": "boolean"},
    },
    "required": ["name", "age", "colours", "happy"],
    "additionalProperties": False,
}
PROMPTS = [f"Describe {who} as JSON: " for who in ("Ada", "the sea", "Zoë 🎉", "{")]
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"guided_json": SCHEMA}, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ({"guided_regex": "[A-Z][a-z]{3,9}( [A-Z][a-z]{2,8})?"}, {}),
    ({"guided_choice": ["yes", "no", "perhaps"]}, {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}),
]
"""What form is asked for in gRPC, and in HTTP where its fields are others."""


@pytest.fixture(scope="module", autouse=True)
def weights_loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_model", cache(loading.load_model))
        yield


def deployment(model: Path, num_prefill: int) -> DoorsDeployment:
    pool = {"max_model_len": 512, "max_num_seqs": 8, "num_blocks": 160, "max_num_batched_tokens": 64}
    return DoorsDeployment(
        from_tree(
            {
                "model": str(model),
                "dtype": "float32",
                "prefill": {**pool, "replicas": num_prefill},
                "decode": pool,
                "router": {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "status_interval_s": 0.2},
            }
        )
    )


@pytest.fixture(scope="module")
def split(demo_model: Path) -> Iterator[DoorsDeployment]:
    with deployment(demo_model, 1) as running:
        yield running


def asked(form: int, prompt: str) -> dict[str, Any]:
    warm = PROMPTS.index(prompt) % 2
    return {"temperature": 0.9 * warm, "seed": form, "max_tokens": 100 if form else 30, "logprobs": 2, "top_p": 0.95}


def by_grpc(running: DoorsDeployment) -> dict[tuple[int, str], Completion]:
    with Client(running.grpc_address, timeout_s=HANG_S) as client:
        streams = {
            (form, prompt): client.generate(prompt, **asked(form, prompt), **FORMS[form][0])
            for form in range(len(FORMS))
            for prompt in PROMPTS
        }
        return {name: stream.read() for name, stream in streams.items()}


@pytest.fixture(scope="module")
def answers(split: DoorsDeployment) -> dict[tuple[int, str], Completion]:
    return by_grpc(split)


def test_answers_have_the_form_that_was_asked_for(answers: dict[tuple[int, str], Completion]) -> None:
    for prompt in PROMPTS:
        value = json.loads(answers[1, prompt].text)
        assert value.keys() == SCHEMA["properties"].keys() and 0 <= value["age"] <= 150, value
        assert 1 <= len(value["colours"]) <= 3 and {*value["colours"]} <= {"red", "green", "blue"}
        assert answers[2, prompt].text.replace(" ", "").isalpha()
        assert answers[3, prompt].text in ("yes", "no", "perhaps")
        assert {answers[form, prompt].finish_reason for form in (1, 2, 3)} == {"stop"}
        for form in (1, 2, 3):
            for entry in answers[form, prompt].logprobs or ():
                assert all(value > -100 for value in entry.top.values())
    assert any(len(answer.token_ids) == 30 for (form, _), answer in answers.items() if form == 0)


def test_a_stream_each_gives_the_same(split: DoorsDeployment, answers: dict[tuple[int, str], Completion]) -> None:
    """Those before went over one GenerateMany, as they were open beside each other."""
    for form, prompt in list(answers)[::3]:
        with Client(split.grpc_address, timeout_s=HANG_S) as client:
            alone, expected = (
                client.generate(prompt, **asked(form, prompt), **FORMS[form][0]).read(),
                answers[form, prompt],
            )
        assert (alone.token_ids, alone.text) == (expected.token_ids, expected.text)
        assert alone.finish_reason == expected.finish_reason
        assert alone.usage.completion_tokens == expected.usage.completion_tokens


def test_http_gives_the_same(split: DoorsDeployment, answers: dict[tuple[int, str], Completion]) -> None:
    bodies = [
        {"prompt": prompt, **asked(form, prompt), **(FORMS[form][1] or FORMS[form][0])} for form, prompt in answers
    ]
    with (
        httpx.Client(base_url=f"http://{split.http_address}", trust_env=False, timeout=HANG_S) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        posted = threads.map(lambda body: client.post("/v1/completions", json=body), bodies)
        for expected, answer in zip(answers.values(), posted, strict=True):
            assert answer.status_code == 200, answer.text
            (choice,), usage = answer.json()["choices"], answer.json()["usage"]
            assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
            assert len(choice["logprobs"]["tokens"]) == len(expected.token_ids)
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(
                [entry.logprob for entry in expected.logprobs or ()], abs=1e-3
            )
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
                expected.usage.prompt_tokens,
                expected.usage.completion_tokens,
            )


def test_a_single_engine_gives_the_same(demo_model: Path, answers: dict[tuple[int, str], Completion]) -> None:
    with deployment(demo_model, 0) as colocated:
        alone = by_grpc(colocated)
    for name, expected in answers.items():
        assert (alone[name].token_ids, alone[name].text) == (expected.token_ids, expected.text)
        assert alone[name].finish_reason == expected.finish_reason
        assert alone[name].usage.completion_tokens == expected.usage.completion_tokens


def test_the_openai_package(split: DoorsDeployment) -> None:
    with OpenAI(base_url=f"http://{split.http_address}/v1", api_key="none", timeout=HANG_S, max_retries=0) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Who are you? Answer in JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA, "strict": True}},
            seed=1,
            n=2,
        )
        for choice in answer.choices:
            assert json.loads(choice.message.content or "").keys() == SCHEMA["properties"].keys()
        stream = client.completions.create(model=model, prompt="A city: ", stream=True, max_tokens=40,
                                           extra_body={"guided_choice": ["Rome", "Paris"]})  # fmt: skip
        assert "".join(chunk.choices[0].text for chunk in stream) in ("Rome", "Paris")
        with pytest.raises(BadRequestError, match="guided_regex: .* unclosed group"):
            client.completions.create(model=model, prompt="x", extra_body={"guided_regex": "(a"})


def test_an_answer_that_is_cut_short_says_so(split: DoorsDeployment) -> None:
    with Client(split.grpc_address, timeout_s=HANG_S) as client:
        answer = client.generate_text("JSON: ", guided_json=SCHEMA, max_tokens=3)
        assert answer.finish_reason == "length" and answer.text.startswith("{")


def test_an_answer_that_exceeds_a_limit_ends_alone(split: DoorsDeployment) -> None:
    """The door, for which bytes are tokens, finds nothing against this expression."""
    with Client(split.grpc_address, timeout_s=HANG_S) as client:
        other = client.generate("A name: ", guided_regex="[a-z]{40}", max_tokens=60)
        with pytest.raises(InvalidRequest, match="grammar: regex is not allowed"):
            client.generate_text("aaaa", guided_regex="(a{1,300}){1,300}", max_tokens=200)
        assert len(other.read().text) == 40
