"""Align: graphs of K models, written alike or not, correspond node by node up to the cut."""
