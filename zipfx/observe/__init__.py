"""Observe, the third stage: data becomes statistics of each feature space.

Takes the models' trunks side by side, the spaces, and calibration data. Gives, for each space, the
joint mean and covariance of the features of all models (`Statistics`).
"""
