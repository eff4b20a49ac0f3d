"""Every use of a torch internal, each with its reason and a contract test per torch version.

By topic: lowering.py inside inductor, backends.py around it, dynamo.py in front of both (and what
they fail with), running.py for what is asked while a model runs, under a transform of torch.func
too. Nothing imports inductor before a compile does: `import xtrain.ops` stays as cheap as
`import torch`.
"""

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

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
    ENTER_AUTOCAST,
    ENTER_INFERENCE_MODE,
    SET_GRAD_ENABLED,
    argument_error,
    backend_cause,
    cause_of,
    copy_marks,
    copy_source,
    forward_stack,
    frames,
    fresh_entry,
    graph_breaks,
    guarded_float,
    has_no_source,
    holds,
    ignore_logging_calls,
    is_erased,
    is_for_dynamo,
    is_graph_break,
    is_missing_compiler,
    leaves_code_to_eager,
    mark_dynamic,
    memory_of,
    noting_backward_errors,
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
    RecordingMode,
    StorageRef,
    autograd_kernel,
    backward_keeps_graph,
    empty_strided,
    has_triton,
    hidden_kernel,
    in_backward,
    in_function_transform,
    is_mapped_in_part,
    is_observed,
    is_transformed,
    kernel_starter,
    last_sequence_number,
    launched_kernel,
    noting_launches,
    num_writes,
    python_function,
    raw_stream,
    real_tensors,
    run_kernel,
    running_sequence_number,
    schema,
    without_memory,
)
