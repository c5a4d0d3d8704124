"""Spaces: the map of a model's feature spaces, as values, text and picture."""
