"""One namespace of the store, connected as soon as there is one: an engine may start before its store."""

from __future__ import annotations

import logging
import threading

import kvstore
from engine_adapters.sglang.options import Options
from kvstore import Client, KvStoreError, Namespace, Unavailable

__all__ = ["StoreLink"]

RETRY_S = 1.0

log = logging.getLogger(__name__)


class StoreLink:
    """A client, or None for as long as no node has answered yet. From the first answer on the client reconnects itself.

    Raises UsageError where a node refuses us: that no waiting will change.
    """

    def __init__(self, namespace: Namespace, options: Options) -> None:
        self.namespace = namespace
        self._options = options
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._client: Client | None = None
        try:
            self._client = self._connect()
        except Unavailable as fault:
            log.warning("no store at %s (%s): everything is a miss until there is one", options.address, fault)
            threading.Thread(target=self._keep_trying, name="kvstore-connect", daemon=True).start()

    @property
    def client(self) -> Client | None:
        """The client, if there is a store."""
        return self._client

    def close(self) -> None:
        """End the session, or the waiting for one. Idempotent."""
        with self._lock:
            self._closed.set()
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> Client:
        options = self._options
        return kvstore.connect(
            options.address if isinstance(options.address, str) else list(options.address),
            namespace=self.namespace,
            timeout_s=options.timeout_s,
            transport=options.transport,
            checksums=options.checksums,
        )

    def _keep_trying(self) -> None:
        while not self._closed.wait(RETRY_S):
            try:
                client = self._connect()
            except Unavailable:
                continue
            except KvStoreError as fault:  # wrong token, other key scheme: it stays a miss, and the engine runs on
                log.error("the store at %s refuses this engine: %s", self._options.address, fault)
                return
            with self._lock:
                if not self._closed.is_set():
                    self._client = client
                    log.info("the store at %s is there now", self._options.address)
                    return
            client.close()
            return
