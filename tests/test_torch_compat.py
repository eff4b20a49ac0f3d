"""The contract of each use of a torch internal, on the torch that runs: what xtrain relies on."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from xtrain import ops, torch_compat


def compiled_with(function, *args, backend=None, **kwargs):
    """Compile and run once; return the graphs and example inputs that the backend saw."""
    seen = []

    def recording(module, example_inputs):
        seen.append((module, example_inputs))
        return (backend or (lambda m, _: m.forward))(module, example_inputs)

    result = torch.compile(function, backend=recording, **kwargs)(*args)
    return result, seen


# --- lowering -----------------------------------------------------------------------------------


def test_an_op_stays_one_node_through_aot_and_is_lowered_by_its_decomposition():
    """One node in AOT's forward, one in its backward, no call in inductor's code."""
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._inductor.utils import run_and_get_code

    seed = torch.tensor(3)

    def f(x):
        return ops.dropout(x.sin(), 0.5, seed).cos()

    graphs = []

    def keep(module, _):
        graphs.append(module)
        return make_boxed_func(module.forward)

    def aot(module, inputs):
        return aot_module_simplified(module, inputs, fw_compiler=keep, bw_compiler=keep)

    x = torch.randn(64, requires_grad=True)
    torch.compile(f, backend=aot)(x).sum().backward()
    names = [[str(n.target) for n in g.graph.nodes] for g in graphs]
    assert [n.count("xtrain.dropout.default") for n in names] == [1, 0]
    assert [n.count("xtrain.dropout_backward.default") for n in names] == [0, 1]
    torch._dynamo.reset()
    result, code = run_and_get_code(torch.compile(f), x.detach())
    torch.testing.assert_close(result, f(x).detach(), rtol=1e-6, atol=1e-6)
    assert "torch.ops.xtrain.dropout" not in code[0], "lowered, not called"


def test_lowerings_wait_for_inductor_and_importing_ops_does_not_load_it():
    code = (
        "import sys, xtrain.ops, xtrain.torch_compat.lowering as c; "
        "assert 'torch._inductor.lowering' not in sys.modules; assert c._pending_lowerings; "
        "import torch._inductor.lowering as l; c.flush_lowerings(); "
        "import torch; assert torch.ops.xtrain.dropout.default in l.lowerings; "
        "assert not c._pending_lowerings"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cache_tags_reach_the_key_of_inductors_cache():
    import torch.compiler.config as compiler_config
    from torch._inductor.codecache import FxGraphHashDetails

    def key_of():
        module = fx.symbolic_trace(lambda x: x + 1)
        return FxGraphHashDetails(module, [torch.zeros(2)], {}, []).__dict__

    def differ(a, b):
        return {name for name in a if repr(a[name]) != repr(b[name])}

    with compiler_config.patch(cache_key_tag="base"):
        before = key_of()
        with torch_compat.cache_key_tag("passes"):
            inside = key_of()
            assert compiler_config.cache_key_tag == "basepasses"
        assert compiler_config.cache_key_tag == "base"
        torch_compat.add_compile_cache_tag("ops")
        torch_compat.add_compile_cache_tag("ops")
        assert compiler_config.cache_key_tag == "baseops", "a tag is added once"
        assert differ(before, inside) == differ(before, key_of()) == {"cache_key_tag"}


# --- errors -------------------------------------------------------------------------------------


def test_argument_errors_are_value_errors_outside_and_inside_a_trace():
    assert type(torch_compat.argument_error("no")) is ValueError

    @torch.library.custom_op("xtrain_test::refuse", mutates_args=())
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("eager")

    @refuse.register_fake
    def _(x):
        raise torch_compat.argument_error("refused at trace time")

    with pytest.raises(ValueError, match="refused at trace time"):
        torch.compile(refuse, backend="eager", fullgraph=True)(torch.zeros(2))


def test_backend_cause_is_what_the_backend_raised():
    def failing(module, example_inputs):
        raise KeyError("some node")

    with pytest.raises(Exception, match="some node") as caught:
        torch.compile(lambda x: x + 1, backend=failing)(torch.zeros(2))
    assert isinstance(torch_compat.backend_cause(caught.value), KeyError)
    assert torch_compat.backend_cause(ValueError("another")) is None


# --- entering and leaving -----------------------------------------------------------------------


def test_fresh_entries_have_their_own_compiled_variants():
    """More entries of one function than the recompile limit: each is compiled, none falls back."""

    def call(module, x):
        return module(x)

    graphs = 0

    def counting(module, example_inputs):
        nonlocal graphs
        graphs += 1
        return module.forward

    limit = torch._dynamo.config.recompile_limit
    for i in range(limit + 2):
        entry = torch_compat.fresh_entry(call, f"entry_{i}")
        assert entry.__name__ == f"entry_{i}" and entry is not call
        torch.compile(entry, backend=counting)(nn.Linear(2, 2), torch.zeros(1, 2))
    assert graphs == limit + 2


def test_a_fresh_entry_finds_code_that_no_import_finds(tmp_path):
    """Dynamo imports the module of what it inlines, unless the entry has its globals."""
    code = "import torch\nclass Hidden(torch.nn.Module):\n    def forward(self, x): return f(x)\n"
    spec = {"__name__": "hidden_from_imports", "f": torch.sin}
    exec(code, spec)
    model = spec["Hidden"]()
    entry = torch_compat.fresh_entry(lambda module, x: module(x), "entry_hidden", model)
    assert entry.__globals__ is spec
    x = torch.ones(2)
    assert torch.equal(torch.compile(entry, backend="eager", fullgraph=True)(model, x), x.sin())
    linear = nn.Linear(2, 2)
    function = test_a_fresh_entry_finds_code_that_no_import_finds
    assert torch_compat.fresh_entry(function, "f", linear).__globals__ is function.__globals__


def test_source_names_of_placeholders():
    def f(_xtrain_model, x):
        return _xtrain_model(x)

    _, ((module, _),) = compiled_with(f, nn.Linear(2, 2), torch.zeros(1, 2))
    names = [torch_compat.source_name(n) for n in module.graph.nodes if n.op == "placeholder"]
    assert len(names) == 3 and all(n.startswith("L['") for n in names)
    assert sum(n.startswith("L['_xtrain_model']") for n in names) == 2
    assert torch_compat.source_name(fx.Graph().placeholder("x")) == ""


def test_trace_config_is_undone_and_its_settings_exist():
    for shared_layers in (False, True):
        overrides = torch_compat.trace_overrides(shared_layers=shared_layers)
        before = {name: getattr(torch._dynamo.config, name) for name in overrides}
        with torch_compat.trace_config(**overrides):
            for name, value in overrides.items():
                assert getattr(torch._dynamo.config, name) == value
        assert before == {name: getattr(torch._dynamo.config, name) for name in overrides}


@pytest.mark.parametrize(("shared_layers", "number"), [(True, 2), (False, 6)])
def test_a_layer_index_makes_no_graph_of_its_own(shared_layers, number):
    """The first value is a constant; the second is seen to vary and becomes a symbol for all."""

    class Layer(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.index = index

        def forward(self, x):
            return x * self.index

    graphs = []
    run = torch.compile(
        torch_compat.fresh_entry(lambda layer, x: layer(x), "layers"),
        backend=lambda m, _: graphs.append(m) or m.forward,
    )
    with torch_compat.trace_config(**torch_compat.trace_overrides(shared_layers=shared_layers)):
        outs = [float(run(Layer(i), torch.ones(2))[0]) for i in range(3, 9)]
    assert outs == [3, 4, 5, 6, 7, 8] and len(graphs) == number


def test_named_ints_are_symbols_from_the_first_trace_on():
    """0 and 1 too; an int that other code names by pattern stays a symbol."""

    class Layer(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.index, self.of_user = index, index

        def forward(self, x):
            return x * self.index + x * self.of_user

    graphs = []
    run = torch.compile(
        torch_compat.fresh_entry(lambda layer, x: layer(x), "layers"),
        backend=lambda m, _: graphs.append(m) or m.forward,
    )
    config = torch.compiler.config
    overrides = torch_compat.trace_overrides(shared_layers=True)
    with config.patch(dynamic_sources=r"L\['layer'\].*\.of_user"):
        with torch_compat.trace_config([r"L\['layer'\]\.(.+\.)?index$"], **overrides):
            outs = [float(run(Layer(i), torch.ones(2))[0]) for i in range(6)]
        assert config.dynamic_sources == r"L\['layer'\].*\.of_user"
    assert outs == [0, 2, 4, 6, 8, 10] and len(graphs) == 1


def test_logging_calls_of_losses_do_not_break_graphs(caplog):
    pytest.importorskip("transformers")
    from transformers.utils import logging as transformers_logging

    logger = transformers_logging.get_logger("xtrain.test")
    assert hasattr(logging.Logger, "warning_once")
    torch_compat.ignore_logging_calls()

    def f(x):
        logger.warning_once("num_items_in_batch is ignored")
        return x.sin()

    caplog.set_level(logging.ERROR)
    result = torch.compile(f, backend="eager", fullgraph=True)(torch.zeros(2))
    assert torch.equal(result, torch.zeros(2))
    # What Triton's launches add up between compilations is written apart, by the next call.
    runtime = torch._dynamo.utils.get_runtime_metrics_context()
    runtime.increment("runtime_triton_autotune_time_us", 1)
    runtime.finish()
    assert caplog.records == []


def test_marked_dimensions_become_symbols_together():
    graphs = []
    f = torch.compile(lambda x: x.sin(), backend=lambda m, _: graphs.append(m) or m.forward)
    f(torch.zeros(4, 5))
    for shape in ((3, 7), (8, 2), (9, 11)):
        x = torch.zeros(shape)
        torch_compat.mark_dynamic(x, [0, 1])
        f(x)
    assert len(graphs) == 2
    values = [n.meta["example_value"] for n in graphs[1].graph.nodes if n.op == "placeholder"]
    (x,) = (v for v in values if isinstance(v, torch.Tensor))
    assert all(isinstance(size, torch.SymInt) for size in x.shape)
    one = torch.zeros(1, 3)
    torch_compat.mark_dynamic(one, [0])  # 1 cannot be a symbol: accepted, without an error
    assert f(one).shape == (1, 3)


def test_fake_like_inputs_follows_the_example_inputs():
    value = torch.zeros(6, dtype=torch.int64)
    assert torch_compat.fake_like_inputs([torch.zeros(2), 3], value) is value
    mode = FakeTensorMode()
    fake = torch_compat.fake_like_inputs([3, mode.from_tensor(torch.zeros(2))], value)
    assert isinstance(fake, FakeTensor) and fake.fake_mode is mode
    assert (fake.shape, fake.stride(), fake.dtype) == (value.shape, value.stride(), value.dtype)


# --- backends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_inner_backends_run_a_graph(name):
    backend = torch_compat.inner_backend(name, mode=None, options={}, dynamic=None)
    x = torch.randn(3, requires_grad=True)
    result, _ = compiled_with(lambda x: x.sin(), x, backend=backend)
    result.sum().backward()
    assert torch.equal(result, x.sin()) and torch.equal(x.grad, x.cos())


def test_inductor_keeps_bf16_roundings_unless_told_otherwise(device):
    """The value of a multiply in bf16 is rounded before it is added, as in eager (row C34).

    Up to torch 2.11 inductor's C++ backend drops the roundings whatever the setting.
    """
    a, b = (torch.randn(4096, device=device).bfloat16() for _ in range(2))

    def f(a, b):
        return (a * b) + a

    compiled = {}
    for options in ({}, {"emulate_precision_casts": False}):
        backend = torch_compat.inner_backend("inductor", mode=None, options=options, dynamic=None)
        torch._dynamo.reset()
        compiled[not options] = torch.compile(f, backend=backend)(a, b)
    if device.type == "cuda" or torch.__version__ >= "2.13":
        assert torch.equal(compiled[True], f(a, b))
    assert not torch.equal(compiled[False], f(a, b))


def test_no_ddp_module_outside_a_ddp_forward():
    assert torch_compat.active_ddp_module() is None


def test_the_ddp_splitter_cuts_at_buckets_and_calls_the_backend_per_piece():
    class Ddp:
        bucket_bytes_cap = 2 * 16 * 16 * 4

    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    pieces = []

    def inner(module, example_inputs):
        pieces.append(module)
        return module.forward

    backend = torch_compat.ddp_backend(Ddp(), inner)
    x = torch.randn(2, 16)
    result, _ = compiled_with(model, x, backend=backend)
    assert len(pieces) == 2 and torch.equal(result, model(x))


def test_compiled_graphs_are_counted_recompiles_included():
    f = torch.compile(lambda x: F.relu(x), backend="eager", dynamic=False)
    before = torch_compat.num_compiled_graphs()
    for size in (2, 3, 2, 4):
        f(torch.zeros(size))
    assert torch_compat.num_compiled_graphs() - before == 3


def test_an_interpreted_graph_names_modules_and_gives_the_bits_of_aot_eager():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))).eval()
    seen = []

    def result(path, function, value):
        seen.append((path, str(function), value))

    x = torch.randn(2, 4)
    backend = torch_compat.interpreting_backend(result)
    with torch.no_grad():
        y = torch.compile(model, backend=backend, fullgraph=True)(x)
        assert torch.equal(y, model(x))
    products = [(path, value) for path, function, value in seen if "addmm" in function]
    assert [path for path, _ in products] == ["0", "1.1"]
    assert torch.equal(products[-1][1], y)
    assert ("1.0", "aten.relu.default") in [item[:2] for item in seen]


def test_a_graph_break_is_told_from_other_errors():
    def broken(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(Exception, match="graph_break") as caught:  # noqa: B017
        torch.compile(broken, backend="eager", fullgraph=True)(torch.zeros(1))
    assert torch_compat.is_graph_break(caught.value)
    assert not torch_compat.is_graph_break(RuntimeError("x"))


def test_graph_breaks_are_listed_with_their_place_and_reason():
    before = len(torch_compat.graph_breaks())

    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(broken, backend="eager")(torch.ones(2))
    line = broken.__code__.co_firstlineno + 2
    [(place, reason)] = torch_compat.graph_breaks()[before:]
    assert place == f"{__file__}:{line}" and "graph_break" in reason


def test_comparisons_of_sizes():
    """Guarded where a size is an input's, False where it comes from data."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    unknown = ShapeEnv().create_unbacked_symint()
    assert torch_compat.holds(True) and not torch_compat.holds(False)
    assert not torch_compat.holds(unknown < 3) and not torch_compat.holds(unknown == 1)


