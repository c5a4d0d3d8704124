"""Figures of the method's own published code on the shared checkpoints, to be read beside ours.

Joint accuracy in percent by method and set of checkpoints, as ``../shared/zoo/README.md`` has
them: 500 training images per task with random flips, BatchNorm statistics reset on 1,000, a fixed
random 4,000 test images. That code observes a space once, at its last read (``--places last``).
"""

from __future__ import annotations

SETS = ("text_w2", "ce_w1")
JOINT = {
    "model a": (45.1, 43.6),
    "model b": (45.7, 45.3),
    "ensemble": (68.0, 72.1),
    "weight averaging": (26.3, 22.4),
    "permute": (40.5, 37.9),
    "zip full, alpha 0.0001, beta 1": (57.5, 51.2),
    "zip full, alpha 0.1, beta 1": (57.3, 50.8),
    "zip full, alpha 0.3, beta 1": (57.5, 51.3),
    "zip full, alpha 1, beta 1": (56.9, 48.7),
    "zip full, alpha 0.1, beta 0.5": (54.4, 47.1),
    "zip to layer2, alpha 0.1, beta 1": (58.7, 56.3),
    "zip to layer1, alpha 0.1, beta 1": (64.1, 63.0),
}


def joint(checkpoints: str, method: str) -> float | None:
    """The published joint accuracy, where there is one."""
    if checkpoints not in SETS or method not in JOINT:
        return None
    return JOINT[method][SETS.index(checkpoints)]
