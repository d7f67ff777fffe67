import inspect
import pickle
import re

import pytest

from kvstore.core import errors

TREE_LINE = re.compile(r"^( {4}|[ │]*[├└]── )(\w+)")


def drawn_tree() -> dict[str, str | None]:
    """Each error of the module docstring's picture, and its parent there."""
    parents: dict[str, str | None] = {}
    path: list[tuple[int, str]] = []
    for line in inspect.getdoc(errors).splitlines()[1:]:  # pyright: ignore[reportOptionalMemberAccess] - it has one
        match = TREE_LINE.match(line)
        if match is None:
            continue
        depth = match.start(2)
        while path and path[-1][0] >= depth:
            path.pop()
        parents[match[2]] = path[-1][1] if path else None
        path.append((depth, match[2]))
    return parents


def test_the_drawn_tree_is_the_tree() -> None:
    real = {name: getattr(errors, name) for name in errors.__all__}
    assert set(drawn_tree()) == set(real)
    for name, parent in drawn_tree().items():
        assert real[name].__bases__[0] is (Exception if parent is None else real[parent])


def test_a_usage_error_is_a_value_error_and_nothing_else_is() -> None:
    for name in errors.__all__:
        error: type[errors.KvStoreError] = getattr(errors, name)
        assert issubclass(error, ValueError) == issubclass(error, errors.UsageError)


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_crosses_a_process_boundary(name: str) -> None:
    error = getattr(errors, name)("what went wrong")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == "what went wrong"
