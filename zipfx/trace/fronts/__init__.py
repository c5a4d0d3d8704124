"""Fronts: the ways in which a module becomes a graph, behind one contract (`front`)."""
