"""A line in the log for each change that somebody makes, or tries to make.

    audit: POST /admin/instances: 201; instance a100-3 added; by key, from 10.0.0.9

Logger ``hetero_gateway.audit``, level INFO; WARNING for what was refused. Never a key or a body.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("hetero_gateway.audit")


def audit(what: str, by: str, *, done: bool = True) -> None:
    """Note a change. ``what``: what was asked and what came of it; ``by``: who asked, and how."""
    text = f"{what}; {by}"
    # Ids and paths are a caller's: none of them may begin a line of its own.
    shown = "".join(c if c.isprintable() else "?" for c in text)
    _log.log(logging.INFO if done else logging.WARNING, "audit: %s", shown)
