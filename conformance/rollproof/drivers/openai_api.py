"""Talking to vLLM's OpenAI-compatible server: requests as its JSON, its answers as completions.

Nothing here knows an adapter's tensors, an update, or who started the server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from ..protocol import Completion, GenerateRequest

try:
    import httpx
except ImportError as error:
    raise ImportError("drivers that speak HTTP need httpx: pip install 'rollproof[http]'") from error

ROUTES = ("default", "stream")
"""The ways to ask: for the finished completion at once, or token by token."""

_CONNECT_SECONDS = 10
_SHOWN = 500
"""Characters of a server's answer that an error shows."""


class ServerError(RuntimeError):
    """The server can't be reached, refused a call (``status`` says how), or answered what can't be read."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """An HTTP client for one server. ``trouble`` says what is known of a server that doesn't answer."""

    def __init__(self, url: str, *, key: str | None = None, trouble: Callable[[], str] = str) -> None:
        self.url = url.rstrip("/")
        self._trouble = trouble
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # How long a completion may take is the caller's to say, and how many run at once too.
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def close(self) -> None:
        """Close all connections. vLLM aborts the requests that run on them."""
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """The JSON at a path. Raises ServerError."""
        return await self._call("GET", path)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON; return the JSON or, where it is none, the text that comes back. Raises ServerError."""
        return await self._call("POST", path, body)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Send JSON; yield the JSON of each event of the stream that comes back. Raises ServerError."""
        what = f"POST {self.url}{path}"
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise refused(
                        what, response.status_code, (await response.aread()).decode(errors="replace")
                    )
                async for line in response.aiter_lines():
                    name, _, data = line.partition(":")
                    if name != "data":
                        continue
                    if data.strip() == "[DONE]":
                        return
                    event = _json(what, data)
                    if isinstance(event, dict) and "error" in event:
                        raise refused(what, response.status_code, data)
                    yield event
        except httpx.HTTPError as error:
            raise self._lost(what, error) from error
        raise ServerError(f"{what}: the stream ended without [DONE]{self._known()}")

    async def version(self) -> str:
        """vLLM's version. Raises ServerError."""
        found = await self.get("/version")
        if not isinstance(found, dict) or not isinstance(found.get("version"), str):
            raise ServerError(f"GET {self.url}/version answered {found!r}: no vLLM server does")
        version: str = found["version"]
        return version

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server lists, adapters with a ``parent``. Raises ServerError."""
        found = await self.get("/v1/models")
        cards = found.get("data") if isinstance(found, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise ServerError(f"GET {self.url}/v1/models answered {found!r}: no list of models")
        return cards

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        what = f"{method} {self.url}{path}"
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._lost(what, error) from error
        if response.status_code != httpx.codes.OK:
            raise refused(what, response.status_code, response.text)
        if "json" in response.headers.get("content-type", ""):
            return _json(what, response.text)
        return response.text

    def _lost(self, what: str, error: httpx.HTTPError) -> ServerError:
        return ServerError(f"{what}: {type(error).__name__}: {error}{self._known()}")

    def _known(self) -> str:
        known = self._trouble()
        return f"; {known}" if known else ""


def refused(what: str, status: int, text: str) -> ServerError:
    """The error for an answer that says no: the server's own message, or else the start of its text."""
    try:
        found = json.loads(text)
        said = str(found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = text
    return ServerError(f"{what} was refused ({status}): {said[:_SHOWN] or 'no reason given'}", status)


def completion_body(request: GenerateRequest, model: str, n: int, salt: str | None) -> dict[str, Any]:
    """The request as /v1/completions takes it. Raises ValueError for an unknown route."""
    if request.route not in ROUTES:
        raise ValueError(f"route is {request.route!r}; allowed: {', '.join(ROUTES)}")
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "n": n,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "ignore_eos": True,
        # What is left out, the server takes from the model's generation_config.json.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
        # Without it the server decodes each token, for which it needs a tokenizer.
        "return_tokens_as_token_ids": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    if request.route == "stream":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def completions(chunks: Sequence[Any], n: int) -> list[Completion]:
    """What came for a request, in one piece or in many, as ``n`` completions. Raises ServerError."""
    try:
        pieces: dict[int, list[Any]] = {}
        cached = None
        for chunk in chunks:
            for choice in chunk["choices"]:
                pieces.setdefault(choice["index"], []).append(choice)
            details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens", cached)
        if sorted(pieces) != list(range(n)):
            raise ServerError(f"the server answered with the choices {sorted(pieces)} for n={n}")
        return [_joined(pieces[index], cached) for index in range(n)]
    except (KeyError, TypeError, AttributeError) as error:
        shown = json.dumps(list(chunks))[:_SHOWN]
        raise ServerError(
            f"the server's answer can't be read ({type(error).__name__}: {error}): {shown}"
        ) from error


def _joined(pieces: Sequence[Any], cached: int | None) -> Completion:
    tokens: list[int] = []
    logprobs: list[float] = []
    for piece in pieces:
        if piece.get("token_ids") is None:
            raise ServerError(
                "the server's answer has no token_ids: it has to be a vLLM that knows return_token_ids"
            )
        tokens += piece["token_ids"]
        logprobs += map(float, (piece.get("logprobs") or {}).get("token_logprobs", ()))
    finish = pieces[-1]["finish_reason"]
    if len(logprobs) != len(tokens) or finish is None:
        raise ServerError(
            f"the server's answer has {len(tokens)} token_ids, {len(logprobs)} logprobs and the "
            f"finish_reason {finish!r}"
        )
    return Completion(tuple(tokens), tuple(logprobs), str(finish), cached)


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerError(f"{what} answered what is no JSON ({error}): {text[:_SHOWN]}") from error