def test_what_a_compilation_failed_with_is_found_behind_its_wrapping():
    def backend(module, inputs):
        raise NotADirectoryError(20, "Not a directory", "x/y")

    with pytest.raises(Exception, match="Not a directory") as caught:
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3))
    cause = torch_compat.cause_of(caught.value)
    assert type(cause) is NotADirectoryError and cause.filename == "x/y"
    assert torch_compat.cause_of(cause) is cause
    missing = torch._inductor.exc.InvalidCxxCompiler()
    assert torch_compat.is_missing_compiler(missing) and not torch_compat.is_missing_compiler(cause)


def test_an_ops_last_argument_says_that_it_is_opaque():
    op = ops.OPS["rms_norm"].forward
    position = torch_compat.position_of_opaque(op)
    assert op._schema.arguments[position].name == torch_compat.OPAQUE
    assert torch_compat.position_of_opaque(torch.ops.aten.add.Tensor) is None
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = (x,) * position
    calls = {
        graph.call_function(op, given): False,
        graph.call_function(op, (*given, True)): True,
        graph.call_function(op, given, {torch_compat.OPAQUE: True}): True,
        graph.call_function(torch.ops.aten.add.Tensor, (x, x)): False,
    }
    assert [torch_compat.says_opaque(call) for call in calls] == list(calls.values())


