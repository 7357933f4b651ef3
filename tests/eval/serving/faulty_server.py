"""A small OpenAI-compatible server that streams known answers in known times, counts as vLLM does, and fails on demand.

A request that asks for no stream gets what `whole` makes of it. The n-th chat request may meet a fault:
    busy            429 with Retry-After, `retry_after`
    unavailable     503
    broken          500 with a body
    refused         400
    unknown         404
    drop            closes the connection amid the answer
    refuse          closes it without any answer
    stall           says nothing more amid the answer
    mute            never says anything but comments
    malformed       sends a chunk that is no JSON
    not a chunk     sends JSON that is no chunk
    error           sends an error in place of a chunk, as vLLM does when its engine dies
    no usage        leaves the token counts out
    no end          ends the stream without a finish reason
    one piece       sends the whole answer at once
    not a stream    answers with plain JSON
    die             the server closes its port and drops everything
"""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from eval.serving.counters import Counters

PIECES = ("né", "\u2028", "日本", " x")  # bytes of one character in two packets, a separator that is no line end
ACCEPTED = (3, 0, 2, 3, 1)  # of three drafts, in turn


class FaultyServer:
    """`with` it. Every answer comes in chunks, one each `chunk_s`, the first after `first_s`.

    drafts: whether a chunk holds 1 + accepted tokens (with heads) or one. tokens(n): length of the n-th answer.
    whole: from the body of a request to the body of its answer. key: without it, the answer is 401. models: listed.
    """

    def __init__(
        self,
        faults: dict[int, str] | None = None,
        drafts: bool = True,
        tokens: Callable[[int], int] = lambda n: 10,
        first_s: float = 0.0,
        chunk_s: float = 0.0,
        retry_after: str = "0",
        metrics: bool = True,
        on_request: Callable[[int], None] = lambda n: None,
        whole: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {},
        key: str | None = None,
        models: tuple[str, ...] = ("tiny",),
    ):
        self.whole, self.key, self.models = whole, key, models
        self.faults, self.drafts, self.tokens = faults or {}, drafts, tokens
        self.first_s, self.chunk_s, self.retry_after = first_s, chunk_s, retry_after
        self.metrics, self.on_request = metrics, on_request
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.counters = Counters("vllm", 0, 0, 0, (0, 0, 0), 0, 0)
        self.asking, self.most_asking = 0, 0  # requests under way, and the most there were
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.http = _Server(("127.0.0.1", 0), _Handler)
        self.http.serves = self
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "FaultyServer":
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self.http.shutdown()
        self.http.server_close()

    def die(self) -> None:
        """No new connections, and none of the old ones goes on."""
        self.over.set()
        self.http.shutdown()
        self.http.server_close()

    def count(self, cycles: list[int], tokens: int) -> None:
        """An answer's tokens and, in a server with heads, its verified drafts."""
        stood = tuple(sum(accepted >= k for accepted in cycles) for k in (1, 2, 3))
        with self.lock:
            self.counters += Counters("vllm", len(cycles), 3 * len(cycles), sum(cycles), stood, tokens, 1)

    def prometheus(self) -> str:
        """The counters as vLLM shows them."""
        now = self.counters
        lines = {"generation_tokens": now.generated_tokens, "request_success": now.requests}
        if self.drafts:
            lines |= {
                "spec_decode_num_drafts": now.drafts,
                "spec_decode_num_draft_tokens": now.draft_tokens,
                "spec_decode_num_accepted_tokens": now.accepted_tokens,
            }
        text = "".join(_counter(name, f'{{engine="0"}} {value}.0\n') for name, value in lines.items())
        if self.drafts and now.accepted_per_position:
            name = "spec_decode_num_accepted_tokens_per_pos"
            text += _counter(name, *(f'{{position="{k}"}} {n}\n' for k, n in enumerate(now.accepted_per_position)))
        return text


