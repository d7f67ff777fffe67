"""`kvstore-server`: reads the configuration, starts a node, ends it on a signal."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from kvstore.core.errors import KvStoreError
from kvstore.core.sizes import format_size
from kvstore.server.config import ServerConfig, add_flags, load
from kvstore.server.node import Node

_EXAMPLES = """examples:
  kvstore-server                                   one shard on loopback, a quarter of the available memory
  kvstore-server --shards 4 --dram 64GiB           four shards of 16 GiB
  kvstore-server --host 10.0.0.5 --auth-token S    reachable from other hosts, with a shared secret
  KVSTORE_DRAM=8GiB kvstore-server config show     the settings in force, and nothing started

Every setting can come from a TOML file (--config), from KVSTORE_* variables, or from flags; the last one wins.
"""


class _Parser(argparse.ArgumentParser):
    """Complains in one line, and names what is allowed where a flag is unknown."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            message = f"unknown flag {unknown.split()[0]!r}; allowed are {', '.join(flags)}"
        self.exit(2, f"{self.prog}: {message} (--help explains)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = _Parser(
        prog="kvstore-server",
        description="A node of the distributed KV cache store.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvstore-server {version('kvstore-llm')}")
    parser.add_argument("action", nargs="*", metavar="config show", help="print the settings in force and exit")
    parser.add_argument("--json", action="store_true", help="with `config show`: as JSON")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.action not in ([], ["config", "show"]):
        parser.error(f"unknown action {' '.join(arguments.action)!r}; there is only `config show`")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        config = load(arguments, os.environ)
        if arguments.action:
            _show(config, as_json=arguments.json)
            return 0
        return _run(config)
    except KvStoreError as error:
        print(f"kvstore-server: {error}", file=sys.stderr)
        return 2


def _show(config: ServerConfig, *, as_json: bool) -> None:
    shown = config.show()
    if as_json:
        print(json.dumps(shown, indent=2))
        return
    for name, value in shown.items():
        print(f"{name:14} = {value}")


def _run(config: ServerConfig) -> int:
    node = Node(config, version("kvstore-llm"))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: node.request_stop())
    node.start()
    try:
        shards = f"{config.shards} shard{'s' if config.shards > 1 else ''}"
        print(f"kvstore-server {version('kvstore-llm')}: {shards} of {format_size(config.pool_bytes_per_shard)} DRAM")
        for name, endpoint in node.endpoints().items():
            print(f"  {name:8} {endpoint}")
        print("ready", flush=True)
        node.wait()
        print("stopping", flush=True)
    finally:
        node.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
