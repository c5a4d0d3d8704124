"""Observe, the third stage: data becomes statistics of each feature space.

Takes the models' trunks side by side, the spaces, and calibration data. Gives, for each space, the
joint mean and covariance of the features of all models (`Statistics`).
"""

from zipfx.observe.choose_places import (
    PLACES,
    Choose,
    comparable,
    inside,
    observed,
    pin_hidden,
    unknown,
)
from zipfx.observe.data import BatchToArgs, Calibration, calibration
from zipfx.observe.examples import Example, example_arguments, example_batch, example_of
from zipfx.observe.joint_graph import observe
from zipfx.observe.moments import Moments, pooled
from zipfx.observe.observer import Seen
from zipfx.observe.padding import MaskOf, spread
from zipfx.observe.similarity import SIMILARITIES, Similarity
from zipfx.observe.statistics import Statistics

__all__ = [
    "PLACES",
    "SIMILARITIES",
    "BatchToArgs",
    "Calibration",
    "Choose",
    "Example",
    "MaskOf",
    "Moments",
    "Seen",
    "Similarity",
    "Statistics",
    "calibration",
    "comparable",
    "example_arguments",
    "example_batch",
    "example_of",
    "inside",
    "observe",
    "observed",
    "pin_hidden",
    "pooled",
    "spread",
    "unknown",
]
