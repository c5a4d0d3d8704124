"""Exposed: weights inside functions, or computed ones, as layers that can be repaired."""
