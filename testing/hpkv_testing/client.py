"""One request to an SGLang server, and what came back.

Plain HTTP on the standard library, one connection per request, so any number of threads may use
one `Client`. Nothing is retried: a test must see each error the server gives.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


class ServerError(RuntimeError):
    """The server answered with an error status, or ended a stream with one."""

    def __init__(self, status: int, path: str, body: str) -> None:
        super().__init__(f"{path} answered {status}: {body[:500]}")
        self.status = status
        self.body = body


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: `input_ids` or `text`, greedy and of a fixed length unless told otherwise.

    `sampling` adds to or replaces SGLang's sampling parameters, `fields` adds to the request.
    With `stream` the answer has a time to first token.
    """

    input_ids: Sequence[int] | None = None
    text: str | None = None
    max_new_tokens: int = 16
    ignore_eos: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    return_logprob: bool = False
    stream: bool = False
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object for /generate."""
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("give either input_ids or text")
        named = {
            "input_ids": None if self.input_ids is None else list(self.input_ids),
            "text": self.text,
            "rid": self.rid,
            "extra_key": self.extra_key,
            "cache_salt": self.cache_salt,
        }
        sampling = {
            "temperature": 0.0,
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            **self.sampling,
        }
        return {
            **{name: value for name, value in named.items() if value is not None},
            "sampling_params": sampling,
            "return_logprob": self.return_logprob,
            "stream": self.stream,
            **self.fields,
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server generated, and where the prompt's KV came from.

    `logprobs` are those of the generated tokens, empty unless asked for; `input_logprobs` those of
    the prompt behind `logprob_start_len`. `cached_tokens_details` is SGLang's count per tier, {}
    when nothing was cached. `ttft_s` is None unless streamed.
    """

    output_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    cached_tokens_details: dict[str, int]
    finish_reason: str
    rid: str
    ttft_s: float | None
    elapsed_s: float
    input_logprobs: tuple[float, ...] = ()

    def cached_on(self, tier: str) -> int:
        """Cached tokens of one tier: "device", "host" or "storage"."""
        return self.cached_tokens_details.get(tier, 0)


@dataclass(frozen=True)
class Client:
    """Speaks to one server; holds no state, may be shared by threads."""

    host: str
    port: int
    timeout_s: float = 300.0

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, str]:
        """Status and text of one plain request; blocks up to `timeout_s`."""
        connection, response = self._send(method, path, body)
        try:
            return response.status, response.read().decode()
        finally:
            connection.close()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        """The text of a request that must succeed. Raises ServerError."""
        status, text = self.request(method, path, body)
        if status != 200:
            raise ServerError(status, path, text)
        return text

    def generate(
        self,
        ask: Ask | None = None,
        at_first_token: Callable[[], None] | None = None,
        **fields: Any,
    ) -> Answer:
        """Ask and wait. Takes an `Ask` or the fields of one. Raises ServerError.

        `at_first_token` is called when that has come, of an `Ask` that streams.
        """
        ask = _one_ask(ask, fields)
        start = time.perf_counter()
        if not ask.stream:
            reply = json.loads(self.call("POST", "/generate", ask.body()))
            return _answer(reply, None, time.perf_counter() - start)
        first, last = None, None
        for last in self._events(ask.body()):
            if first is None and last.get("output_ids"):
                first = time.perf_counter() - start
                if at_first_token is not None:
                    at_first_token()
        if last is None:
            raise ServerError(200, "/generate", "the stream ended without an event")
        return _answer(last, first, time.perf_counter() - start)

    def generate_many(self, asks: Sequence[Ask]) -> list[Answer]:
        """All of them at once, answers in the order of `asks`. Raises the first error."""
        with ThreadPoolExecutor(max_workers=max(1, len(asks))) as pool:
            return list(pool.map(self.generate, asks))

    def abort(self, rid: str | None = None) -> None:
        """Abort the request with this id, or all requests. Returns before it has ended."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        self.call("POST", "/abort_request", body)

    def flush_cache(self, timeout_s: float = 10.0) -> None:
        """Empty the device tree. Raises ServerError.

        Waits so long for requests to end; with 0 those in the queue of a paused server may stay.
        """
        self.call("POST", f"/flush_cache?timeout={timeout_s}")

    def pause(self, mode: str) -> None:
        """Stop generating: "in_place" or "retract". Requests stay. Raises ServerError."""
        self.call("POST", "/pause_generation", {"mode": mode})

    def go_on(self) -> None:
        """End a pause. Raises ServerError."""
        self.call("POST", "/continue_generation", {})

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a server-sent event stream."""
        connection, response = self._send("POST", "/generate", body)
        try:
            if response.status != 200:
                raise ServerError(response.status, "/generate", response.read().decode())
            for raw in response:
                line = raw.decode().strip()
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(200, "/generate", data)
                yield event
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise


def _one_ask(ask: Ask | None, fields: Mapping[str, Any]) -> Ask:
    if ask is None:
        return Ask(**fields)
    if fields:
        raise TypeError("give an Ask or its fields, not both")
    return ask


def _answer(reply: Mapping[str, Any], ttft_s: float | None, elapsed_s: float) -> Answer:
    meta = reply["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        output_ids=tuple(reply["output_ids"]),
        text=reply["text"],
        logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        cached_tokens_details={k: v for k, v in details.items() if isinstance(v, int)},
        finish_reason=(meta.get("finish_reason") or {}).get("type", ""),
        rid=meta["id"],
        ttft_s=ttft_s,
        elapsed_s=elapsed_s,
        input_logprobs=tuple(entry[0] for entry in (meta.get("input_token_logprobs") or ())[1:]),
    )
