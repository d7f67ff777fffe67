"""Generates `kvstore/wire/_pb` from `proto/kvstore/v1`, or with `--check` says whether the committed copy is fresh.

The generator's versions are pinned (`dev` extra, constraints.txt), so equal .proto files give equal bytes everywhere.
protoc sees the proto folder under the name of the Python package: the generated files then import one another as
`kvstore.wire._pb` by themselves, and nothing has to be rewritten afterwards. gRPC's own generator writes no type stubs
for the services, so mypy-protobuf writes those, and only those.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto" / "kvstore" / "v1"
PACKAGE_DIR = Path("kvstore/wire/_pb")
STUB_PLUGIN = Path(sys.executable).parent / "protoc-gen-mypy_grpc"  # not resolved: a venv's python is a symlink
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(into: Path) -> None:
    """Writes the generated modules to `into/kvstore/wire/_pb`. Exits with protoc's own message if a file is wrong."""
    sources = sorted(path.name for path in PROTO_DIR.glob("*.proto"))
    if not sources:
        sys.exit(f"generate_proto: no .proto file in {PROTO_DIR.relative_to(ROOT)}")
    protoc = subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            f"--proto_path={PACKAGE_DIR}={PROTO_DIR}",
            f"--plugin=protoc-gen-mypy_grpc={STUB_PLUGIN}",
            f"--python_out={into}",
            f"--pyi_out={into}",
            f"--grpc_python_out={into}",
            f"--mypy_grpc_out=quiet:{into}",
            *(str(PACKAGE_DIR / name) for name in sources),
        ],
        check=False,
    )
    if protoc.returncode:
        sys.exit("generate_proto: protoc failed, see above")


def generated_files(root: Path) -> dict[str, bytes]:
    """Every generated module under `root`, by name, with its content."""
    folder = root / PACKAGE_DIR
    return {path.name: path.read_bytes() for pattern in GENERATED for path in folder.glob(pattern)}


def stale_files() -> list[str]:
    """Names of the committed files that are not what the .proto files give now: changed, missing or left over."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = generated_files(Path(scratch))
    committed = generated_files(ROOT)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> None:
    """Entry point of `make proto` and of the freshness check in `make check`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a generated file is not fresh")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    stale = stale_files()
    if stale:
        sys.exit(
            f"generate_proto: not fresh in {PACKAGE_DIR}: {', '.join(stale)}; run `make proto` and commit the result"
        )
    sys.stdout.write("generated protobuf is fresh\n")


if __name__ == "__main__":
    main()
