"""Messages per second that the client of a pool of inference servers can take, on one core.

    python benchmarks/pool_client.py --engines 1 4 16 64 --messages 100000

A process of its own plays the servers. As vLLM does with `--stream-interval 8`, it sends all streams one message of 8
tokens at each step, `--rate` messages per second in all. Counted is this process's CPU time per message, from the
socket to the pool's `poll`, so that neither the servers nor other load matter; 1 / that is what one core can take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.connection import Connection

from sortedrl.core.engine import Request, RequestFinished, Tokens
from sortedrl.core.rollout import Prompt
from sortedrl.engines.pool import Pool
from sortedrl.engines.servers.vllm import VllmServerEngine

TOKENS_PER_MESSAGE = 8
CONFIG = {
    "model_config": {"max_model_len": 1 << 20, "logprobs_mode": "processed_logprobs"},
    "scheduler_config": {"max_num_seqs": 1 << 16},
}
ANSWERS = {"/server_info": {"vllm_config": CONFIG}, "/weight_info": {"weight_version": "default"}}


@lru_cache
def message(tokens: int, made: int, limit: int) -> bytes:
    """As a chunk of the response."""
    about = {"token": "token_id:12345", "logprob": -1.2345678, "bytes": None, "top_logprobs": []}
    choice = {
        "index": 0,
        "token_ids": [12_345 + made % 7] * tokens,
        "logprobs": {"content": [about] * tokens},
        "finish_reason": "length" if made == limit else None,
    }
    usage = {"prompt_tokens": 4, "total_tokens": made + 4, "completion_tokens": made}
    event = json.dumps({"request_id": "x" * 24, "choices": [choice], "usage": usage}).encode()
    return b"%x\r\ndata: %s\n\n\r\n" % (len(event) + 8, event)


@dataclass(eq=False)
class Stream:
    writer: asyncio.StreamWriter
    limit: int
    made: int = 0


async def send_steps(streams: set[Stream], rate: float) -> None:
    began, sent = time.perf_counter(), 0
    while True:
        await asyncio.sleep(max(0.001, began + sent / rate - time.perf_counter()))
        if not streams:
            began, sent = time.perf_counter(), 0
        for stream in list(streams):
            sent += 1
            stream.made += TOKENS_PER_MESSAGE
            stream.writer.write(message(TOKENS_PER_MESSAGE, stream.made, stream.limit))
            if stream.made == stream.limit:
                streams.remove(stream)
                stream.writer.write(b"0\r\n\r\n")
                stream.writer.close()


async def answer(streams: set[Stream], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:  # the pool was closed
        return
    path = head.split(" ", 2)[1].partition("?")[0]
    sizes = [line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length")]
    body = json.loads(await reader.readexactly(int(sizes[0]))) if sizes and int(sizes[0]) else {}
    if not body.get("stream"):
        text = "process_start_time_seconds 1\n" if path == "/metrics" else json.dumps(ANSWERS.get(path, {}))
        kind = "text/plain" if path == "/metrics" else "application/json"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        writer.close()
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        streams.add(Stream(writer, body["sampling_params"]["max_tokens"]))


def play_servers(count: int, rate: float, ports: Connection) -> None:
    async def serve() -> None:
        streams: set[Stream] = set()
        servers = [await asyncio.start_server(partial(answer, streams), "127.0.0.1", 0) for _ in range(count)]
        ports.send([server.sockets[0].getsockname()[1] for server in servers])
        await send_steps(streams, rate)

    asyncio.run(serve())


def measured(engines: int, streams: int, messages: int, rate: float) -> tuple[int, float, float]:
    """Messages, CPU seconds and seconds, for `streams` streams over so many engines."""
    here, there = multiprocessing.Pipe()
    servers = multiprocessing.Process(target=play_servers, args=(engines, rate, there), daemon=True)
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
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=40_000, help="messages per second that the servers send")
    options = parser.parse_args()
    for engines in options.engines:
        taken, cpu, seconds = measured(engines, options.streams, options.messages, options.rate)
        print(
            f"{engines:4d} engines, {options.streams} streams: {1e6 * cpu / taken:6.1f} us of CPU per message, "
            f"{taken / cpu:8,.0f} messages per CPU second ({taken:,} in {seconds:.1f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
