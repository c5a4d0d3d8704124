"""How much memory a step of this process takes, as the kernel counts it."""

from __future__ import annotations

import resource
from pathlib import Path


def reset_peak() -> None:
    """Makes the kernel count the peak resident set anew (Linux; elsewhere nothing happens)."""
    control = Path("/proc/self/clear_refs")
    if control.exists():
        control.write_text("5")


def peak_resident() -> int:
    """Peak resident set in bytes since `reset_peak`, where there is none since the start."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    """Resident set in bytes now (Linux; elsewhere the peak)."""
    return _status("VmRSS") or peak_resident()


def _status(key: str) -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))
