"""Repair, the last stage: what is estimated again on data, once the weights are fused.

Takes the merge, the models and calibration data. Changes the weights of the merge: the statistics
of its BatchNorms, or all layers by least squares towards what the models compute.
"""

from zipfx.repair.batch_norm import repair_batch_norm
from zipfx.repair.exposed.bake import bake, with_plain_weights
from zipfx.repair.exposed.unfold import unfold
from zipfx.repair.layerwise import Refit, Refitted, refit
from zipfx.repair.targets import plan_targets

__all__ = [
    "Refit",
    "Refitted",
    "bake",
    "plan_targets",
    "refit",
    "repair_batch_norm",
    "unfold",
    "with_plain_weights",
]
