"""Report: what was done, as values and text, and merges as files.

Takes what every stage gave. Gives a `Report`; `save` and `load` write and read a merge.
"""
