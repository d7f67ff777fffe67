"""`kvstorectl`: what an operator asks a node, and what it answers, as text for people or as JSON.

Exit codes: 0 yes, done; 1 the answer is "no" (a block is missing, the node is not healthy); 2 wrong usage, or the node
can't be reached; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any, Final, NoReturn

from kvstore.client.doctor import Finding, Target, complete, examine, ping
from kvstore.cluster.membership import LOCAL, StaticMembership
from kvstore.core.errors import ConfigError, KvStoreError, UsageError
from kvstore.core.keys import BlockKeys
from kvstore.core.sizes import parse_size
from kvstore.core.states import BlockState
from kvstore.wire.control import TenantQuota

_EXIT_NO = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_KEYS_PER_CALL: Final = 4096  # what a node takes in one administrative call
_PREFIX_DIGITS_MIN: Final = 4
_DIGEST_DIGITS: Final = 32
_ABSENT: Final = "-"

_DESCRIPTION = "Ask a kvstore node, and look after it."
_EPILOG = """\
exit codes: 0 yes or done, 1 the answer is no (a block is missing, the node is not healthy),
2 wrong usage or the node can't be reached

KVSTORE_ADDRESS and KVSTORE_AUTH_TOKEN stand for --address and --auth-token.
"""
_STATUS_HELP = """\
examples:
  kvstorectl status                             a table of this host's node
  kvstorectl status --address 10.0.0.5:7400     of another one
  kvstorectl status --json | jq .healthy        what /status shows, on standard output

in use: slots given out, rounding and checksums included. hits: share of the blocks that clients looked up and found;
they report it every 2 seconds. evicted, refused, hits: since the shard started.
"""
_PING_HELP = """\
examples:
  kvstorectl ping                               round trips over all ways to this host's node
  kvstorectl ping --address gpu7:7400 --count 100

Exit code 1: a shard can be reached neither over shared memory nor over TCP.
"""
_QUERY_HELP = """\
examples:
  kvstorectl query 8c0d...e1:77a0...09          one key, as key:fingerprint (32:16 hexadecimal digits)
  python my_keys.py | kvstorectl query          many, separated by blanks or lines
  kvstorectl query --json < keys.txt

BlockKeys.hex() in the SDK writes keys like this. Exit code 1: a block is not committed.
"""
_PIN_HELP = """\
examples:
  kvstorectl pin < system_prompt_keys.txt       keep the blocks of a system prompt in memory
  kvstorectl unpin < system_prompt_keys.txt

Pinned blocks are not evicted. Pins are counted: as many unpins as pins make a block evictable again. A pin does
not survive a restart of the shard, and deleting or flushing a block ends it. Exit code 1: a block is not there.
"""
_FLUSH_HELP = """\
examples:
  kvstorectl status                             shows the namespaces' digests
  kvstorectl flush 7053cdfe                     asks, then removes that namespace's blocks
  kvstorectl flush 7053cdfe --yes --json        from a script
  kvstorectl flush --all --yes                  removes everything

Without --yes a terminal is asked, and anything else is refused: also with --json. Blocks that a reader holds
stay readable for that reader until it lets go; nobody else finds them any more.
"""
_QUOTA_HELP = """\
examples:
  kvstorectl quota                                        what each tenant has and may have
  kvstorectl quota 3f1c0e77a2b94d10 --dram 8GiB --dram-share 2GiB
  kvstorectl quota 3f1c0e77a2b94d10 --disk 200GiB         the other amounts stay as they are
  kvstorectl quota default --dram-share 4GiB              of clients without a tenant salt
  kvstorectl quota 3f1c0e77a2b94d10 --none                no quota any more

A tenant is named as the table names it (Namespace.tenant_id in the SDK). A quota may come before its tenant.
limit: never more than this; at its limit a tenant makes room from its own blocks. share: others never evict it below
this. 0 takes one of them away. Quotas are of this node, hold at once and survive restarts.
"""
_DOCTOR_HELP = """\
examples:
  kvstorectl doctor                             on the host of the server, then on a host of a worker
  kvstorectl doctor --json > doctor.json        for a bug report

