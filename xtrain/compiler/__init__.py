"""xtrain.compile: torch.compile with graph passes, seeded dropout and a report of what they did.

    compiled = xtrain.compile(model, dropout=0.1, seed=0)
    loss = compiled(tokens, targets)[1]; loss.backward()
    print(compiled.report())

The only place where passes and torch.compile meet:

    compiled_model.py   the nn.Module that users hold
    options.py          keywords, checked
    entries.py          functions that torch.compile compiles: the whole model, or one block
    backend.py          what Dynamo calls with each graph: passes, then inductor or another backend
    seeds.py            the (seed, offset) input of a graph, filled at each call
    session.py          what the graphs of one model share: sites, keys, the running forward
    verify.py, graph_runs.py, closeness.py   the first step against the graphs without swaps
    strict_checks.py, uncovered.py, graph_breaks.py, backend_failures.py   what strict mode refuses
    layer_state.py      what layers keep side by side (a key-value cache), seen alike by each
    step_keys.py, data_parallel.py, dynamic_shapes.py, report.py   one topic each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from xtrain.compiler.compiled_model import CompiledModel, check_model
from xtrain.compiler.options import checked_options
from xtrain.compiler.report import Report, Site
from xtrain.compiler.session import SiteError
from xtrain.compiler.verify import VerifyError

__all__ = [
    "CompiledModel",
    "Report",
    "Site",
    "SiteError",
    "VerifyError",
    "compile",
    "compile_blocks",
]


def compile(
    model: nn.Module,
    *,
    dropout: float | None = None,
    seed: int | None = None,
    backend: str = "inductor",
    kernels: str = "auto",
    existing: str = "skip",
    logits: str = "keep",
    strict: bool = True,
    verify: bool = False,
    passes: Sequence[Any] = (),
    disable_passes: Sequence[str] = (),
    dump_graphs: str | Path | None = None,
    sums: Mapping[str, str] | None = None,
    data_parallel_group: Any = None,
    **torch_compile_kwargs: Any,
) -> CompiledModel:
    """Compile a decoder and put seeded, stateless dropout on its residual branches.

    Args:     model: any nn.Module, unchanged; it stays usable, without our dropout, by itself.
              dropout: probability of dropping in training; None takes `model.config.dropout` of
              xtrain's own Transformer and 0 for any other model.
              seed: base seed of the masks, from -2^63 to 2^64 - 1 as in a training run; None draws
              one at each training forward from torch's default CPU generator.
              backend: "inductor" | "aot_eager" | "eager": what runs the graphs after the passes.
              kernels: "auto" | "triton" | "off": which form swapped ops take.
              existing: for a site with an active dropout of its own, "skip" it or "replace" it.
              logits: "keep" | "drop": whether a training forward with labels returns logits.
              strict: raise when a site is left without dropout, when a sum that could carry a
              stream is neither a site nor left by a rule with a name, in a graph or in code that no
              graph holds, or when a forward executed fewer sites than the report lists.
              With strict=False such sites train without dropout, those that a graph break cuts
              among them (a break inside a branch); the report lists them as uncovered.
              verify: compute the first step a second time, from the graphs without our swaps and
              with the same masks, and hold loss, outputs and every gradient to it: class E2 of
              docs/design.md as it ran, and 8 digits of each op in fp64. A failure names the swap;
              strict raises it, else it is a warning and that graph runs without swaps, op by op,
              from the next step on. The report says what was compared and what could not be. Later
              steps are as fast as without. The first takes the time of one step in eager and of two
              in fp64, each with a second forward (on a CPU nine plain steps; more on a GPU that is
              slow in fp64), and the memory of one step in fp64: weights, activations and gradients
              in 8 bytes a number, beside those of the step itself.
              passes: graph passes of your own, functions or (name, function), run last.
              disable_passes: exact names of passes to leave out.
              dump_graphs: folder for each pass's graph, before and after, as readable Python.
              sums: what single sums are, by module path (`*` allowed) or "file.py:line": "drop" or
              "leave". It settles what strict mode calls unexplained, and overrules our rules.
              data_parallel_group: process group whose ranks share a global batch, for the default
              first_sample.
              torch_compile_kwargs: fullgraph, dynamic, mode, options, as for torch.compile. With
              dynamic=None the first other batch or length costs one compile more, which then serves
              every size; with dynamic=True the first graph does. A batch of 1 among others is one
              more each time, since torch makes no symbol of a size of 1.
    Returns:  CompiledModel, an nn.Module with the model's own forward signature, state_dict and
              names.
    Random:   mask = ops.dropout_mask(shape, p, rng.site_seed(seed, step, layer, site), offset),
              the same in every backend, dtype, device, recompute and cut of the batch.
    Raises:   TypeError, ValueError for a wrong argument; SiteError (strict) at a training forward;
              VerifyError (strict) there or in its backward.
    """
    check_model(model)
    options = checked_options(
        model,
        dropout=dropout,
        backend=backend,
        kernels=kernels,
        existing=existing,
        logits=logits,
        strict=strict,
        verify=verify,
        passes=passes,
        disable_passes=disable_passes,
        dump_graphs=dump_graphs,
        sums=sums,
        **torch_compile_kwargs,
    )
    return CompiledModel(model, options, seed, data_parallel_group, per_block=False)


def compile_blocks(
    model: nn.Module, *, data_parallel_group: Any = None, seed: int | None = None, **keywords: Any
) -> CompiledModel:
    """Compile each block class of a model once, for all its layers, and run the rest as it is.

    The first step of a deep model is much shorter than with `compile`; ops outside the blocks are
    not fused, and what is computed there is an input that proves nothing: transformers' rotary
    tables reach a block from outside, so its RoPE is not swapped (the report says "nothing shows
    that cos gives both members of a pair one angle"). Keywords, masks and report are those of
    `compile`.

    Layers share a graph although each reads an entry of its own in an object that all are given,
    in a list with one entry per layer or a dict by layer number: transformers' key-value caches,
    which are on by default. A float of each layer's own is an input of one graph for all where
    Dynamo can make it one; as an attention's scale it costs a graph for each layer, as other state
    by layer does; past Dynamo's recompile_limit that raises in a training forward.

    Raises:   ValueError if the model has no blocks (elements of a ModuleList with two matrices or
              more); else as `compile`.
    """
    check_model(model)
    options = checked_options(model, **keywords)
    return CompiledModel(model, options, seed, data_parallel_group, per_block=True)
