"""Repair, the last stage: what is estimated again on data, once the weights are fused.

Takes the merge, the models and calibration data. Changes the weights of the merge: the statistics
of its BatchNorms, or all layers by least squares towards what the models compute.
"""
