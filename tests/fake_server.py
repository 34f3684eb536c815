"""A server in a thread that speaks as vLLM's does, with answers that a test can replace."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = tuple[int, Any]

BASE = "the-base"
OWN = {"prompt": [1, 2, 3], "max_tokens": 1}


def choice(**changes: Any) -> dict[str, Any]:
    """One completion of two tokens, as vLLM gives it."""
    logprobs = {"token_logprobs": [-0.5, -1.25]}
    whole = {"index": 0, "token_ids": [5, 6], "logprobs": logprobs, "finish_reason": "length"}
    return whole | changes


class FakeServer:
    """``answers`` replaces what a path answers: (status, JSON or text). ``asked`` holds what came. While
    ``hold`` is cleared, completions wait, and ``held`` says that one does."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, Any]] = []
        self.loaded: dict[str, str] = {}
        self.files: list[list[str]] = []
        self.held = threading.Event()
        self.hold = threading.Event()
        self.hold.set()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.hold.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def bodies(self, path: str) -> list[Any]:
        """What was sent to a path, without the driver's own requests for completions."""
        return [body for asked, body in self.asked if asked == path and body | OWN != body]

    def answer(self, path: str, body: Any) -> Answer:
        self.asked.append((path, body))
        if path in self.answers:
            return self.answers[path]
        if path == "/v1/models":
            adapters = [{"id": name, "parent": BASE, "root": root} for name, root in self.loaded.items()]
            return 200, {
                "data": [{"id": BASE, "parent": None, "root": "hub/name", "max_model_len": 512}, *adapters]
            }
        if path == "/v1/load_lora_adapter":
            self.loaded[body["lora_name"]] = body["lora_path"]
            self.files.append(sorted(file.name for file in Path(body["lora_path"]).iterdir()))
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            del self.loaded[body["lora_name"]]
            return 200, "Success"
        if path == "/v1/completions":
            return self._completion(body)
        return 200, {"version": "0.32.0"}

    def _completion(self, body: Any) -> Answer:
        if body["prompt"] != OWN["prompt"] and not self.hold.is_set():
            self.held.set()
            self.hold.wait(10)
        if body["model"] not in (BASE, *self.loaded):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
        if not body.get("stream"):
            return 200, {"choices": [choice(index=i) for i in range(body["n"])], "usage": usage}
        halves = [
            choice(token_ids=[5], logprobs={"token_logprobs": [-0.5]}, finish_reason=None),
            choice(token_ids=[6], logprobs={"token_logprobs": [-1.25]}),
        ]
        events = [{"choices": [half]} for half in halves] + [{"choices": [], "usage": usage}]
        return 200, stream(*events)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*server.answer(self.path, None))

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                self._send(*server.answer(self.path, json.loads(self.rfile.read(length))))

            def _send(self, status: int, content: Any) -> None:
                text = content if isinstance(content, str) else json.dumps(content)
                self.send_response(status)
                self.send_header("content-type", "text/plain" if text is content else "application/json")
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def stream(*events: Any, done: bool = True) -> str:
    """Events as server-sent events, with vLLM's last line and a comment as it keeps connections alive."""
    lines = [": keep-alive", *(f"data: {json.dumps(event)}" for event in events), *["data: [DONE]"] * done]
    return "\n\n".join(lines) + "\n\n"
