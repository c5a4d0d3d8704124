"""Derived: tensors of a merge that are functions of others, as they are in the models."""