def _counter(name: str, *samples: str) -> str:
    full = f"vllm:{name}_total"
    return f"# HELP {full} known\n# TYPE {full} counter\n" + "".join(full + sample for sample in samples)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    serves: FaultyServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server  # type: ignore[assignment]

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Quiet."""

    def _is_locked(self) -> bool:
        key = self.server.serves.key
        return key is not None and self.headers["Authorization"] != f"Bearer {key}"

    def do_GET(self) -> None:
        serves = self.server.serves
        if self._is_locked():
            self._whole(401, "who are you")
        elif self.path == "/v1/models":
            self._whole(200, json.dumps({"data": [{"id": name} for name in serves.models]}))
        elif self.path == "/metrics" and serves.metrics:
            self._whole(200, serves.prometheus())
        else:
            self._whole(404, "nothing here")

    def do_POST(self) -> None:
        serves = self.server.serves
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with serves.lock:
            number = len(serves.bodies)
            serves.bodies.append(body)
            serves.keys.append(self.headers["Authorization"])
            serves.asking += 1
            serves.most_asking = max(serves.most_asking, serves.asking)
        try:
            serves.on_request(number)
            self._answer(number, serves.faults.get(number, ""), body)
        finally:
            with serves.lock:
                serves.asking -= 1

    def _answer(self, number: int, fault: str, body: dict[str, Any]) -> None:
        serves = self.server.serves
        statuses = {"busy": 429, "unavailable": 503, "broken": 500, "refused": 400, "unknown": 404}
        if self._is_locked():
            self._whole(401, "who are you")
        elif fault in statuses:
            self._whole(statuses[fault], "too much", {"Retry-After": serves.retry_after} if fault == "busy" else {})
        elif fault == "not a stream":
            self._whole(200, "{}")
        elif fault in ("refuse", "die"):
            if fault == "die":
                serves.die()
            self.close_connection = True
        elif body.get("stream"):
            self._stream(number, fault)
        else:
            self._in_one_piece(fault, json.dumps(serves.whole(body)).encode())

    def _in_one_piece(self, fault: str, content: bytes) -> None:
        time.sleep(self.server.serves.first_s)
        broken_off = fault in ("drop", "stall")
        sent = {"malformed": content[:-1], "not a chunk": b'{"object": "list"}'}.get(fault, content)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent[: len(sent) // 2] if broken_off else sent)
        self.wfile.flush()
        if broken_off:
            self._misbehave(fault)

    def _stream(self, number: int, fault: str) -> None:
        serves = self.server.serves
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if fault == "mute":
            while not serves.over.wait(0.02):
                self._send(b": still here\n\n")
        time.sleep(serves.first_s)
        sizes, cycles = chunk_sizes(serves.tokens(number), serves.drafts)
        for place, size in enumerate([sum(sizes)] if fault == "one piece" else sizes):
            if place == 2 and fault:
                self._misbehave(fault)
                if fault in ("drop", "stall"):
                    return
            if serves.over.is_set():
                self.close_connection = True
                return
            time.sleep(serves.chunk_s if place else 0)
            self._event({"choices": [{"delta": {"content": text_of(place, size)}, "finish_reason": None}]})
        serves.count(cycles, sum(sizes))
        if fault != "no end":
            self._event({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": None})
        if fault not in ("no usage", "no end"):
            usage = {"prompt_tokens": 7, "completion_tokens": sum(sizes), "prompt_tokens_details": {"cached_tokens": 4}}
            self._event({"choices": [], "usage": usage})
        self._send(b"data: [DONE]\n\n" if fault != "no end" else b"")
        self.wfile.write(b"0\r\n\r\n")

    def _misbehave(self, fault: str) -> None:
        if fault == "stall":
            self.server.serves.over.wait(30)
        if fault in ("stall", "drop"):
            self.close_connection = True
        if fault == "malformed":
            self._send(b'data: {"choices": [{"delta"\n\n')
        if fault == "not a chunk":
            self._send(b'data: {"object": "list"}\n\n')
        if fault == "error":
            self._event({"error": {"message": "EngineDeadError", "code": 500}})

    def _event(self, content: dict[str, Any]) -> None:
        """One event in two packets, cut in the midst of a character where there is a wide one."""
        data = b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\r\n\r\n"
        cut = next((place + 1 for place, byte in enumerate(data) if byte > 127), len(data) // 2)
        self._send(data[:cut])
        self._send(data[cut:])

    def _send(self, data: bytes) -> None:
        if data:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    def _whole(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        content = body.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def chunk_sizes(tokens: int, drafts: bool) -> tuple[list[int], list[int]]:
    """Tokens of each chunk, and the accepted drafts of each cycle: prefill gives the first token, cycles the rest."""
    if not drafts:
        return [1] * tokens, []
    sizes, cycles = [1], []
    while sum(sizes) < tokens:
        cycles.append(ACCEPTED[len(cycles) % len(ACCEPTED)])
        sizes.append(min(cycles[-1] + 1, tokens - sum(sizes)))
    return sizes, cycles


def text_of(place: int, size: int) -> str:
    return PIECES[place % len(PIECES)] * size
