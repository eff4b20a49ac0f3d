"""The runner: log lines, dumps, order, disabling, the cache key, and errors that name the pass."""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from graphs import D, stream
from harness import P, captured_case, hand_built
from torch import nn

import xtrain
from xtrain import passes
from xtrain.passes import PASSES, Pass, PassError, PassResult, cache_key, order, run_passes
from xtrain.passes.graph import clone_graph, op_name, walk_graphs
from xtrain.passes.sites.insert_residual_dropout import insert_residual_dropout


def nothing(graph):
    return None


def counts(graph):
    result = PassResult(num_matched=5, num_replaced=2)
    for _ in range(2):
        result.skip("too wide")
    result.skip("on the CPU")
    return result


def entry(run, name=None, **options):
    return Pass(name or run.__name__, run, run, tuple(options.items()))


def insertion(p=P, existing="skip"):
    run = functools.partial(insert_residual_dropout, p=p, existing=existing)
    options = (("p", p), ("existing", existing))
    return Pass("insert_residual_dropout", run, insert_residual_dropout, options)


def small_graph():
    def block(x, w):
        return x + F.linear(x, w)

    return hand_built(block, stream(), nn.Parameter(torch.eye(D)))


@pytest.fixture
def registry():
    """Registered passes are global: leave none behind."""
    yield
    for name in list(passes._registered):
        passes.unregister(name)


def test_one_numbered_log_line_for_each_pass(caplog):
    caplog.set_level(logging.INFO, logger="xtrain.passes")
    module = clone_graph(captured_case("Checkpointed")[2].module)
    results = run_passes(module, [insertion(), entry(counts), entry(nothing)])
    lines = [re.sub(r"\d+ ms", "N ms", r.getMessage()) for r in caplog.records]
    before, after = results[0].num_nodes_before, results[0].num_nodes_after
    assert lines == [
        f"[1/3] insert_residual_dropout: 3 matched, 3 replaced; nodes {before} -> {after}; N ms",
        f"[2/3] counts: 5 matched, 2 replaced; nodes {after} -> {after}; N ms"
        "; skipped 2: too wide; skipped 1: on the CPU",
        f"[3/3] nothing: 0 matched, 0 replaced; nodes {after} -> {after}; N ms",
    ]
    assert {r.levelname for r in caplog.records} == {"INFO"}
    assert [r.name for r in results] == ["insert_residual_dropout", "counts", "nothing"]
    assert all(r.time_ms > 0 for r in results)


def test_nodes_of_bodies_are_counted():
    module = clone_graph(captured_case("Checkpointed")[2].module)
    total = sum(len(part.graph.nodes) for part in walk_graphs(module))
    (result,) = run_passes(module, [insertion()])
    # 3 sites of 3 nodes; 2 graphs with a seeds input; 1 call that cuts its rows
    assert (result.num_nodes_before, result.num_nodes_after) == (total, total + 9 + 2 + 1)


def test_dumps_are_readable_python_before_and_after(tmp_path):
    module = clone_graph(captured_case("Checkpointed")[2].module)
    run_passes(module, [insertion(), entry(nothing)], dump_dir=tmp_path)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(texts) == [
        "01_insert_residual_dropout.after.py",
        "01_insert_residual_dropout.before.py",
        "02_nothing.after.py",
        "02_nothing.before.py",
    ]
    for text in texts.values():
        ast.parse(text)
    before, after = texts["01_insert_residual_dropout.before.py"], texts["02_nothing.before.py"]
    assert "xtrain.dropout" not in before and "product_attention(" in before
    assert after.count("torch.ops.xtrain.dropout.default(") == 3, "bodies are shown too"
    assert texts["01_insert_residual_dropout.after.py"] == after == texts["02_nothing.after.py"]


def test_the_graph_runs_as_the_passes_left_it():
    def doubled(graph):
        (linear,) = (n for n in graph.nodes if op_name(n) == "linear")
        with graph.inserting_after(linear):
            new = graph.call_function(torch.mul, (linear, 2.0))
        linear.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return PassResult(1, 1)

    module = small_graph()
    run_passes(module, [entry(doubled)])
    assert torch.equal(module(stream(), torch.eye(D)), 3 * stream())


def test_a_failing_pass_is_named():
    def broken(graph):
        raise KeyError("some node")

    with pytest.raises(PassError, match=r"'broken' failed with KeyError: 'some node'.*leaves it"):
        run_passes(small_graph(), [entry(nothing), entry(broken)])


def test_what_puts_in_the_dropout_is_never_advised_to_be_left_out(monkeypatch):
    def broken(*args, **keywords):
        raise KeyError("some node")

    monkeypatch.setattr("xtrain.compiler.backend.insert_residual_dropout", broken)
    compiled = xtrain.compile(nn.Linear(D, D), dropout=P, seed=0, backend="eager")
    with pytest.raises(PassError, match=r"insert_residual_dropout.*some node.*report this") as told:
        compiled(stream())
    assert "disable_passes" not in str(told.value) and "strict=False" not in str(told.value)


def test_a_broken_graph_is_named():
    def uses_before_it_defines(graph):
        nodes = list(graph.nodes)
        nodes[-2].prepend(nodes[-1])

    with pytest.raises(PassError, match="'uses_before_it_defines' failed with RuntimeError"):
        run_passes(small_graph(), [entry(uses_before_it_defines)])


def test_a_wrong_result_is_named():
    with pytest.raises(PassError, match="'three' returned 3; return a PassResult or None"):
        run_passes(small_graph(), [entry(lambda graph: 3, "three")])


def test_a_failing_pass_is_named_through_compile():
    def broken(graph):
        raise KeyError("some node")

    model = nn.Linear(D, D)
    compiled = xtrain.compile(model, dropout=P, seed=0, backend="eager", passes=[broken])
    with pytest.raises(PassError, match="'broken' failed with KeyError") as caught:
        compiled(stream())
    assert isinstance(caught.value.__cause__, KeyError), "where it failed stays in the traceback"


# --- order --------------------------------------------------------------------------------------


def names(entries):
    return [e.name for e in entries]


def test_order_of_built_in_registered_and_own(registry):
    assert PASSES[:2] == ("insert_residual_dropout", "normalise")
    passes.register("late", nothing)
    passes.register("early", nothing, after="insert_residual_dropout")
    passes.register("second", nothing, after="early")
    ordered = order([insertion()], extra=[counts, ("own", nothing)])
    expected = ["insert_residual_dropout", "early", "second", "late", "counts", "own"]
    assert names(ordered) == expected
    passes.unregister("early")
    assert names(order([insertion()])) == ["insert_residual_dropout", "late", "second"]


def normalised(name):
    return Pass(name, nothing, nothing, stage="normalised")


def test_user_passes_run_on_dynamos_graph_unless_behind_one_of_the_normalised(registry):
    """`after` decides the graph too; what stands behind such a pass stands there with it."""
    passes.register("plain", nothing)
    passes.register("behind norms", nothing, after="use_triton_rms_norm")
    passes.register("behind that", nothing, after="behind norms")
    builtin = [insertion(), normalised("normalise"), normalised("use_triton_rms_norm")]
    builtin += [normalised("remove_noop_views")]
    ordered = order(builtin, extra=[counts])
    assert [(p.name, p.normalised) for p in ordered] == [
        ("insert_residual_dropout", False),
        ("plain", False),
        ("counts", False),
        ("normalise", True),
        ("use_triton_rms_norm", True),
        ("behind norms", True),
        ("behind that", True),
        ("remove_noop_views", True),
    ]


def test_registering_again_replaces(registry):
    passes.register("mine", nothing)
    passes.register("mine", counts)
    ordered = order([insertion()])
    assert names(ordered) == ["insert_residual_dropout", "mine"] and ordered[1].run is counts


def test_registered_passes_run_in_every_compile(registry):
    seen = []
    passes.register("look", lambda graph: seen.append(len(graph.nodes)))
    model = nn.Linear(D, D)
    compiled = xtrain.compile(model, dropout=P, seed=0, backend="eager", strict=False)
    compiled(stream())
    assert len(seen) == 1
    assert names(compiled.report().passes) == ["insert_residual_dropout", "look"]


