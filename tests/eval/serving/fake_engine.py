#!/usr/bin/env python3
"""A serving engine that answers from a script: run as a process in place of vLLM's Python or of llama-server.

The JSON file that $FAKE_ENGINE names says what it does:
    answers    {"with": {"<prompt ids>": {"tokens": [...], "drafts": n, "accepted": [...]}}, "without": {...}}
    fault      null, "crash" (ends while it starts), "never ready", "worker" (has a child
               that does not end when asked), "no tokens", "refuses" (requests fail)
    log        lines to print at the start
    pids       a file to which it writes its process ids
"""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ARGUMENTS = sys.argv[1:]
PLAN = json.loads(Path(os.environ["FAKE_ENGINE"]).read_text())
WITH_HEADS = any(name in ARGUMENTS for name in ("--speculative-config", "--spec-draft-model"))
FAMILY = "vllm" if "--served-model-name" in ARGUMENTS else "llamacpp"
ANSWERS = PLAN["answers"]["with" if WITH_HEADS else "without"]


class Counts:
    drafts = 0
    positions: tuple[int, ...] = (0, 0, 0)

    @classmethod
    def add(cls, drafts, accepted):
        cls.drafts += drafts
        cls.positions = tuple(now + more for now, more in zip(cls.positions, accepted, strict=True))


def metrics():
    lines = [f"{FAMILY}:other_total 1"]
    if WITH_HEADS:
        names = {"num_drafts": Counts.drafts, "num_draft_tokens": 3 * Counts.drafts}
        names["num_accepted_tokens"] = sum(Counts.positions)
        lines += [f"{FAMILY}:spec_decode_{name}_total {count}" for name, count in names.items()]
        lines += [
            f'{FAMILY}:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}'
            for place, count in enumerate(Counts.positions)
        ]
    return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/health":
            return self.send(503 if PLAN["fault"] == "never ready" else 200, "")
        if self.path == "/metrics":
            return self.send(200, metrics())
        return self.send(200, json.dumps({"version": "1.2.3", "build_info": "b123"}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if PLAN["fault"] == "refuses":
            return self.send(400, "the engine says no")
        if PLAN["fault"] == "no tokens":
            return self.send(200, json.dumps({"choices": [{"text": "?"}], "content": "?"}))
        answer = ANSWERS[" ".join(map(str, body["prompt"]))]
        if WITH_HEADS:
            Counts.add(answer["drafts"], answer["accepted"])
        limit = body.get("max_tokens") or body["n_predict"]
        tokens = answer["tokens"][:limit]
        return self.send(200, json.dumps({"choices": [{"token_ids": tokens}], "tokens": tokens}))

    def send(self, status, text):
        payload = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def main():
    said = [*PLAN["log"], " ".join(["started with", *ARGUMENTS])]
    sys.stdout.write("".join(f"{line}\n" for line in said))
    sys.stdout.flush()
    if PLAN["fault"] == "crash":
        sys.exit(3)
    pids = [os.getpid()]
    if PLAN["fault"] == "worker":
        pids.append(subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600"]).pid)
    if PLAN["pids"]:
        with Path(PLAN["pids"]).open("a") as file:
            file.write("".join(f"{pid}\n" for pid in pids))
    port = int(ARGUMENTS[ARGUMENTS.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
