"""Repair, the last stage: what is estimated again on data, once the weights are fused.

Takes the merge, the models and calibration data. Changes the weights of the merge: the statistics
of its BatchNorms, or all layers by least squares towards what the models compute.
"""

from zipfx.repair.layerwise import Refit, Refitted, Repaired
from zipfx.repair.repairs import REPAIRS, NoRepair, OwnRepair, Repair

__all__ = ["REPAIRS", "NoRepair", "OwnRepair", "Refit", "Refitted", "Repair", "Repaired"]
