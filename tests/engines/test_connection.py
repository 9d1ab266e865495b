"""The HTTP client of servers, over TLS and byte by byte."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed: pip install '.[http]'")

from sortedrl.engines.servers.connection import NotReached, ServerConnection
from sortedrl.engines.servers.credentials import Credentials
from sortedrl.engines.servers.messages import Malformed

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EVENTS = [b'data: {"n": 1}\n\n', b': a comment\n\ndata: {"n": 2}\r\n\r\n', b"data: [DONE]\n\n"]


def answered(response: bytes, use: Callable[[ServerConnection], Any], certificate: Path | None = None) -> Any:
    """What `use` makes of a connection to a server that sends this response, one byte at a time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for byte in response:
            writer.write(bytes([byte]))
            await writer.drain()
        writer.close()

    async def both() -> Any:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if certificate else None
        if tls is not None and certificate is not None:
            tls.load_cert_chain(certificate)
        server = await asyncio.start_server(serve, "localhost", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await use(ServerConnection(Credentials(f"http{'s' if tls else ''}://localhost:{port}")))

    return asyncio.run(both())


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    file = tmp_path / "server.pem"
    request = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    command = ["openssl", *request.split(), "-keyout", file, "-out", tmp_path / "c"]
    subprocess.run(command, check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + (tmp_path / "c").read_bytes())
    return file


def test_a_known_certificate_is_accepted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    response = HEAD + b'Content-Length: 8\r\n\r\n{"a": 1}'
    assert answered(response, lambda server: server.call("GET", "/"), certificate) == {"a": 1}


def test_a_server_with_an_unknown_certificate_gets_nothing(certificate: Path) -> None:
    with pytest.raises(NotReached, match="certificate"):
        answered(b"", lambda server: server.call("GET", "/"), certificate)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_events_arrive_whole_from_a_stream_in_single_bytes(is_chunked: bool) -> None:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*EVENTS, b""])
    how, body = (b"Transfer-Encoding: chunked\r\n", chunks) if is_chunked else (b"", b"".join(EVENTS))
    taken: list[bytes] = []
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    response = early + b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n" + how + b"\r\n" + body

    def take(event: bytes) -> bool:
        taken.append(event.strip())
        return False

    assert answered(response, lambda server: server.stream("/", {}, take)) is False
    assert taken == [b'{"n": 1}', b'{"n": 2}']


def test_a_response_that_breaks_off_is_an_error() -> None:
    for rest in (b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", b""):
        with pytest.raises(OSError, match="closed the connection"):
            answered(HEAD + rest, lambda server: server.call("GET", "/"))


def test_a_wrong_length_is_an_invalid_message() -> None:
    lengths = [b"Content-Length: %s\r\n\r\n{}" % wrong for wrong in (b"many", b"-5")]
    for rest in (*lengths, *(b"Transfer-Encoding: chunked\r\n\r\n%s\r\n{}" % wrong for wrong in (b"long", b"-2"))):
        with pytest.raises(Malformed, match="not a length"):
            answered(HEAD + rest, lambda server: server.call("GET", "/"))
