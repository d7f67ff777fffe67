"""Where Mooncake's engine can't be had, its tests say so and are skipped."""

import pytest

from kvstore.transport.mooncake_engine import engine_problem

needs_mooncake = pytest.mark.skipif(bool(engine_problem()), reason=engine_problem() or "it is there")