def test_a_failure_of_a_trace_tells_where_the_forward_called_the_op():
    """In the forward by fx's stack, in the backward by the warning of anomaly detection."""

    @torch.library.custom_op("xtrain_test::reads", mutates_args=())
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    reads.register_fake(torch.empty_like)
    reads.register_autograd(lambda ctx, grad: grad * grad.sum().item())
    inner = torch_compat.inner_backend("aot_eager", mode=None, options={}, dynamic=None)
    found = []

    def backend(module, example_inputs):
        with torch_compat.noting_backward_errors() as in_backward:
            warnings.warn("another", UserWarning, stacklevel=1)
            try:
                return inner(module, example_inputs)
            except Exception as error:
                assert torch_compat.leaves_code_to_eager(error)
                stack = torch_compat.forward_stack(error, in_backward)
                found.append(torch_compat.frames(stack)[-1])
                raise

    def step(x):
        return reads(x).sin()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(step, backend=backend)(torch.ones(2, requires_grad=True))
    assert found[0] == (__file__, str(step.__code__.co_firstlineno + 1))
    texts = [str(w.message) for w in caught]
    assert "another" in texts and not any("Error detected" in text for text in texts)
    assert not torch_compat.leaves_code_to_eager(ValueError("reads"))
    assert torch_compat.forward_stack(ValueError("reads"), []) == ""
    assert torch_compat.frames('  File "a.py", line 3, in f\n    x') == [("a.py", "3")]
