"""Hypothesis settings of the core's tests: the same cases on every run, and no time limit."""

from __future__ import annotations

import hypothesis

# A busy machine must not fail a law, and a failure must come back when the test is run again.
_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile("core", _SETTINGS)
hypothesis.settings.load_profile("core")
