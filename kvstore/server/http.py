"""The node's HTTP port: `/metrics`, `/health`, `/status`, and a page for people at `/`."""

from __future__ import annotations

import html
import json
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvstore.core.errors import ConfigError
from kvstore.core.sizes import format_size
from kvstore.observe.metrics import CONTENT_TYPE, render

REQUEST_TIMEOUT_S = 10.0

Status = Mapping[str, Any]


class StatusServer(ThreadingHTTPServer):
    """Answers from the node's status of the moment.

    Raises:
        ConfigError: the address is taken or not ours.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, status: Callable[[], Status]) -> None:
        self.status = status
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"HTTP port {host}:{port}: {error.strerror}") from error


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer  # pyright: ignore[reportIncompatibleVariableOverride] -- the base says BaseServer; ours is made here only
    timeout = REQUEST_TIMEOUT_S
    server_version = "kvstore"
    sys_version = ""

    def do_GET(self) -> None:
        """One page per path."""
        status = self.server.status()
        match self.path.partition("?")[0]:
            case "/health":
                healthy = status["healthy"]
                text = b"ok\n" if healthy else b"degraded: a shard does not answer\n"
                self._send(text, "text/plain", HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE)
            case "/status":
                self._send(json.dumps(status, indent=2).encode() + b"\n", "application/json")
            case "/metrics":
                self._send(render(status), CONTENT_TYPE)
            case "/":
                self._send(_page(status).encode(), "text/html; charset=utf-8")
            case _:
                self._send(b"there are /, /health, /status and /metrics\n", "text/plain", HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the base class named it
        """Health checks every second are no news."""

    def _send(self, body: bytes, content_type: str, code: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;width:100%;margin:1rem 0}td,th{padding:.35rem .7rem;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}meter{width:12rem}code{background:#f3f3f3;padding:0 .3rem}"
)


def _page(status: Status) -> str:
    shards = "".join(_shard_row(shard) for shard in status["shards"])
    spaces = [space for shard in status["shards"] for space in shard["namespaces"]]
    rows = "".join(
        f"<tr><td>{html.escape(space['label'])}<td>{space['blocks']:,}<td>{format_size(space['bytes'])}"
        for space in spaces
    )
    down = f"<p><b>{len(status['shards_down'])} shards do not answer.</b>" if status["shards_down"] else ""
    return (
        f"<!doctype html><meta charset=utf-8><title>kvstore node {html.escape(status['node_id'][:8])}</title>"
        f"<meta http-equiv=refresh content=5><style>{_STYLE}</style>"
        f"<h1>kvstore node {html.escape(status['node_id'][:8])}</h1>"
        f"<p>Version {html.escape(status['version'])}, up {status['uptime_s']:,.0f} s, started {status['epoch']} times. "
        f"See <a href=/status>/status</a>, <a href=/metrics>/metrics</a>, <a href=/health>/health</a>.{down}"
        "<table><tr><th>shard<th>pool<th>in use<th>blocks<th>evicted<th>clients<th>hit blocks"
        f"{shards}</table>"
        f"<table><tr><th>namespace<th>blocks<th>bytes{rows or '<tr><td>nothing stored yet<td><td>'}</table>"
    )


def _shard_row(shard: Mapping[str, Any]) -> str:
    used = shard["bytes"]["committed"] + shard["bytes"]["reserved"]
    counters = shard["counters"]
    asked = counters["client_lookup_blocks"]
    share = f"{counters['client_hit_blocks'] / asked:.0%}" if asked else "–"
    return (
        f"<tr><td>{shard['shard']}<td>{format_size(shard['pool_bytes'])}"
        f"<td><meter max={shard['bytes']['capacity']} value={used}></meter> {format_size(used)}"
        f"<td>{shard['gauges']['resident_blocks']:,}<td>{counters['evicted_blocks']:,}"
        f"<td>{shard['gauges']['sessions']}<td>{share}"
    )
