"""Calls: what a forward is called with, and what a graph of it expects of that."""
