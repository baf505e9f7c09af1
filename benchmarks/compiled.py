"""``--compiled``: measure the scheduler that scripts/compile has made.

Imported before the package's own modules.
"""

from __future__ import annotations

import sys

from hetero_gateway import compiled

HELP = "with the scheduler that scripts/compile has made"
ASKED = "--compiled" in sys.argv
if ASKED:
    if why_not := compiled.take() or (not compiled.FOLDER.exists() and "nothing is compiled"):
        raise SystemExit(f"{why_not}: run scripts/compile")
