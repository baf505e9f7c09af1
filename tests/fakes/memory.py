"""What a process has in memory."""

from pathlib import Path


def resident_mb(pid: int | str = "self") -> float:
    """Its resident pages, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
