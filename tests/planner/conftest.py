"""Plans are simulated compiled: see tests/fakes/planning.py."""

from tests.fakes.planning import compiled_plans  # noqa: F401 - used by all
