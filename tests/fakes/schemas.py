"""Published JSON schemas, which check-jsonschema carries."""

from pathlib import Path


def check(schema: str, *files: Path) -> tuple[int, str]:
    """Exit code, 0 where all match, and what was said."""
    from check_jsonschema import main  # half a second of CPU, in each process that collects
    from click.testing import CliRunner

    words = ["--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = CliRunner().invoke(main, words)
    return done.exit_code, done.output
