"""Serves the latest metrics of a run over HTTP in the Prometheus text format.

A tracker like any other (observe/trackers.py): it receives the lines of metrics.jsonl and serves the latest value of
each metric as `sortedrl_NAME`. It listens on the loopback address only; for access from other machines, set up a proxy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from sortedrl.core.configuration import ConfigurationError
from sortedrl.observe.trackers import METRICS, STEP

LOOPBACK = "127.0.0.1"


class Endpoint:
    """http://127.0.0.1:PORT/metrics. Port 0 picks a free port; see `url`."""

    name = "prometheus"

    def __init__(self, port: int) -> None:
        values: dict[str, float] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path == "/metrics"
                body = exposition(dict(values)).encode() if is_known else b"metrics are at /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *parts: object) -> None:
                """Silent: scrapes come every few seconds."""

        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        except OSError as error:
            fix = "Use another port, or 0 for a free one."
            raise ConfigurationError("prometheus_port", port, f"{error.strerror}", fix) from None
        self._values = values
        self.url = f"http://{LOOPBACK}:{self._server.server_port}/metrics"
        Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def log(self, update: int, values: Mapping[str, float]) -> None:
        self._values |= {STEP: update, **values}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def exposition(values: Mapping[str, float]) -> str:
    """Metrics in the text format. Numbers are printed with full precision."""
    helps = {STEP: "updates done"} | {name: f"{unit}, see docs/metrics.md" for name, unit in METRICS.items()}
    return "".join(
        f"# HELP sortedrl_{name} {text}\n# TYPE sortedrl_{name} gauge\nsortedrl_{name} {_number(values[name])}\n"
        for name, text in helps.items()
        if name in values
    )


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
