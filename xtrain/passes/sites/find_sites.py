"""Find the sites of a graph and of the bodies that it calls, and the account of its sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from xtrain.passes.graph import module_path, output_of, walk_graphs
from xtrain.passes.sites.carried import parameters_read_by, peel
from xtrain.passes.sites.own_dropouts import own_dropout
from xtrain.passes.sites.program import Program, operands
from xtrain.passes.sites.residual_sites import (
    ResidualSite,
    branch_kind,
    computing_module,
    find_residual_sites,
)
from xtrain.passes.sites.sum_account import General, Settled, SumAccount
from xtrain.passes.sites.ways import same_rows, shape_of


@dataclass
class Found:
    """The sites of a graph and of the bodies that it calls, found once, and its account of sums.

    sites:   by graph, in running order; those of bodies that take no seeds among them.
    account: None where only the whole forward can tell, of which this is a piece
             (compiler/forward_program.py).
    """

    program: Program
    sites: dict[fx.Graph, list[ResidualSite]]
    account: SumAccount | None = None


def find_sites(
    module: fx.GraphModule, settled: Settled = lambda node: "", general: str = "all"
) -> Found:
    """Return the residual sites of a graph module and its bodies, and the account of its sums.

    Args:     module: its hidden sums are spelt out (spell_out_sums).
              settled: what the user says of a sum of these graphs.
              general: which sites the account may add to those that the plain search finds: "all"
              where the graph is a whole forward, "stream" where it is a block (those whose sum
              goes on as a stream), "none" for a piece, which is judged with the others later.
    """
    program = Program.of(module)
    found: dict[fx.Graph, list[ResidualSite]] = {}
    for plain in find_residual_sites(program, settled):
        known = found.setdefault(plain.add.graph, [])
        if all((s.add, s.branch) != (plain.add, plain.branch) for s in known):
            known.append(plain)  # of a body that is called twice, once
    inlined = {node.graph for node in program.origin.values()}
    for part in walk_graphs(module):
        if part.graph not in inlined:  # a body of control flow, which takes no seeds
            found[part.graph] = find_residual_sites(Program.of(part), settled)
        found.setdefault(part.graph, [])
    result = Found(program, found)
    if general == "none":
        return result
    account = SumAccount(program, lambda node: settled(program.origin.get(node, node)))
    while mistaken := list(account.mistaken()):  # without one, another may show
        for add, branch in mistaken:
            program.branches[add].remove(branch)
            if not program.branches[add]:
                del program.branches[add]
            origin = program.origin[add]
            there = program.operand_of(add, branch)
            found[origin.graph] = [
                s for s in found[origin.graph] if origin not in s.takers or s.branch is not there
            ]
    account.run()
    for site in account.general:
        for described in _described(account, site):
            if general == "all" or account.goes_on(site.add):
                found.setdefault(described.add.graph, []).append(described)
            else:
                program.branches.pop(site.add, None)
    if general == "stream":
        found.setdefault(module.graph, []).extend(_handed_on(account, module.graph))
    result.account = account
    return result


def _described(account: SumAccount, site: General) -> Iterator[ResidualSite]:
    """The general sites of one add, in the nodes of the graphs that the program was made of."""
    origin = account.program.origin
    add = origin[site.add]
    there = {here: there for there, here in operands(add, site.add)}
    for branch in site.branches:
        if branch not in there:
            continue
        residual = there.get(site.skip) if site.skip is not None else None
        if site.root is not None:
            members, reached = account.ways.between(site.root, branch)
        else:
            members, reached = [branch], {branch}
        yield _site(account, add, there[branch], residual, members, reached)


def _site(
    account: SumAccount,
    add: fx.Node,
    branch: fx.Node,
    residual: fx.Node | None,
    members: list[fx.Node],
    reached: set[fx.Node],
) -> ResidualSite:
    """A site that the account tells of: members, what depends on its root, are flat nodes."""
    origin = account.program.origin
    return ResidualSite(
        add=add,
        branch=branch,
        residual=residual if residual is not None else branch,
        kind=branch_kind(members, reached),
        own=own_dropout(branch, residual) if residual is not None else None,
        shared=(),
        path=module_path(add),
        takers=(add,),
        witnesses=tuple(origin.get(n, n) for n in parameters_read_by(members)),
        origin=computing_module(members),
    )


def _handed_on(account: SumAccount, graph: fx.Graph) -> Iterator[ResidualSite]:
    """The branches that a block returns beside the sum that they read, for the next one to add.

    (hidden, residual), as flash-attn's blocks have it. Whether someone adds them shows when the
    whole forward has run (SumAccount.run), and a branch that nobody adds is an error then.
    """
    ways = account.ways
    output, flat = output_of(graph), ways.nodes[-1]
    returned = list(operands(output, flat))
    for branch, here in returned:
        labels = ways.labels(here, set())
        for residual, stream in returned:
            label = labels.get(peel(stream))
            if label is None or not label.is_computed or not ways.addends(peel(stream)):
                continue
            if not same_rows(here, shape_of(stream)) or set(here.users) != {flat}:
                continue
            account.program.handed_on.add(here)
            members, reached = ways.between(peel(stream), here)
            yield _site(account, output, branch, residual, members, reached)
            break
