"""Subgraphs that are known, swapped for xtrain's ops, and the graph kept plain around that.

normalise.py                 one spelling of each value, before the swaps; after them the views and
                             casts that they put back to back are taken out
use_triton_*.py, fuse_*.py   a family each: match from an anchor, emit the op, settle
split_gradient_sums.py       on the backward graph
swap.py                      offers each node to a matcher and counts what it did and refused
account.py                   proves that nobody can tell a new value from the old one, or refuses
forms.py                     emits an op in the form that was measured to be the faster
"""
