"""Servers that go wrong in every way that we could think of: a small whole run on each, in both dialects.

Every run ends right, or with one clear error, within its deadline. What is trained on is exactly what the right weights
make: nothing is lost, doubled, misaligned or over its budget.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install '.[dev]'")

from aiohttp import web

from nasty_server import (
    END,
    PROMPT_TOKENS,
    VOCABULARY,
    NastyServer,
    ServerLoop,
    expected_logprob,
    expected_token,
    response_length,
)
from sortedrl.core import Controller, EngineDied, EventLog, Prompt, Prompts, Schedule, ScoreAtOnce, events
from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.pool import Pool
from sortedrl.engines.servers import base as server_base
from sortedrl.engines.servers import outage
from sortedrl.engines.servers import streams as server_streams
from sortedrl.engines.servers.base import HttpEngine
from sortedrl.engines.servers.sglang import SglangEngine
from sortedrl.engines.servers.vllm import VllmServerEngine

DIALECTS: dict[str, type[HttpEngine]] = {"vllm": VllmServerEngine, "sglang": SglangEngine}
ROLLOUTS = 16
MAX_RESPONSE_TOKENS = 8
DEADLINE_SECONDS = 60.0  # on a busy machine; the limits of the engines are far shorter
UNAVAILABLE_SECONDS = 20.0
SHORT_SILENCE_SECONDS = 0.5  # where a server falls silent; else a pause of the machine is no fault of the server

Setup = Callable[[NastyServer], None]


@pytest.fixture(scope="module")
def server_loop() -> Iterator[ServerLoop]:
    loop = ServerLoop()
    yield loop
    loop.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_SECONDS", 0.03)
    monkeypatch.setattr(server_base, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(server_streams, "ABORT_SECONDS", 0.5)
    monkeypatch.setattr(server_streams, "STOP_SECONDS", 0.3)


# What goes wrong


Act = Callable[[NastyServer, web.Request, dict[str, Any]], Awaitable[Any]]


def when(is_due: Callable[[int], bool], act: Act) -> Setup:
    """Answer those requests in this way, by their number; what `act` does not answer is answered as always."""

    async def sometimes(server: NastyServer, request: web.Request, body: dict[str, Any]) -> Any:
        return await act(server, request, body) if is_due(server.asked) else None

    return having(act=sometimes)


def every(nth: int, act: Act) -> Setup:
    return when(lambda asked: asked % nth == 0, act)


def first(count: int, act: Act) -> Setup:
    return when(lambda asked: asked <= count, act)


def having(**attributes: Any) -> Setup:
    return lambda server: vars(server).update(attributes)


def altered(change: Callable[[NastyServer, list[bytes]], list[bytes]], nth: int = 3) -> Setup:
    """Send other lines in every nth stream."""

    def alter(server: NastyServer, lines: list[bytes], body: dict[str, Any]) -> list[bytes]:
        return change(server, lines) if server.asked % nth == 0 else lines

    return having(alter=alter)


def line(data: bytes) -> Setup:
    """This line behind the first token."""
    return altered(lambda server, lines: [lines[0], data, *lines[1:]])


def token_event(tokens: list[Any], logprobs: list[Any], count: Any = 2, end: Any = None) -> Setup:
    """These values in place of the second event."""
    return altered(lambda server, lines: [lines[0], server.event(tokens, logprobs, count, end), *lines[2:]])


def status(code: int, text: str = "busy", **headers: str) -> Callable[..., Awaitable[web.Response]]:
    async def answer(*_: Any) -> web.Response:
        return web.Response(status=code, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


def replaced(pattern: bytes, by: bytes) -> Setup:
    return altered(lambda server, lines: [re.sub(pattern, by, line) for line in lines])


def answers(paths: str, text: str, content_type: str = "application/json", code: int = 200, after: float = 0) -> Setup:
    """The routes at these paths, with spaces between them."""

    async def answer() -> web.Response:
        await asyncio.sleep(after)
        return web.Response(text=text, content_type=content_type, status=code)

    return lambda server: server.routes.update(dict.fromkeys(paths.split(), answer))


def both(*setups: Setup) -> Setup:
    def set_up(server: NastyServer) -> None:
        for setup in setups:
            setup(server)

    return set_up


async def reset_mid_line(server: NastyServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await server.stream(request, server.lines(body)[:1])
    await response.write(b'data: {"choices": [{"tok')
    assert request.transport is not None
    request.transport.abort()
    return response


def silent(tokens: int) -> Act:
    """So many tokens, and nothing else."""

    async def act(server: NastyServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await server.stream(request, server.lines(body)[:tokens])
        await asyncio.sleep(2 * DEADLINE_SECONDS)
        return response

    return act


def busy_then_silent(count: int) -> Setup:
    """Refuses the first four requests and accepts the next `count`, but generates nothing for them."""

    async def act(server: NastyServer, *request: Any) -> Any:
        return await (status(429) if server.asked <= 4 else silent(0))(server, *request)

    return first(4 + count, act)


def for_one_prompt(act: Act) -> Setup:
    async def act_on_it(server: NastyServer, request: web.Request, body: dict[str, Any]) -> Any:
        return await act(server, request, body) if prompt_of(body) == 3 else None

    return having(act=act_on_it)


def busy_for_one_prompt(others: int) -> Setup:
    """Refuses one prompt until it has accepted so many others."""

    def set_up(server: NastyServer) -> None:
        accepted: set[int] = set()

        async def act(_: NastyServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
            prompt = prompt_of(body)
            if prompt == 3 and len(accepted) < others:
                return await status(429)()
            accepted.add(prompt)
            return None

        server.act = act

    return set_up


def prompt_of(body: dict[str, Any]) -> int:
    return int((body.get("token_ids") or body["input_ids"])[0])


async def drips(server: NastyServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A token well within the time that a stream may be silent, and so on without end."""
    return await server.stream(request, server.lines(body), pause=0.6 * SHORT_SILENCE_SECONDS)


