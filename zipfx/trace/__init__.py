"""Trace, the first stage: models become graphs.

Takes K modules and example inputs. Gives K graph modules that keep the names of the models, and
(`align`) whose nodes correspond one by one up to the cut.
"""
