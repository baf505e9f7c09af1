"""Plans are simulated compiled: see tests/fakes/planning.py."""

from tests.fakes.planning import compiled_plans, one_run_of_each_alone  # noqa: F401 - used by all
