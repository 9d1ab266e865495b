"""Messages per second that the client of a pool of inference servers can take, on one core.

    python benchmarks/pool_client.py --engines 1 4 16 64 --messages 40000

A process of its own plays the servers: each stream gets one message of 8 tokens per step, as vLLM sends them with
`--stream-interval 8`. Counted is this process's CPU time per message, from the socket to the pool's `poll`, so that
neither the servers nor other load matter; 1 / that is what one core can take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection

from sortedrl.core.engine import Request, RequestFinished, Tokens
from sortedrl.core.rollout import Prompt
from sortedrl.engines.pool import Pool
from sortedrl.engines.servers.vllm import VllmServerEngine

TOKENS_PER_MESSAGE = 8
STEP_SECONDS = 0.05
CONFIG = {
    "model_config": {"max_model_len": 1 << 20, "logprobs_mode": "processed_logprobs"},
    "scheduler_config": {"max_num_seqs": 1 << 16},
}
ANSWERS = {"/server_info": {"vllm_config": CONFIG}, "/weight_info": {"weight_version": "default"}}


def message(tokens: int, made: int, limit: int) -> bytes:
    about = {"token": "token_id:12345", "logprob": -1.2345678, "bytes": None, "top_logprobs": []}
    choice = {
        "index": 0,
        "token_ids": [12_345 + made % 7] * tokens,
        "logprobs": {"content": [about] * tokens},
        "finish_reason": "length" if made == limit else None,
    }
    usage = {"prompt_tokens": 4, "total_tokens": made + 4, "completion_tokens": made}
    return b"data: " + json.dumps({"request_id": "x" * 24, "choices": [choice], "usage": usage}).encode() + b"\n\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split(" ", 2)[1].partition("?")[0]
    sizes = [line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length")]
    body = json.loads(await reader.readexactly(int(sizes[0]))) if sizes and int(sizes[0]) else {}
    if not body.get("stream"):
        text = "process_start_time_seconds 1\n" if path == "/metrics" else json.dumps(ANSWERS.get(path, {}))
        kind = "text/plain" if path == "/metrics" else "application/json"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        limit = body["sampling_params"]["max_tokens"]
        for made in range(TOKENS_PER_MESSAGE, limit + 1, TOKENS_PER_MESSAGE):
            data = message(TOKENS_PER_MESSAGE, made, limit)
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await asyncio.sleep(STEP_SECONDS)
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    writer.close()


def play_servers(count: int, ports: Connection) -> None:
    async def serve() -> None:
        servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(count)]
        ports.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    asyncio.run(serve())


def measured(engines: int, streams: int, messages: int) -> tuple[int, float, float]:
    """Messages, CPU seconds and seconds, for `streams` streams over so many engines."""
    here, there = multiprocessing.Pipe()
    servers = multiprocessing.Process(target=play_servers, args=(engines, there), daemon=True)
    servers.start()
    pool = Pool([
        VllmServerEngine(f"http://127.0.0.1:{port}", slots=streams // engines, eos_token_ids=())
        for port in here.recv()
    ])  # fmt: skip
    length = TOKENS_PER_MESSAGE * (messages // streams)
    requests = [Request(id, Prompt(str(id), [1, 2, 3, 4]), (), length, id) for id in range(streams)]
    began, cpu = time.perf_counter(), time.process_time()
    pool.submit(requests)
    ended = taken = 0
    while ended < streams:
        changes = pool.poll()
        taken += sum(isinstance(change, Tokens) for change in changes)
        ended += sum(isinstance(change, RequestFinished) for change in changes)
    found = taken, time.process_time() - cpu, time.perf_counter() - began
    pool.close()
    servers.terminate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--streams", type=int, default=256, help="over all engines")
    parser.add_argument("--messages", type=int, default=20_000)
    options = parser.parse_args()
    for engines in options.engines:
        taken, cpu, seconds = measured(engines, options.streams, options.messages)
        print(
            f"{engines:4d} engines, {options.streams} streams: {1e6 * cpu / taken:6.1f} us of CPU per message, "
            f"{taken / cpu:8,.0f} messages per CPU second ({taken:,} in {seconds:.1f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
