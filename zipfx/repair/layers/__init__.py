"""Layers: what computes y = W x + b is seen as such, whatever module it is."""
