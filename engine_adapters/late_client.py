"""Clients for an engine that starts although its store is not there yet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import kvstore
from kvstore import Client, Namespace, Unavailable

__all__ = ["LateClients"]

RETRY_S = 1.0

_log = logging.getLogger(__name__)


class LateClients:
    """A client for each of some namespaces, connected now or, where the store can't be reached, in the background.

    Args:
        namespaces: whose blocks.
        connection: further arguments of `kvstore.connect`.

    Raises UsageError, ConfigError: the store refuses us, or an argument is wrong. That would not get better.
    """

    def __init__(self, namespaces: Sequence[Namespace], connection: Mapping[str, Any]) -> None:
        self._namespaces = namespaces
        self._connection = connection
        self._clients: list[Client] | None = None
        self._closed = threading.Event()
        self._handing_over = threading.Lock()
        try:
            self._clients = self._connect()
        except Unavailable as fault:
            _log.warning("no store yet, going on without: %s", fault)
            threading.Thread(target=self._keep_trying, name="kvstore-connect", daemon=True).start()

    @property
    def clients(self) -> list[Client] | None:
        """The clients, once the store was reached and until `close`. They reconnect by themselves."""
        return self._clients

    @property
    def first(self) -> Client | None:
        """That of the first namespace, likewise."""
        clients = self._clients
        return clients[0] if clients else None

    def close(self) -> None:
        """End all sessions, or the waiting for some. Idempotent."""
        with self._handing_over:
            self._closed.set()
            clients, self._clients = self._clients, None
        for client in clients or ():
            client.close()

    def _connect(self) -> list[Client]:
        clients: list[Client] = []
        try:
            for namespace in self._namespaces:
                clients.append(kvstore.connect(namespace=namespace, **self._connection))  # noqa: PERF401 - what is open must be closed
        except BaseException:  # Ctrl-C too: what is open by now has nobody else to close it
            for client in clients:
                client.close()
            raise
        return clients

    def _keep_trying(self) -> None:
        while not self._closed.wait(RETRY_S):
            try:
                clients = self._connect()
            except Unavailable:
                continue
            except kvstore.KvStoreError as refusal:
                _log.error("the store can't be used: %s", refusal)
                return
            with self._handing_over:
                if not self._closed.is_set():
                    self._clients = clients
                    _log.info("the store is there now")
                    return
            for client in clients:  # nobody will take them any more
                client.close()
            return
