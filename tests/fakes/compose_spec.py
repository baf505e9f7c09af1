"""The compose specification's own JSON schema, which check-jsonschema carries."""

import subprocess
import sys
from pathlib import Path


def check_compose(*files: Path) -> tuple[int, str]:
    """Exit code, 0 where all match, and what was said. Starting takes seconds, a file nothing."""
    words = ["--builtin-schema", "vendor.compose-spec", *map(str, files)]
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *words], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr
