"""Every use of a torch internal, each with its reason and a contract test per torch version.

By topic: lowering.py inside inductor, backends.py around it, dynamo.py in front of both, running.py
for what is asked while a model runs. Nothing here imports inductor before a compile does: `import
xtrain.ops` stays as cheap as `import torch`.
"""

from xtrain.torch_compat.backends import (
    active_ddp_module,
    add_compile_cache_tag,
    any_on_cuda,
    cache_key_tag,
    ddp_backend,
    fake_like_inputs,
    inner_backend,
    interpreting_backend,
)
from xtrain.torch_compat.dynamo import (
    argument_error,
    backend_cause,
    fresh_entry,
    graph_breaks,
    guarded_float,
    ignore_logging_calls,
    is_for_dynamo,
    is_graph_break,
    mark_dynamic,
    num_compiled_graphs,
    source_name,
    trace_config,
    trace_overrides,
)
from xtrain.torch_compat.lowering import (
    OPAQUE,
    call_in_inductors_code,
    flush_lowerings,
    lower_by_decomposition,
    position_of_opaque,
    says_opaque,
)
from xtrain.torch_compat.running import (
    PlainDispatchMode,
    StorageRef,
    backward_keeps_graph,
    empty_strided,
    has_triton,
    in_backward,
    is_observed,
    last_sequence_number,
    raw_stream,
    real_tensors,
    running_sequence_number,
)

__all__ = [
    "OPAQUE",
    "PlainDispatchMode",
    "StorageRef",
    "active_ddp_module",
    "add_compile_cache_tag",
    "any_on_cuda",
    "argument_error",
    "backend_cause",
    "backward_keeps_graph",
    "cache_key_tag",
    "call_in_inductors_code",
    "ddp_backend",
    "empty_strided",
    "fake_like_inputs",
    "flush_lowerings",
    "fresh_entry",
    "graph_breaks",
    "guarded_float",
    "has_triton",
    "ignore_logging_calls",
    "in_backward",
    "inner_backend",
    "interpreting_backend",
    "is_for_dynamo",
    "is_graph_break",
    "is_observed",
    "last_sequence_number",
    "lower_by_decomposition",
    "mark_dynamic",
    "num_compiled_graphs",
    "position_of_opaque",
    "raw_stream",
    "real_tensors",
    "running_sequence_number",
    "says_opaque",
    "source_name",
    "trace_config",
    "trace_overrides",
]
