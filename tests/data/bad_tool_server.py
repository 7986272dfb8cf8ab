"""A stdio MCP server on the bare wire, standard library only, with one fault: `bad_tool_server.py FAULT [FILE]`.

Its tool `work` answers "done", `count` how often it was called; a fault changes one of these, or the way there.
"""

import json
import os
import sys
import time
from pathlib import Path

FAULT = sys.argv[1]
MEGABYTES = 10
counts: list[int] = []


def send(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def send_bytes(line):
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def reply(request, **body):
    send({"jsonrpc": "2.0", "id": request["id"], **body})


def reply_text(request, text, **more):
    reply(request, result={"content": [{"type": "text", "text": text}], **more})


def tools():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    if FAULT == "wrong_schema":
        schema = {"type": "object", "properties": {"n": {"type": "nonsense", "minimum": "low"}}}
    if FAULT == "no_schema":
        schema = {"type": "nonsense", "properties": {"n": 5}, "required": "n"}
    if FAULT == "huge_schema":
        schema["properties"] |= {f"option_{n}": {"type": "string", "description": "x" * 100} for n in range(8000)}
    listed = [{"name": name, "description": FAULT, "inputSchema": schema} for name in ("work", "count")]
    return listed * 2 if FAULT == "duplicates" else listed


def work(request):
    if FAULT == "hangs":
        return
    if FAULT in ("dies", "dies_for_good"):
        if FAULT == "dies_for_good":
            Path(sys.argv[2]).touch()
        os._exit(3)
    if FAULT == "floods":
        reply_text(request, "x" * (MEGABYTES << 20))
    elif FAULT == "malformed":
        send_bytes(b"this is no JSON")
        send({"jsonrpc": "2.0", "id": request["id"]})
        send([1, 2, 3])
    elif FAULT == "nonsense":
        reply(request, result={"content": "no list", "isError": "perhaps"})
    elif FAULT == "is_error":
        reply_text(request, "no luck", isError=True)
    elif FAULT == "invalid_utf8":
        body = {"jsonrpc": "2.0", "id": request["id"], "result": {"content": [{"type": "text", "text": "do?ne"}]}}
        send_bytes(json.dumps(body).encode("ascii").replace(b"?", b"\xff\xfe"))
    else:
        reply_text(request, "done")


def flood():
    """Write a gigabyte that nobody asked for, once: a server started again behaves."""
    if FAULT not in ("one_line", "many_lines") or Path(sys.argv[2]).exists():
        return
    Path(sys.argv[2]).touch()
    log = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 4000}}
    line = b"x" * 4096 if FAULT == "one_line" else json.dumps(log).encode("ascii") + b"\n"
    for _ in range(1 << 18):
        sys.stdout.buffer.write(line)


def handle(request):
    method = request.get("method")
    if method == "initialize":
        if FAULT == "never_initialises" or (FAULT == "dies_for_good" and Path(sys.argv[2]).exists()):
            return
        version = request["params"]["protocolVersion"]
        info = {"name": FAULT, "version": "1"}
        reply(request, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
    elif method == "tools/list":
        if FAULT == "slow_list":
            time.sleep(1)
        reply(request, result={"tools": tools()})
        flood()
    elif method == "tools/call" and request["params"]["name"] == "count":
        counts.append(1)
        reply_text(request, str(len(counts)))
    elif method == "tools/call":
        work(request)
    elif "id" in request:
        reply(request, error={"code": -32601, "message": "Method not found"})


for line in sys.stdin:
    handle(json.loads(line))