async def drips_comments(server: NastyServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await server.stream(request, server.lines(body)[:1])
    for _ in range(400):
        try:
            await response.write(b": still here\n\n")
        except ConnectionError:
            break
        await asyncio.sleep(0.05)
    return response


async def endless_headers(server: NastyServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(400):
        if request.transport.is_closing():
            break
        request.transport.write(f"X-{number}: more\r\n".encode())
        await asyncio.sleep(0.05)
    return web.Response()


async def no_answer(server: NastyServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def garbage_as_gzip(server: NastyServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    await response.write(b"this is not gzip at all")
    return response


async def html(*_: Any) -> web.Response:
    return web.Response(text="<html><body>Welcome</body></html>", content_type="text/html")


async def error_as_200(*_: Any) -> web.Response:
    return web.json_response({"error": {"message": "no room", "code": 500}})


async def error_503_in_the_stream(server: NastyServer, request: web.Request, body: Any) -> web.StreamResponse:
    return await server.stream(request, [b'{"error": {"message": "restarting", "code": 503}}', b"[DONE]"])


def vanishes(at: int, seconds: float | None) -> Setup:
    async def act(server: NastyServer, *_: Any) -> None:
        await server.vanish(seconds)

    return when(lambda asked: asked == at, act)


def malformed_after_start(text: str, *paths: str) -> Setup:
    """From the third request for generation on."""

    async def act(server: NastyServer, *_: Any) -> None:
        answers(" ".join(paths), text)(server)
        server.drop_connections()

    return when(lambda asked: asked == 3, act)


def vllm_server_info(logprobs_mode: str = "processed_logprobs", max_num_seqs: int = 8) -> str:
    model = {"max_model_len": 512, "logprobs_mode": logprobs_mode}
    return json.dumps({"vllm_config": {"model_config": model, "scheduler_config": {"max_num_seqs": max_num_seqs}}})


RIGHT, LOSSLESS, DIES, REFUSED = "right", "no rollout fails", "one clear error", "refused at the start"


@dataclass(frozen=True)
class Fault:
    set_up: Setup
    outcome: str = RIGHT
    says: str = ""  # in the error, or in the reason of a failure
    dialects: tuple[str, ...] = ("vllm", "sglang")
    silence_seconds: float = DEADLINE_SECONDS


def silence(set_up: Setup, outcome: str = RIGHT, says: str = "in the last 0.5 s") -> Fault:
    return Fault(set_up, outcome, says, silence_seconds=SHORT_SILENCE_SECONDS)


DEEP = b"[" * 100_000
VERSION = rb'(version": )"[^"]*"'
ABORTS = "/abort_request /abort_requests"
FAULTS: dict[str, Fault] = {
    # One odd line in a stream
    "an error as a string": Fault(line(b'{"error": "overloaded"}'), LOSSLESS),
    "an error as a list": Fault(line(b'{"error": ["a", 1]}'), LOSSLESS),
    "an empty list": Fault(line(b"[]"), says="Expected `object`"),
    "a string": Fault(line(b'"hello"'), says="Expected `object`"),
    "a number": Fault(line(b"17")),
    "null": Fault(line(b"null")),
    "deep nesting": Fault(line(DEEP), says="is not JSON"),
    "invalid UTF-8": Fault(line(b'{"choices": "\xff\xfe"}')),
    "half an object": Fault(line(b'{"choices": [{"token_ids": [1'), says="is not JSON"),
    "a line of 9 MB": Fault(line(b'{"x": "' + b"y" * 9_000_000 + b'"}')),
    "null for all fields": Fault(line(b'{"choices": [null], "meta_info": null}')),
    "fields of other types": Fault(line(b'{"choices": 7, "meta_info": "text"}')),
    # Values that must not be trained on
    "a log-probability that is NaN": Fault(token_event([12], [float("nan")]), says="is not JSON"),
    "a log-probability that is null": Fault(token_event([12], [None]), says="Expected `float`"),
    "a log-probability that is a string": Fault(token_event([12], ["-1"]), says="Expected `float`"),
    "a log-probability beyond float32": Fault(token_event([12], [-1e39]), says="Expected `float` >= -10000"),
    "a log-probability far out of range": Fault(token_event([12], [-1e300]), says="Expected `float` >= -10000"),
    "an infinite log-probability": Fault(token_event([12], [float("-inf")]), says="is not JSON"),
    "a log-probability above 0": Fault(token_event([12], [0.5]), says="Expected `float` <= 0.001"),
    "no log-probability": Fault(token_event([12], [])),
    "a log-probability too many": Fault(token_event([12], [-0.1, -0.2]), dialects=("vllm",), says="arrived with 2"),
    "a token id that is a float": Fault(token_event([12.0], [-0.1]), says="Expected `int`"),
    "a token id that is a bool": Fault(token_event([True], [-0.1]), says="Expected `int`"),
    "a token id that is a string": Fault(token_event(["12"], [-0.1]), says="Expected `int`"),
    "a negative token id": Fault(token_event([-3], [-0.1]), says="Expected `int` >= 0"),
    "a token id outside of the vocabulary": Fault(token_event([VOCABULARY], [-0.1]), says="outside"),
    "a huge token id": Fault(token_event([10**40], [-0.1]), says="outside"),
    "a negative count": Fault(token_event([12], [-0.1], count=-1), says="count"),
    "a count that goes back": Fault(token_event([12], [-0.1], count=0), says="count"),
    "a count that jumps": Fault(token_event([12], [-0.1], count=9), says="count"),
    "a count that is no number": Fault(token_event([12], [-0.1], count="two"), says="Expected `int`"),
    # Ends
    "an end without a token": Fault(altered(lambda s, _: [s.event([], [], 0, "stop"), b"[DONE]"]), says="token"),
    "a stop without an end token": Fault(
        altered(lambda s, lines: [lines[0], s.event([12], [-0.13], 2, "stop"), b"[DONE]"]), says="eos_token_ids"
    ),
    "a weight version that is null": Fault(replaced(VERSION, rb"\g<1>null"), says="Expected `str", dialects=("vllm",)),
    "a weight version that is a number": Fault(replaced(VERSION, rb"\g<1>17"), says="Expected `str"),
    "an unknown end": Fault(altered(lambda s, lines: [lines[0], s.event([], [], 1, "tired")]), says="tired"),
    "an end of another type": Fault(altered(lambda s, lines: [lines[0], s.event([], [], 1, [1, 2])])),
    "no end": Fault(altered(lambda s, lines: lines[:2]), LOSSLESS),
    "done without an end": Fault(altered(lambda s, lines: [lines[0], b"[DONE]"]), LOSSLESS),
    "an event twice": Fault(altered(lambda s, lines: [x for y in lines[:-2] for x in (y, y)] + lines[-2:]), LOSSLESS),
    "done twice": Fault(altered(lambda s, lines: [*lines, b"[DONE]"]), LOSSLESS),
    "the last event twice": Fault(altered(lambda s, lines: [*lines[:-1], lines[-2], b"[DONE]"]), LOSSLESS),
    "tokens after the end": Fault(altered(lambda s, lines: [*lines[:-1], s.event([9], [-1], 9), *lines]), LOSSLESS),
    "an end token that is called the limit": Fault(replaced(b'"stop"', b'"length"'), LOSSLESS),
    "no limit to a response": Fault(having(ignores_budget=True), LOSSLESS),
    # Streams and HTTP
    "a reset in mid-line": Fault(every(4, reset_mid_line), LOSSLESS),
    "no answer": Fault(every(4, no_answer), LOSSLESS),
    "a page of HTML": Fault(every(4, html), LOSSLESS),
    "an error with status 200": Fault(every(4, error_as_200), LOSSLESS),
    "a redirect": Fault(every(4, status(302, Location="http://127.0.0.1:1/")), LOSSLESS),
    "garbage as gzip": Fault(every(4, garbage_as_gzip)),
    "status 400": Fault(every(4, status(400, "not like this")), says="not like this"),
    "status 500": Fault(every(4, status(500, "<html>oops</html>")), LOSSLESS),
    "status 500 for one prompt, always": Fault(for_one_prompt(status(500, "oops")), says="500: oops"),
    "resets for one prompt, always": Fault(for_one_prompt(no_answer), says="connection broke"),
    "a stream that drips": silence(first(6, drips)),
    "a stream that falls silent": silence(first(6, silent(1))),
    "a stream that is silent from its start": silence(first(6, silent(0))),
    "comments instead of tokens": silence(first(6, drips_comments)),
    "headers without end": silence(first(6, endless_headers), says=""),
    "silence while nothing is said to run": silence(
        both(first(6, silent(0)), answers("/metrics", "vllm:num_requests_running 0\n", "text/plain"))
    ),
    # The server's state
    "a burst of 429": Fault(first(6, status(429)), LOSSLESS),
    "429 with seconds": Fault(first(3, status(429, Retry_After="0.3")), LOSSLESS),
    "429 with nonsense": Fault(first(3, status(429, Retry_After="soon")), LOSSLESS),
    "503 with a date": Fault(first(3, status(503, Retry_After=formatdate(time.time() - 5, usegmt=True))), LOSSLESS),
    "a page of 502": Fault(first(3, status(502, "<html>Bad Gateway</html>")), LOSSLESS),
    "504 now and then": Fault(every(4, status(504)), LOSSLESS),
    "429 now and then": Fault(every(3, status(429)), LOSSLESS),
    "429 for one prompt until others were served": Fault(busy_for_one_prompt(ROLLOUTS - 4), LOSSLESS),
    "503 in the stream": Fault(first(3, error_503_in_the_stream), LOSSLESS),
    "429, then accepted and silent for a while": silence(busy_then_silent(1), LOSSLESS),
    "429, then accepted and silent for ever": silence(busy_then_silent(10**9), DIES, "set a larger silence_seconds"),
    "connections that close under a second request": Fault(having(drops_kept_connections=True), LOSSLESS),
    "not there for a while": Fault(vanishes(6, 0.4), LOSSLESS),
    "429 for ever": Fault(first(10**9, status(429, "come back later")), DIES, "429: come back later"),
    "429 for ever, back in a day": Fault(first(10**9, status(429, Retry_After="86400")), DIES, "429"),
    "503 in every stream": Fault(first(10**9, error_503_in_the_stream), DIES, "restarting"),
    "a page of HTML for ever": Fault(first(10**9, html), DIES, "text/html"),
    "500 for ever": Fault(first(10**9, status(500, "oops")), DIES, "500: oops"),
    "gone": Fault(vanishes(6, None), DIES, "no longer responds"),
    "another server": Fault(having(restart_at=2), DIES, "restarted"),
    # Small questions
    **{
        f"running is {said}": Fault(
            answers("/metrics", f"vllm:num_requests_running {said}\n", "text/plain"), dialects=("vllm",)
        )
        for said in ("NaN", "+Inf", "-7")
    },
    "running is a list": Fault(malformed_after_start("[1, 2]", "/metrics"), dialects=("vllm",)),
    "loads in another shape": Fault(
        malformed_after_start('{"loads": [{"num_running_reqs": "x"}]}', "/v1/loads"),
        DIES,
        "did not complete",
        ("sglang",),
    ),
    "health is no JSON": Fault(answers("/health", "{", "application/json")),
    "aborts are refused": Fault(answers(ABORTS, "no", code=500)),
    "aborts are unknown": Fault(answers(ABORTS, "no", code=404)),
    "aborts answer nonsense": Fault(answers(ABORTS, "[[")),
    "aborts hang": Fault(answers(ABORTS, "", after=30)),
    "its identity is nonsense from some time on": Fault(
        malformed_after_start("[]", "/model_info", "/weight_info"), DIES, "no longer responds"
    ),
    "a server that talks nonsense at its start": Fault(answers("/server_info", "[1]"), REFUSED, "unexpected format"),
    "an address of something else": Fault(answers("/server_info", "<html>", "text/html"), REFUSED, "unexpected format"),
    "log-probabilities before temperature": Fault(
        answers("/server_info", vllm_server_info(logprobs_mode="raw_logprobs")),
        REFUSED,
        "--logprobs-mode raw_logprobs, not processed_logprobs",
        dialects=("vllm",),
    ),
    "fewer sequences at once than slots": Fault(
        answers("/server_info", vllm_server_info(max_num_seqs=3)),
        REFUSED,
        "--max-num-seqs 3, but this engine has 4 slots.*--max-num-seqs 4",
        dialects=("vllm",),
    ),
    "weights that are refused": Fault(
        answers("/pause /pause_generation", '{"success": false, "message": "no"}', code=400), DIES, "did not complete"
    ),
    "weights that fail with status 200": Fault(
        answers("/update_weights_from_disk", '{"success": false, "message": "no memory"}'),
        DIES,
        "no memory",
        ("sglang",),
    ),
    "weights that are answered with nonsense": Fault(
        answers("/update_weights_from_disk", "[]"), DIES, "did not complete", ("sglang",)
    ),
}


# A whole run


@dataclass
class Run:
    trained: list[Any]
    failed: list[str]
    rejected: list[str]
    preempted: int
    error: BaseException | None
    rollouts: int


def run_on(engine: Any, weights: Path, rollouts: int = ROLLOUTS) -> Run:
    log: list[Any] = []
    prompts = [Prompt(f"p{i}", [3 + i, *[2] * (PROMPT_TOKENS - 1)]) for i in range(rollouts)]
    schedule = Schedule(
        mode="partial",
        rollouts_per_update=max(6, rollouts // 3),
        prompts_per_cohort=rollouts,
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )
    controller = Controller(engine, Prompts(prompts), ScoreAtOnce(len), schedule, log=EventLog(log.append))
    run = Run([], [], [], 0, None, rollouts)

    def work() -> None:
        try:
            for batch in controller:
                run.trained += batch
                controller.publish(weights)
        except Exception as error:
            run.error = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive(), "the run did not end"
    run.failed = [event.reason for event in log if isinstance(event, events.Failed)]
    run.rejected = [event.reason for event in log if isinstance(event, events.Rejected)]
    run.preempted = sum(isinstance(event, events.Preempted) for event in log)
    return run


def check_trained(run: Run, *, is_endless: bool = False) -> None:
    """Each once, and every token that the right weights make."""
    assert len({rollout.id for rollout in run.trained}) == len(run.trained)
    for rollout in run.trained:
        seed = rollout.prompt.tokens[0]
        length = MAX_RESPONSE_TOKENS if is_endless else min(MAX_RESPONSE_TOKENS, response_length(seed))
        made = [20 + i % 30 for i in range(length)] if is_endless else [expected_token(seed, i) for i in range(length)]
        assert rollout.tokens == made
        assert rollout.logprobs == [expected_logprob(token) for token in made]
        assert rollout.truncated == (made[-1] != END)
    if run.error is None:
        assert len(run.trained) + len(run.rejected) == run.rollouts


def right_run_on(engine: Any, weights: Path, rollouts: int = ROLLOUTS) -> Run:
    """One that ends without an error. The engine is closed after it."""
    with closing(engine):
        run = run_on(engine, weights, rollouts)
    check_trained(run)
    assert run.error is None, run.error
    return run


def engine_at(server: NastyServer, **options: Any) -> HttpEngine:
    limits = {"silence_seconds": DEADLINE_SECONDS, "unavailable_seconds": UNAVAILABLE_SECONDS}
    return DIALECTS[server.dialect](
        server.url, slots=4, eos_token_ids=[END], vocabulary=VOCABULARY, **{**limits, **options}
    )


Servers = Callable[..., list[NastyServer]]


@pytest.fixture
def servers_of(server_loop: ServerLoop) -> Iterator[Servers]:
    started: list[NastyServer] = []

    def start(dialect: str, count: int = 1) -> list[NastyServer]:
        started.extend(NastyServer(dialect, server_loop.loop) for _ in range(count))
        return started[-count:]

    yield start
    for server in started:
        server.close()


@pytest.mark.parametrize(("dialect", "name"), [(one, name) for name, fault in FAULTS.items() for one in fault.dialects])
def test_a_run_ends_right_or_with_one_clear_error(dialect: str, name: str, servers_of: Servers, tmp_path: Path) -> None:
    fault = FAULTS[name]
    (server,) = servers_of(dialect)
    fault.set_up(server)
    if fault.outcome == REFUSED:
        with pytest.raises(ConfigurationError, match=fault.says):
            engine_at(server)
        return
    soon = {"unavailable_seconds": 0.5} if fault.outcome == DIES else {}
    with closing(engine_at(server, silence_seconds=fault.silence_seconds, **soon)) as engine:
        run = run_on(engine, tmp_path)
    check_trained(run, is_endless=server.ignores_budget)
    if fault.outcome == DIES:
        assert isinstance(run.error, EngineDied) and fault.says in str(run.error), run.error
        assert len(str(run.error).splitlines()) == 1
        return
    assert run.error is None, run.error
    if fault.outcome == LOSSLESS:
        assert not run.failed and not run.rejected
    assert len(run.trained) >= ROLLOUTS // 2
    assert not run.failed or any(fault.says in reason for reason in run.failed), run.failed
    assert run.failed or not fault.says or fault.outcome == LOSSLESS, "the fault was not seen"


THE_REQUESTS_OWN = (400, 404, 413, 422)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_status_but_those_of_the_request_itself_costs_a_rollout(
    dialect: str, servers_of: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other one of 300 to 599 in turn, before the server works."""
    monkeypatch.setattr(outage, "LONGEST_PAUSE_SECONDS", 0.01)
    codes = iter([code for code in range(300, 600) if code not in (304, *THE_REQUESTS_OWN)])

    async def act(*_: Any) -> web.Response | None:
        code = next(codes, None)
        return None if code is None else web.Response(status=code, text="not now")

    (server,) = servers_of(dialect)
    server.act = act
    run = right_run_on(engine_at(server), tmp_path)
    assert len(run.trained) == ROLLOUTS and not run.failed
    assert next(codes, None) is None, "each was sent"


@pytest.mark.parametrize("code", THE_REQUESTS_OWN)
def test_a_status_about_the_request_fails_it_at_once(code: int, servers_of: Servers, tmp_path: Path) -> None:
    (server,) = servers_of("vllm")
    for_one_prompt(status(code, "not like this"))(server)
    run = right_run_on(engine_at(server), tmp_path)
    assert len(run.trained) == ROLLOUTS - 1 and run.preempted == 0
    assert len(run.failed) == 3 and "not like this" in run.rejected[0]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("hole", [status(400, "no"), status(404, "no"), html], ids=["400", "404", "HTML"])
def test_in_a_pool_a_server_that_fails_what_others_do_costs_no_rollout(
    dialect: str, hole: Any, servers_of: Servers, tmp_path: Path
) -> None:
    """It has free slots all the time, so it would get most of the requests. Every 30th request it serves."""

    async def act(server: NastyServer, *request: Any) -> web.Response | None:
        return await hole(server, *request) if server.asked % 30 else None

    servers = servers_of(dialect, 4)
    servers[1].act = act
    pool = Pool([engine_at(server) for server in servers])
    run = right_run_on(pool, tmp_path, rollouts=60)
    assert len(run.trained) == 60 and not run.failed
    if hole is not html:  # such a server is busy, as far as one can tell, and gets no work
        assert list(pool.lost) == [1] and "requests that other engines completed" in pool.lost[1]


@pytest.mark.parametrize("some", [False, True])
def test_without_counts_of_tokens_the_server_is_named_and_with_some_all_are_wanted(
    some: bool, servers_of: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without them, lost and repeated events cannot be noticed."""
    (server,) = servers_of("vllm")
    altered(lambda _, lines: [line.replace(b'"usage"', b'"other"') for line in lines], nth=3 if some else 1)(server)
    run = right_run_on(engine_at(server), tmp_path)
    assert bool(run.failed) == some
    assert caplog.text.count("lost or repeated events") == (not some)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_in_a_pool_the_work_of_a_busy_server_goes_elsewhere(dialect: str, servers_of: Servers, tmp_path: Path) -> None:
    servers = servers_of(dialect, 2)
    first(10**9, status(429))(servers[0])
    pool = Pool([engine_at(server, unavailable_seconds=60.0) for server in servers])
    run = right_run_on(pool, tmp_path)
    assert len(run.trained) == ROLLOUTS and not run.failed
    assert not pool.lost


@pytest.mark.parametrize("dialect", DIALECTS)
def test_in_a_pool_a_server_that_restarted_costs_nothing(dialect: str, servers_of: Servers, tmp_path: Path) -> None:
    """It is taken out, unless its requests move and it gets its next weights before it is asked who it is."""
    servers = servers_of(dialect, 2)
    servers[0].restart_at = 1
    pool = Pool([engine_at(server) for server in servers])
    assert len(right_run_on(pool, tmp_path).trained) == ROLLOUTS
    assert all(place == 0 and "restarted" in reason for place, reason in pool.lost.items())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_that_always_fails_ends_the_run(
    dialect: str, servers_of: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_streams, "FEWEST_FAULTS", 12)
    (server,) = servers_of(dialect)
    altered(lambda server, lines: [b"[]"], nth=1)(server)
    with closing(engine_at(server)) as engine:
        run = run_on(engine, tmp_path)
    assert isinstance(run.error, EngineDied) and "requests all failed" in str(run.error) and "JSON" in str(run.error)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_that_restarts_while_nothing_runs_gets_the_next_weights(
    dialect: str, servers_of: Servers, tmp_path: Path
) -> None:
    (server,) = servers_of(dialect)
    with closing(engine_at(server)) as engine:
        engine.update_weights(tmp_path, 1)
        server.restart()
        engine.update_weights(tmp_path, 2)
        assert server.shift == 0
        server.restart()
        with pytest.raises(EngineDied, match="a different server"):
            engine.update_weights(None, 3)