Writes one scratch block per shard and way, and deletes it again. In a full pool that evicts one block.
Exit code 1: a check failed; a warning alone does not count.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace, Target], int] = options.run
    try:
        target = Target(address=_one_address(options.address), auth_token=options.auth_token, timeout_s=options.timeout)
        code = run(options, target)
        sys.stdout.flush()  # here, so that a reader who has left is met below
        return code
    except KvStoreError as error:
        print(f"kvstorectl {options.command}: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# --- status ----------------------------------------------------------------------------------------------------------


def _status(options: argparse.Namespace, target: Target) -> int:
    with target.control() as control:
        status = control.stats()
    if options.json:
        _print_json(status)
    else:
        print("\n".join(status_lines(status)))
    return 0 if status["healthy"] else _EXIT_NO


def status_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """A node's status for people."""
    health = "healthy" if status["healthy"] else "NOT HEALTHY"
    started = f"{status['epoch']} time{'s' if status['epoch'] != 1 else ''}"
    yield f"node {status['node_id'][:8]}: {health}"
    yield f"version {status['version']}, up {_duration(status['uptime_s'])}, started {started}, {status['key_algorithm']} keys"
    yield "   ".join(f"{name} {endpoint}" for name, endpoint in status["endpoints"].items())
    yield ""
    head = ("shard", "pool", "in use", "", "blocks", "pinned", "evicted", "refused", "hits", "sessions")
    rows = [_shard_cells(str(shard["shard"]), [shard]) for shard in status["shards"]]
    if len(rows) > 1:
        rows.append(_shard_cells("all", status["shards"]))
    yield from _table(head, rows, left=1)
    for number in status["shards_down"]:
        yield f"{number}      does not answer"
    yield ""
    spaces = namespaces(status)
    if not spaces:
        yield "no blocks yet"
        return
    digits = _digits([space["digest"] for space in spaces])
    cells = [(s["digest"][:digits], f"{s['blocks']:,}", _about(s["bytes"]), s["label"]) for s in spaces]
    yield from _table(("namespace", "blocks", "bytes", "of"), cells, left=1, last_left=True)


def _shard_cells(name: str, shards: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    def total(*path: str) -> int:
        return sum(_at(shard, path) for shard in shards)

    used, asked = total("bytes", "committed") + total("bytes", "reserved"), total("counters", "client_lookup_blocks")
    return (
        name,
        _about(total("pool_bytes")),
        _about(used),
        f"{used / total('bytes', 'capacity'):.0%}",
        f"{total('gauges', 'resident_blocks'):,}",
        f"{total('gauges', 'pinned_blocks'):,}",
        f"{total('counters', 'evicted_blocks'):,}",
        f"{total('counters', 'refused_puts'):,}",
        f"{total('counters', 'client_hit_blocks') / asked:.1%}" if asked else _ABSENT,
        f"{total('gauges', 'sessions'):,}",
    )


def _at(value: Any, path: Sequence[str]) -> int:
    for name in path:
        value = value[name]
    return int(value)


def namespaces(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Blocks and bytes of each namespace over all shards, the largest first."""
    found: dict[str, dict[str, Any]] = {}
    for shard in status["shards"]:
        for part in shard["namespaces"]:
            whole = found.setdefault(part["digest"], {**part, "blocks": 0, "bytes": 0})
            whole["blocks"] += part["blocks"]
            whole["bytes"] += part["bytes"]
    return sorted(found.values(), key=lambda space: (-space["bytes"], space["digest"]))


# --- ping ------------------------------------------------------------------------------------------------------------


def _ping(options: argparse.Namespace, target: Target) -> int:
    ways = ping(target, options.count)
    reached = complete(ways)
    if options.json:
        _print_json({"reached": reached, "ways": [asdict(way) for way in ways]})
    else:
        cells = [
            (
                way.way,
                _ABSENT if way.shard is None else str(way.shard),
                way.to,
                _ABSENT if way.connect_ms is None else f"{way.connect_ms:.2f} ms",
                _ABSENT if way.round_trip_ms is None else f"{way.round_trip_ms:.3f} ms",
                way.error,
            )
            for way in ways
        ]
        print("\n".join(_table(("way", "shard", "to", "connect", "round trip", ""), cells, left=3, last_left=True)))
    return 0 if reached else _EXIT_NO


# --- blocks by key ---------------------------------------------------------------------------------------------------


def _query(options: argparse.Namespace, target: Target) -> int:
    keys = _keys(options.keys)
    with target.control() as control:
        found = [block for part in _parts(keys) for block in control.query(part)]
    blocks = [
        {
            "key": text,
            "state": block.state.name.lower(),
            "shard": None if block.state == BlockState.ABSENT else block.shard,
            "layers_ready": block.layers_ready,
            "size_bytes": block.size_bytes,
        }
        for text, block in zip(keys.hex(), found, strict=True)
    ]
    committed = sum(block.state == BlockState.COMMITTED for block in found)
    if options.json:
        _print_json({"asked": len(keys), "committed": committed, "blocks": blocks})
    else:
        cells = [
            (
                str(block["key"]),
                str(block["state"]),
                *((str(block["shard"]), str(block["layers_ready"])) if block["size_bytes"] else (_ABSENT, _ABSENT)),
                _about(int(str(block["size_bytes"]))) if block["size_bytes"] else _ABSENT,
            )
            for block in blocks
        ]
        print("\n".join(_table(("key", "state", "shard", "layers", "size"), cells, left=2)))
        print(f"{committed:,} of {len(keys):,} committed")
    return 0 if committed == len(keys) else _EXIT_NO


def _pin(options: argparse.Namespace, target: Target) -> int:
    return _pin_or_unpin(options, target, on=True)


def _unpin(options: argparse.Namespace, target: Target) -> int:
    return _pin_or_unpin(options, target, on=False)


def _pin_or_unpin(options: argparse.Namespace, target: Target, *, on: bool) -> int:
    keys = _keys(options.keys)
    with target.control() as control:
        there = sum(control.pin(part, on=on) for part in _parts(keys))
    if options.json:
        _print_json({"asked": len(keys), "there": there})
    else:
        done = "pinned" if on else "unpinned"
        print(f"{there:,} of {len(keys):,} are there and {done}")
    return 0 if there == len(keys) else _EXIT_NO


def _keys(texts: Sequence[str]) -> BlockKeys:
    """Keys from the command line, or from standard input."""
    if not texts or list(texts) == ["-"]:
        if sys.stdin.isatty():
            raise UsageError("no keys: name some as key:fingerprint, or pipe them in")
        texts = sys.stdin.read().split()
        if not texts:
            raise UsageError("no keys on standard input")
    return BlockKeys.from_hex(list(texts))


def _parts(keys: BlockKeys) -> Iterator[BlockKeys]:
    for first in range(0, len(keys), _KEYS_PER_CALL):
        yield keys[first : first + _KEYS_PER_CALL]


# --- flush -----------------------------------------------------------------------------------------------------------


def _flush(options: argparse.Namespace, target: Target) -> int:
    if options.all == (options.namespace is not None):
        raise UsageError("name one namespace by its digest, or --all")
    with target.control() as control:
        spaces = namespaces(control.stats())
        digest = None if options.all else _resolve(options.namespace, [space["digest"] for space in spaces])
        chosen = [space for space in spaces if digest in (None, space["digest"])]
        blocks, size = sum(space["blocks"] for space in chosen), sum(space["bytes"] for space in chosen)
        of = "all namespaces" if digest is None else f"namespace {digest[:8]}"
        if chosen and digest is not None:
            of += f" ({chosen[0]['label']})"
        if not options.yes and not _confirmed(f"{blocks:,} blocks, {_about(size)}, of {of}", options):
            print("nothing was removed", file=sys.stderr)
            return _EXIT_NO
        removed = control.flush(None if digest is None else bytes.fromhex(digest))
    if options.json:
        _print_json({"namespace": digest, "removed": removed})
    else:
        print(f"{removed:,} blocks of {of} removed")
    return 0


def _resolve(text: str, known: Sequence[str]) -> str:
    """The full digest that the user's prefix means. A full digest needs no block to be known by."""
    given = text.lower()
    if not given or set(given) - set("0123456789abcdef") or len(given) > _DIGEST_DIGITS:
        raise UsageError(
            f"namespace {text!r}: allowed is a digest of {_DIGEST_DIGITS} hexadecimal digits, or its start"
        )
    if len(given) == _DIGEST_DIGITS:
        return given
    if len(given) < _PREFIX_DIGITS_MIN:
        raise UsageError(
            f"namespace {text!r}: at least {_PREFIX_DIGITS_MIN} digits, so that nothing is met by accident"
        )
    matching = [digest for digest in known if digest.startswith(given)]
    if not matching:
        raise UsageError(
            f"namespace {text!r}: no namespace with blocks begins like this; `kvstorectl status` lists them"
        )
    if len(matching) > 1:
        raise UsageError(f"namespace {text!r}: {len(matching)} namespaces begin like this; give more digits")
    return matching[0]


def _confirmed(what: str, options: argparse.Namespace) -> bool:
    if options.json or not sys.stdin.isatty():
        raise UsageError(f"this would remove {what}; add --yes to do it")
    print(f"Remove {what}? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


# --- quotas ----------------------------------------------------------------------------------------------------------


def _quota(options: argparse.Namespace, target: Target) -> int:
    with target.control() as control:
        tenants: list[dict[str, Any]] = control.stats()["tenants"]
        amounts = {name: getattr(options, name) for name in _AMOUNTS}
        given = {name: amount for name, amount in amounts.items() if amount is not None}
        if options.tenant is None:
            if given or options.none:
                raise UsageError("name the tenant that this quota is for")
        elif not given and not options.none:
            tenants = [row for row in tenants if row["tenant"] == options.tenant]
        else:
            if given and options.none:
                raise UsageError("--none takes the whole quota away; it goes with no amount")
            known = next((row for row in tenants if row["tenant"] == options.tenant), None)
            before = {} if known is None or options.none else _amounts(known)
            control.set_quota(options.tenant, TenantQuota(**{**before, **given}))
            tenants = [row for row in control.stats()["tenants"] if row["tenant"] == options.tenant]
    if options.json:
        _print_json({"tenants": tenants})
    else:
        print("\n".join(quota_lines(tenants)))
    return 0


_AMOUNTS: Final = ("dram_limit", "dram_share", "disk_limit", "disk_share")


def _amounts(row: Mapping[str, Any]) -> dict[str, int]:
    return {f"{tier}_{what}": row[tier][what] for tier in ("dram", "disk") for what in ("limit", "share")}


def quota_lines(tenants: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tenants and their quotas for people."""
    if not tenants:
        yield "no such tenant yet"
        return
    cells = [
        (
            str(row["tenant"]),
            *(
                cell
                for tier in ("dram", "disk")
                for cell in (
                    _about(row[tier]["used"]),
                    _about(row[tier]["limit"]) if row[tier]["limit"] else _ABSENT,
                    _about(row[tier]["share"]) if row[tier]["share"] else _ABSENT,
                    f"{row[tier]['refused']:,}",
                )
            ),
        )
        for row in tenants
    ]
    head = ("tenant", "DRAM", "limit", "share", "refused", "SSD", "limit", "share", "refused")
    yield from _table(head, cells, left=1)


# --- doctor ----------------------------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace, target: Target) -> int:
    checks = examine(target)
    failed = [check for check in checks if check.finding is Finding.FAIL]
    if options.json:
        _print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            advice = f" -> {check.advice}" if check.advice else ""
            print(f"{check.finding:4}  {check.name:{width}}  {check.text}{advice}")
    if failed and failed[0].name == "control":
        return _EXIT_USAGE
    return _EXIT_NO if failed else 0


# --- text ------------------------------------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, last_left: bool = False) -> Iterator[str]:
    """Columns aligned with blanks: the first `left` ones (and the last one, if told) at their left, the rest right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if column < left or (last_left and column == len(head) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _about(size_bytes: int) -> str:
    """A size in about three digits."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f}{unit}" if size >= 100 or size.is_integer() else f"{size:.1f}{unit}"
        size /= 1024
    return f"{size:.1f}TiB"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _digits(digests: Sequence[str]) -> int:
    """How many digits tell these digests apart, 8 at least."""
    return next((n for n in range(8, _DIGEST_DIGITS) if len({d[:n] for d in digests}) == len(digests)), _DIGEST_DIGITS)


# --- command line ----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_USAGE, f"{self.prog}: {message} (--help explains)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvstorectl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvstorectl {metadata.version('kvstore-llm')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, summary, examples, add_flags in (
        ("status", _status, "what the node holds and does", _STATUS_HELP, _no_flags),
        ("ping", _ping, "how long a round trip takes, over every way to the node", _PING_HELP, _add_count),
        ("query", _query, "where blocks stand", _QUERY_HELP, _add_keys),
        ("pin", _pin, "keep blocks from being evicted", _PIN_HELP, _add_keys),
        ("unpin", _unpin, "take one pin off", _PIN_HELP, _add_keys),
        ("flush", _flush, "remove a namespace's blocks, or all", _FLUSH_HELP, _add_flush),
        ("quota", _quota, "what tenants have and may have", _QUOTA_HELP, _add_quota),
        ("doctor", _doctor, "find out what is wrong, and what to do about it", _DOCTOR_HELP, _no_flags),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(run=run)
        add_flags(command)
        _add_common(command)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.add_argument(
        "--address",
        default=os.environ.get("KVSTORE_ADDRESS", LOCAL),
        metavar="HOST:PORT",
        help="the node's control port (default: KVSTORE_ADDRESS, or this host's port 7400)",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=2.0, metavar="S", help="seconds for each call (default: %(default)s)"
    )
    parser.add_argument(
        "--auth-token",
        default=os.environ.get("KVSTORE_AUTH_TOKEN", ""),
        metavar="TOKEN",
        help="the server's auth_token (default: KVSTORE_AUTH_TOKEN, which other users can't see in a process list)",
    )


def _no_flags(parser: argparse.ArgumentParser) -> None:
    del parser


def _add_count(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--count", type=_positive, default=10, metavar="N", help="round trips over each way (default: %(default)s)"
    )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("keys", nargs="*", metavar="KEY:FP", help="block keys; from standard input unless given, or -")


def _add_flush(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("namespace", nargs="?", metavar="DIGEST", help="a namespace's digest, or its unique start")
    parser.add_argument("--all", action="store_true", help="every namespace")
    parser.add_argument("--yes", action="store_true", help="don't ask")


def _add_quota(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", nargs="?", metavar="TENANT", help="all of them unless given")
    for flag, name, text in (
        ("--dram", "dram_limit", "at most this much DRAM"),
        ("--dram-share", "dram_share", "never evicted below this by others"),
        ("--disk", "disk_limit", "at most this much of the SSD"),
        ("--disk-share", "disk_share", "never evicted below this by others"),
    ):
        parser.add_argument(flag, dest=name, type=_size, metavar="SIZE", help=text)
    parser.add_argument("--none", action="store_true", help="take the tenant's quota away")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a whole number from 1 to 100000")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.001 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 0.001 to 3600 seconds")
    return seconds


def _one_address(text: str) -> str:
    members = StaticMembership(text).nodes()
    if len(members) != 1:
        raise UsageError(f"--address {text!r}: one node at a time is asked here")
    return members[0].name


if __name__ == "__main__":
    sys.exit(main())
