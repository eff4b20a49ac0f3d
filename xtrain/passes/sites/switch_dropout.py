"""Let the caller switch each inserted dropout off: a graph for any choice of modules in eval mode.

Before:  d = xtrain.dropout(h, p, seed, offset)     After:  d = xtrain.dropout(h, p, seed, offset)
         y = x + d                                          e = where(offset == OFF, h, d)
                                                            y = x + e
Stage:   behind insert_residual_dropout.     Changes numerics: no, where the offset is not OFF.
Needs:   OFF in the offset of a row of `xtrain_seeds` that is to leave its branch as it is.
Skips:   nothing; it is not run where every module trains, so that graph pays nothing for it.
"""

from __future__ import annotations

import torch
from torch import fx

from xtrain.ops.dropout.op import FORWARD as DROPOUT_OP
from xtrain.passes.graph import tensor_meta, walk_graphs
from xtrain.rng import SEED_RANGE

OFF = SEED_RANGE[0]  # no offset that an element of a batch can have


def switch_dropout(module: fx.GraphModule) -> None:
    """Select between each inserted dropout and its branch, in a graph and the bodies it calls."""
    for part in dict.fromkeys(walk_graphs(module)):
        for drop in [n for n in part.graph.nodes if n.target is DROPOUT_OP]:
            branch, _, _, offset = drop.args
            users = list(drop.users)
            with part.graph.inserting_after(drop):
                is_off = part.graph.call_function(torch.eq, (offset, OFF))
            with part.graph.inserting_after(is_off):
                chosen = part.graph.call_function(torch.where, (is_off, branch, drop))
            value = tensor_meta(drop)
            assert value is not None
            is_off.meta["example_value"] = value.new_empty((), dtype=torch.bool)
            chosen.meta = dict(drop.meta)
            for user in users:
                user.replace_input_with(drop, chosen)
        part.recompile()
