"""Observe, the third stage: data becomes statistics of each feature space.

Takes the models' trunks side by side, the spaces, and calibration data. Gives, for each space, the
joint mean and covariance of the features of all models (`Statistics`).
"""

from zipfx.observe.choose_places import PLACES
from zipfx.observe.data import BatchToArgs, Calibration, calibration
from zipfx.observe.examples import example_arguments, example_batch, first_call, guessed_input
from zipfx.observe.joint_graph import observe
from zipfx.observe.moments import Moments, pooled
from zipfx.observe.observer import combine
from zipfx.observe.similarity import SIMILARITIES, Similarity
from zipfx.observe.statistics import Statistics

__all__ = [
    "PLACES",
    "SIMILARITIES",
    "BatchToArgs",
    "Calibration",
    "Moments",
    "Similarity",
    "Statistics",
    "calibration",
    "combine",
    "example_arguments",
    "example_batch",
    "first_call",
    "guessed_input",
    "observe",
    "pooled",
]
