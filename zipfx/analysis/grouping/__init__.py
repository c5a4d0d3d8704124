"""Grouping: constraints on labels become classes of features that may be exchanged."""
