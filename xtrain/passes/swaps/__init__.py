"""Subgraphs that are known, swapped for xtrain's ops, and the graph kept plain around that.

normalise.py                 one spelling of each value, before the swaps; after them the views and
                             casts that they put back to back are taken out
use_triton_*.py, fuse_*.py   a family each: match from an anchor, emit the op, settle
split_gradient_sums.py       on the backward graph
rewrite.py                   offers nodes to a matcher, emits an op in the form that was measured to
                             be the faster, counts what was done and refused
match.py                     one reading of arithmetic, casts and parts of a tensor
account.py                   proves that nobody can tell a new value from the old one, or refuses
"""
