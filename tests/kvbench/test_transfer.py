"""`kvbench transfer` against a real server: small runs are complete and checked, damage and loss never go unnoticed."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvbench.cli import main
from kvbench.errors import BenchError
from kvbench.memory import SharedArena
from kvbench.plan import Case, Group, Op, Transport
from kvbench.session import I64, Fill, Measure, Session, SessionSetup, Verify
from kvstore.testing.cluster import ServerProcess

BLOCK_BYTES = 64 << 10
BLOCKS = 8
BATCH = 4
GROUP = Group(BLOCK_BYTES, BLOCKS, layers=16, cases=())
READS = [
    (Op.GET, Transport.SHM),
    (Op.GET_INTO, Transport.SHM),
    (Op.VIEW, Transport.SHM),
    (Op.GET, Transport.TCP),
    (Op.GET_INTO, Transport.TCP),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB") as server:
        yield server


@pytest.fixture
def session(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session of this process on keys of its own."""
    far = SharedArena("kvbench-test", BLOCKS * BLOCK_BYTES)
    setup = SessionSetup(
        address=server.address,
        run_id=request.node.name,
        seed=3,
        far_path=far.path,
        arena_bytes=BLOCKS * BLOCK_BYTES,
        raw_port=None,
        connections=1,
    )
    with setup.open() as session:
        yield session
    far.close()


def spoil(session: Session, ids: I64, place: int, byte: int) -> None:
    """Put the block at `place` again, with one bit of one byte flipped."""
    scene = session.scene(GROUP)
    keys = scene.keys(ids[place : place + 1], Transport.SHM)
    row = scene.rows[place].copy()
    row[byte] ^= 1
    scene.client(Transport.SHM).delete(keys)
    assert scene.client(Transport.SHM).put(keys, row[None]).stored == 1


def resident_blocks(server: ServerProcess) -> int:
    with urllib.request.urlopen(f"{server.http_address}/status", timeout=5) as answer:
        return json.load(answer)["shards"][0]["gauges"]["resident_blocks"]


@pytest.mark.parametrize(("op", "transport"), READS)
def test_one_flipped_bit_in_the_store_is_noticed_by_every_read(session: Session, op: Op, transport: Transport) -> None:
    ids = Fill(GROUP, Transport.SHM).run(session)
    spoil(session, ids, place=5, byte=BLOCK_BYTES - 1)
    measured = Measure(GROUP, Case(op, transport, BLOCK_BYTES, BATCH), ids, seconds=0.01).run(session)
    assert measured.damaged > 0


@pytest.mark.parametrize(("op", "transport"), READS)
def test_intact_blocks_pass_every_read(session: Session, op: Op, transport: Transport) -> None:
    ids = Fill(GROUP, Transport.SHM).run(session)
    measured = Measure(GROUP, Case(op, transport, BLOCK_BYTES, BATCH), ids, seconds=0.01).run(session)
    assert measured.damaged == 0
    assert measured.compared >= BATCH * len(measured.samples.op_s)


@pytest.mark.parametrize(("op", "transport"), READS)
def test_a_missing_block_ends_the_run_instead_of_counting_as_read(
    session: Session, op: Op, transport: Transport
) -> None:
    ids = Fill(GROUP, Transport.SHM).run(session)
    scene = session.scene(GROUP)
    assert scene.client(Transport.SHM).delete(scene.keys(ids[2:3], Transport.SHM)) == 1
    with pytest.raises(BenchError, match=f"^{op} found 3 of 4 blocks"):
        Measure(GROUP, Case(op, transport, BLOCK_BYTES, BATCH), ids, seconds=0.01).run(session)


@pytest.mark.parametrize("transport", list(Transport))
def test_puts_write_a_new_version_each_round_and_every_block_reads_back_whole(
    session: Session, transport: Transport
) -> None:
    ids = Fill(GROUP, transport).run(session)
    case = Case(Op.PUT, transport, BLOCK_BYTES, BATCH)
    after = Measure(GROUP, case, ids, seconds=0.01).run(session).ids
    assert np.array_equal(after % BLOCKS, ids)
    assert Verify(GROUP, transport, after).run(session) == 0


def test_a_block_that_a_put_damaged_is_found_when_read_back(session: Session) -> None:
    ids = Fill(GROUP, Transport.SHM).run(session)
    spoil(session, ids, place=0, byte=4097)
    assert Verify(GROUP, Transport.SHM, ids).run(session) == 1


def test_a_small_run_starts_a_server_measures_every_combination_and_writes_all(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "transfer.json"
    flags = ["--sizes", "64KiB", "--batch", "1,4", "--footprint", "1MiB", "--seconds", "0.02", "--seed", "5"]
    assert main(["transfer", *flags, "--json", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("tcp get_into 64KiB x 4: ")
    assert "[14/14]" in captured.err
    value = json.loads(out.read_text())
    assert value["checked"] is True
    assert value["seed"] == 5
    rows = value["rows"]
    assert len({(row["op"], row["transport"], row["batch"]) for row in rows}) == len(rows) == 14
    for row in rows:
        assert row["checked"] is True
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["gib_s"] > 0
        has_limit = row["op"] != "view"
        assert (row["limit_gib_s"] is not None) == has_limit
        assert (row["ratio_to_limit"] is not None) == has_limit


def test_a_running_server_is_measured_and_left_as_it_was(server: ServerProcess) -> None:
    flags = [
        "--ops",
        "put,get_into",
        "--sizes",
        "64KiB",
        "--batch",
        "4",
        "--transport",
        "shm",
        "--footprint",
        "1MiB",
        "--seconds",
        "0.02",
    ]
    before = resident_blocks(server)
    assert main(["transfer", *flags, "--server", server.address]) == 0
    assert resident_blocks(server) == before


def test_a_server_that_is_not_there_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(dram="64MiB") as gone:
        address = gone.address
    flags = ["--ops", "get", "--sizes", "64KiB", "--batch", "1", "--transport", "shm", "--footprint", "1MiB"]
    assert main(["transfer", *flags, "--server", address]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("kvbench transfer: writer: ")
