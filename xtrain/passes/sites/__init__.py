"""Where residual dropout belongs, and putting it there.

insert_residual_dropout.py   the pass; spell_out_sums.py first makes a value of each hidden branch
find_sites.py                the sites of a graph and of the bodies that it calls, found once
    program.py               the forward as one flat graph, bodies and library ops in their places
    residual_sites.py        the plain search in it: an addend that reads another addend
    sum_account.py, ways.py  what becomes of every sum of it, read off the ways between its values
sums.py                      what counts as a sum of addends
carried.py, sum_readers.py   what a node carries of another value; who reads a sum that is no stream
own_dropouts.py              the dropout that a model has on a branch of its own
switch_dropout.py            behind the insertion: a graph for any choice of modules in eval mode
sample_places.py             where the samples of a batch lie at each site
"""
