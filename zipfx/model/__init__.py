"""Model: what is done with a torch module, in every stage.

Its tensors and the memory they lie on, copies, running it so that nothing of it changes, how it is
called, what it holds beside tensors, weights that it computes, its graph module.  No stage: the
files of this room are imported by their names.
"""
