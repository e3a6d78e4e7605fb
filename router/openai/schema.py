"""What the HTTP door takes, as OpenAPI says it. Answers are described by OpenAI: see docs/openai.md."""

from typing import Any

from router.openai.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

POSTS: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
GETS = ("/v1/models", "/health", "/ready", "/version")
REFUSALS = {
    "400": "a field is wrong, and named",
    "401": "a bearer token is needed",
    "404": "another model is served",
    "408": "the request took too long to come",
    "413": "the body is too large",
    "429": "too much is waiting",
    "503": "nothing can be served now",
    "504": "the deadline has passed",
}
_SCHEMAS = "#/components/schemas/{model}"


def document(version: str) -> dict[str, Any]:
    """The OpenAPI document. Fields that it does not name are allowed, see docs/openai.md."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {path: {"get": {"responses": _responses("application/json")}} for path in GETS}
    for path, kind in POSTS.items():
        schema = kind.model_json_schema(ref_template=_SCHEMAS)
        schemas |= schema.pop("$defs", {})
        schemas[kind.__name__] = schema
        body = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model=kind.__name__)}}}
        kinds = ("application/json", "text/event-stream") if path.startswith("/v1/") else ("application/json",)
        paths[path] = {"post": {"requestBody": {"required": True, "content": body}, "responses": _responses(*kinds)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "twopass", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _responses(*kinds: str) -> dict[str, Any]:
    answered = {"description": "the answer", "content": {kind: {} for kind in kinds}}
    refused = {status: {"description": text, "content": {"application/json": {}}} for status, text in REFUSALS.items()}
    return {"200": answered, **refused}
