"""Which adds of a graph are residual sites: exact numbers, kinds, operands; nothing else."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import LOOK_ALIKES, SITES, B, D, LookAlike, T, stream
from harness import capture, captured_case, hand_built, plain_sites
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from xtrain.passes.graph import clone_graph, walk_graphs
from xtrain.passes.sites.spell_out_sums import spell_out_sums


def weight():
    return nn.Parameter(torch.eye(D))


def names(sites):
    return [(s.add.name, s.branch.name, s.residual.name) for s in sites]


@pytest.mark.parametrize("name", SITES)
def test_number_and_kinds(name):
    """test_insert_residual_dropout holds the order."""
    model, _, captured = captured_case(name)
    module = clone_graph(captured.module)
    for part in walk_graphs(module):
        spell_out_sums(part.graph)
    kinds = [site.kind for site in plain_sites(module.graph)]
    assert sorted(kinds) == sorted(model.kinds)


def test_a_transpose_by_attribute_is_found_as_newer_dynamo_spells_it():
    """torch 2.14 has aten.mT where older ones read an attribute; the sites are the same."""
    model, _, captured = captured_case("AddedTransposed")
    graph = clone_graph(captured.module).graph
    for node in graph.nodes:
        if node.op == "call_function" and node.target is getattr and node.args[1] == "mT":
            node.target, node.args = torch.ops.aten.mT, node.args[:1]
    assert sum(node.target is torch.ops.aten.mT for node in graph.nodes) == 3
    assert [site.kind for site in plain_sites(graph)] == list(model.kinds)


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_no_sites(name):
    assert plain_sites(capture(LookAlike(name), stream()).module.graph) == []


def test_a_site_names_its_nodes():
    def block(x, w1, w2):
        h = F.linear(F.silu(F.linear(x, w1)), w2)
        return x.double() + F.dropout(h, 0.1).double()

    graph = hand_built(block, stream(), weight(), weight()).graph
    (site,) = plain_sites(graph)
    assert (site.add.target, site.branch.target) == (operator.add, "double")
    assert site.residual.args[0].name == "x" and site.own.target is F.dropout
    assert [n.name for n in site.witnesses] == ["w2", "w1"], "nearest the add first"
    assert (site.kind, site.path) == ("feed_forward", "")


def test_a_chain_is_taken_left_to_right_with_the_widest_residual():
    """x + a + f(a): f(a) is a branch of a too, but x is what both are branches of."""

    def block(x, w):
        a = F.linear(x, w)
        return x + a + F.linear(a, w)

    sites = plain_sites(hand_built(block, stream(), weight()).graph)
    assert names(sites) == [("add", "linear", "x"), ("add_1", "linear_1", "x")]


def test_an_add_read_twice_ends_its_chain():
    def block(x, w):
        y = x + F.linear(x, w)
        return y + F.linear(y, w)

    sites = plain_sites(hand_built(block, stream(), weight()).graph)
    assert names(sites) == [("add", "linear", "x"), ("add_1", "linear_1", "add")]


def test_a_residual_inside_a_branch_is_a_site_of_its_own():
    def block(x, w):
        z = F.linear(x, w)
        z = z + F.linear(z, w)
        return x + F.linear(z, w)

    sites = plain_sites(hand_built(block, stream(), weight()).graph)
    assert names(sites) == [("add", "linear_1", "linear"), ("add_1", "linear_2", "x")]


def test_a_stream_added_to_itself_is_no_branch():
    """y holds x: x + y is 2 x + f(x), and only f(x) is a branch."""

    def block(x, w):
        y = x + F.linear(x, w)
        return (x + y).relu() + y

    sites = plain_sites(hand_built(block, stream(), weight()).graph)
    assert names(sites) == [("add", "linear", "x")]


@pytest.mark.parametrize(
    ("last", "number"),
    [
        (lambda s: s.softmax(-1), 0),
        (lambda s: torch.clamp(s * 2, max=5).view(-1, D).float().softmax(0), 0),
        (lambda s: (s.softmax(-1), s.sum()), 1),
        (lambda s: F.layer_norm(s, (D,)).softmax(-1), 1),
        (lambda s: s, 1),
    ],
    ids=["softmax", "scaled, clamped, viewed", "read by a sum too", "normed first", "returned"],
)
def test_what_only_softmax_reads_is_scores(last, number):
    def block(x, w):
        return last(x + F.linear(x, w))

    assert len(plain_sites(hand_built(block, stream(), weight()).graph)) == number


def test_aten_graphs_have_the_same_sites():
    model, args, _ = captured_case("PreNorm")
    parameters = dict(model.named_parameters())

    def call(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    module = make_fx(call, tracing_mode="fake", pre_dispatch=True)(parameters, *args)
    sites = plain_sites(module.graph)
    assert [s.kind for s in sites] == ["attention", "feed_forward"]
    assert all(s.add.target is torch.ops.aten.add.Tensor for s in sites)


def test_symbolic_shapes_are_compared_without_guards():
    model, args, _ = captured_case("PreNorm")
    module = make_fx(lambda x, w: x + (x.view(-1, D) @ w).view(x.shape), tracing_mode="symbolic")(
        torch.randn(B, T, D), torch.eye(D)
    )
    shape_env = next(n for n in module.graph.nodes).meta["val"].shape[0].node.shape_env
    guards = len(shape_env.guards)
    assert len(plain_sites(module.graph)) == 1
    assert len(shape_env.guards) == guards


def test_learnt_queries_attend_to_what_is_given():
    """Perceiver: the stream is made of parameters alone, and so are the queries."""

    def block(x, latents, w1, w2):
        stream = latents.expand(B, -1, -1)
        weights = (F.linear(stream, w1) @ F.linear(x, w1).transpose(1, 2)).softmax(-1)
        return stream + F.linear(weights @ F.linear(x, w1), w2)

    latents = nn.Parameter(torch.randn(1, T, D))
    graph = capture(block, stream(), latents, weight(), weight()).module.graph
    assert [site.kind for site in plain_sites(graph)] == ["cross_attention"]
