"""Merge, the fifth stage: matchings become one module with heads.

Takes the traced models, their analysis and the matchings. Gives a `MergedModule`, whose weights are
W* = sum_k M_k W_k U_k, with a head for each model behind the cut.
"""
