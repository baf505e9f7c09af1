"""``drain``: take an instance out of a running gateway, or put it back."""

import argparse
import sys
import time
from typing import Any
from urllib.parse import quote

from hetero_gateway.lab.load.admin import change_document, fetch_document, printable

_LOOK_EVERY_S = 0.5


def run(args: argparse.Namespace) -> int:
    change: dict[str, Any] = {"draining": not args.undo}
    if args.deadline is not None:
        change["deadline_s"] = args.deadline
    path = f"/admin/instances/{quote(args.instance, safe='')}"
    changed = change_document(args.url, args.admin_key_env, path, change)
    left = sum(row["in_flight"] for row in changed.get("places", [changed]))
    until_s = time.monotonic() + (args.wait or 0.0)
    while left and time.monotonic() < until_s:
        time.sleep(_LOOK_EVERY_S)
        rows = fetch_document(args.url, args.admin_key_env, "/admin/instances", {})["instances"]
        # An instance that its source has removed disappears once it has no requests left.
        left = sum(
            row["in_flight"] for row in rows if args.instance in (row["id"], row.get("instance"))
        )
    what = "takes requests again" if args.undo else f"is drained: {left} requests are left"
    print(f"{printable(args.instance)} {what}", file=sys.stderr)
    return 1 if left and args.wait else 0
