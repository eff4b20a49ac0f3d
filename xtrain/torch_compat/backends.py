"""torch's own backends, what they are given, and the caches of what they compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def inner_backend(
    name: str,
    *,
    mode: str | None,
    options: dict[str, Any],
    dynamic: bool | None,
    backward_pass: Callable[[torch.fx.Graph], None] | None = None,
    backward_key: str = "",
) -> Callable[..., Callable[..., Any]]:
    """Return one of torch's own backends as (module, inputs) -> callable.

    Args:     name: "inductor" | "aot_eager" | "eager".
              backward_pass: what inductor runs on backward graphs that it is about to lower, behind
              a hook that the user has set there; backward_key: what its cache knows it by.

    For inductor, the bf16 roundings between ops that eager does are kept (design.md, E2), unless
    the options say otherwise.
    """
    if name == "inductor":
        wrapper = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        wrapper.config.setdefault("emulate_precision_casts", True)
        if backward_pass is not None:
            _chain_post_grad_pass(wrapper.config, backward_pass, backward_key)
        return wrapper
    return torch._dynamo.lookup_backend(name)


def _chain_post_grad_pass(
    config: dict[str, Any], run: Callable[[torch.fx.Graph], None], key: str
) -> None:
    """Have inductor run `run` on backward graphs, behind what the user has it run on graphs."""
    from torch._inductor import config as inductor_config
    from torch._inductor import custom_graph_pass

    hook = "post_grad_custom_pre_pass"
    given = config.get(hook, getattr(inductor_config, hook))
    theirs = given if isinstance(given, list | tuple) else [] if given is None else [given]
    # torch 2.11 has none that are told whether the graph is for inference
    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)

    class Chained(aware or custom_graph_pass.CustomGraphPass):  # type: ignore[misc]
        def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
            for their in theirs:
                is_aware = aware is not None and isinstance(their, aware)
                known = {"is_inference": is_inference} if is_aware else {}
                their(graph, **known)
            if any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder")):
                run(graph)

        def uuid(self) -> Any:
            """What inductor's cache knows the hooks by; None, no caching, where one has no name."""
            names = [their.uuid() if hasattr(their, "uuid") else None for their in theirs]
            return None if None in names else (key, *names)

    config[hook] = Chained()


def interpreting_backend(
    result: Callable[..., None], *, with_operands: bool = False
) -> Callable[..., Any]:
    """Return a backend that runs AOTAutograd's forward graph node by node, as aot_eager does.

    result: called as result(path, function, value) after each op; path is that of the innermost
            module of the node, relative to the compiled module, "" where none is known.
    with_operands: called as result(path, function, value, args, kwargs).
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    class Interpreter(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            value = super().run_node(node)
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                operands = self.fetch_args_kwargs_from_env(node) if with_operands else ()
                result(_module_path(node), node.target, value, *operands)
            return value

    def compile_forward(graph_module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(lambda *args: Interpreter(graph_module).run(*args))

    return aot_autograd(fw_compiler=compile_forward)


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])  # "L['self'].blocks.0"; 'fn' where torch wraps forward
    return path.partition("']")[2].lstrip(".") if path.startswith("L['") else path


def active_ddp_module() -> Any | None:
    """Return the DistributedDataParallel module whose forward is running, or None."""
    if not torch.distributed.is_available():
        return None
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def ddp_backend(ddp_module: Any, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return `backend` behind DDP's graph splitter, so that gradients are reduced bucket by bucket.

    This is what Dynamo does by itself under optimize_ddp, done here after our passes.
    """
    from torch._dynamo.backends.distributed import DDPOptimizer

    cap = ddp_module.bucket_bytes_cap
    # The first bucket is smaller by default, and may not be larger than the others.
    first = min(cap, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
    return DDPOptimizer(
        bucket_bytes_cap=cap, backend_compile_fn=backend, first_bucket_cap=first
    ).compile_fn


def fake_like_inputs(example_inputs: Sequence[Any], value: torch.Tensor) -> torch.Tensor:
    """Return `value` in the form that a backend gets its other inputs in: real or fake."""
    for example in example_inputs:
        if isinstance(example, FakeTensor):
            with example.fake_mode:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
    return value


def any_on_cuda(example_inputs: Sequence[Any]) -> bool:
    """Whether a tensor among the inputs of a graph is on a GPU."""
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs)


def add_compile_cache_tag(tag: str) -> None:
    """Make torch's compile caches on disk depend on `tag`.

    A cached kernel is found by the graph, which names our ops but not the code they are lowered to:
    without the tag an upgraded xtrain would run kernels compiled from the old source.
    """
    import torch.compiler.config as compiler_config

    if tag not in compiler_config.cache_key_tag:
        compiler_config.cache_key_tag += tag


def cache_key_tag(tag: str) -> Any:
    """Make torch's compile caches on disk depend on `tag` for what is compiled in the context."""
    import torch.compiler.config as compiler_config

    return compiler_config.patch(  # type: ignore[attr-defined]
        cache_key_tag=compiler_config.cache_key_tag + tag
    )
