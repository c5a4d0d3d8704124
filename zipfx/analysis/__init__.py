"""Analysis, the second stage: a graph becomes feature spaces.

Takes a traced model and example inputs. The graph runs once on labels (`labels`, `rules`), what
they met is grouped (`grouping`), and the map of all spaces (`spaces`) is checked in numbers.
Gives an `Analysis`: the `SpaceMap`, and the facts of every node.
"""
