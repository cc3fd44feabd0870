"""OpenAI's paths that the daemon does not have: each says so, and what to use."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from ondevice.server.openai import error_body
from ondevice.server.routes import json_response

router = APIRouter(prefix="/v1", include_in_schema=False)
INSTEAD = {
    "/embeddings": "the models here generate text: POST /v1/chat/completions or POST /v1/predict",
    "/responses": "POST /v1/chat/completions takes the same conversation as messages",
    "/batches": "POST /v1/predict takes many rows at once",
    "/moderations": "train a classifier on your own rows, and ask POST /v1/predict",
    "/images/generations": "the models here generate text: POST /v1/chat/completions",
    "/audio/speech": "the models here generate text: POST /v1/chat/completions",
    "/assistants": "POST /v1/chat/completions answers a conversation",
    "/threads": "POST /v1/chat/completions answers a conversation",
    "/vector_stores": "POST /v1/files takes conversations to train on",
}
"""{path: what to use}."""


def unsupported(path: str) -> Response:
    """Build the response: 404, because clients repeat a request that a server could not answer."""
    values = {
        "error": "Refused",
        "message": f"/v1{path} of OpenAI's API is not supported here",
        "expected": None,
        "received": None,
        "hint": INSTEAD[path],
    }
    return json_response(404, error_body(404, values, missing="not_supported"))


def _add(path: str) -> None:
    async def answer() -> Response:
        return unsupported(path)

    for pattern in (path, f"{path}/{{rest:path}}"):
        router.add_api_route(pattern, answer, methods=["GET", "POST", "DELETE"], name=pattern)


for _path in INSTEAD:
    _add(_path)