def test_register_errors(registry):
    with pytest.raises(ValueError, match="'insert_residual_dropout' belongs to xtrain"):
        passes.register("insert_residual_dropout", nothing)
    with pytest.raises(TypeError, match=r"pass 'mine' must be a function of one fx\.Graph, got 3"):
        passes.register("mine", 3)
    with pytest.raises(ValueError, match="after='no' names no pass; known passes: insert_residual"):
        passes.register("mine", nothing, after="no")
    with pytest.raises(ValueError, match="no registered pass 'mine'"):
        passes.unregister("mine")


def test_disabling_takes_exact_names():
    every = [insertion(), entry(nothing)]
    assert names(order(every, disabled=["nothing"])) == ["insert_residual_dropout"]
    assert names(order(every, disabled=["insert_residual_dropout"])) == ["nothing"]
    for wrong in ("noth", "Nothing", "insert_residual_dropout "):
        with pytest.raises(ValueError, match=rf"disable_passes names '{wrong}'; the passes are"):
            order(every, disabled=[wrong])


def test_two_passes_of_one_name_are_refused(registry):
    with pytest.raises(ValueError, match="two passes are named 'nothing'"):
        order([insertion()], extra=[nothing, nothing])
    passes.register("nothing", nothing)
    with pytest.raises(ValueError, match="two passes are named 'nothing'"):
        order([insertion()], extra=[nothing])


@pytest.mark.parametrize("wrong", [3, "nothing", ("nothing",), (nothing, "nothing"), None])
def test_what_is_no_pass_is_refused(wrong):
    with pytest.raises(TypeError, match="a pass must be a function with a name"):
        order([insertion()], extra=[wrong])


# --- cache key ----------------------------------------------------------------------------------


def load_pass(tmp_path, text):
    """A pass from a source file of its own, under a name that is always the same."""
    path = tmp_path / "some_passes.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("some_passes", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "some_passes", module)
        spec.loader.exec_module(module)
        __import__("linecache").clearcache()
        return cache_key([entry(module.mine)])


SOURCE = "LIMIT = 1\ndef helper(g):\n    return LIMIT\ndef mine(g):\n    helper(g)\n"


def test_cache_key_changes_with_the_source_of_a_pass_and_its_helpers(tmp_path):
    key = load_pass(tmp_path, SOURCE)
    assert load_pass(tmp_path, SOURCE) == key
    assert load_pass(tmp_path, SOURCE.replace("helper(g)\n", "helper(g)\n    g.lint()\n")) != key
    assert load_pass(tmp_path, SOURCE.replace("LIMIT = 1", "LIMIT = 2")) != key


def test_cache_key_changes_with_options_names_order_and_extra():
    base = [insertion(), entry(counts)]
    keys = [
        cache_key(base),
        cache_key([insertion(p=0.1), entry(counts)]),
        cache_key([insertion(existing="replace"), entry(counts)]),
        cache_key(base[::-1]),
        cache_key(base[:1]),
        cache_key([insertion(), entry(counts, "other name")]),
        cache_key([insertion(), entry(nothing, "counts")]),
        cache_key([insertion(), entry(counts, width=3)]),
        cache_key([insertion(), entry(functools.partial(counts, 1), "counts")]),
        cache_key([insertion(), entry(functools.partial(counts, 2), "counts")]),
        cache_key(base, ["inductor"]),
        cache_key(base, ["aot_eager"]),
    ]
    assert len(set(keys)) == len(keys)
    assert cache_key([insertion(), entry(counts)]) == keys[0]


def test_cache_key_of_a_pass_without_source():
    scope: dict = {}
    exec("def a(g): return 1\ndef b(g): return 2", {"__name__": "nowhere"}, scope)
    keys = {cache_key([entry(scope[name], "same")]) for name in "ab"}
    assert len(keys) == 2
    with pytest.raises(TypeError, match="cannot identify pass"):
        cache_key([Pass("len", len, len)])
