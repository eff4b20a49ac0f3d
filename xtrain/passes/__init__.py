"""The graph passes of xtrain.compile, in running order.

    insert_residual_dropout   first, on Dynamo's own graph: whatever fails later, dropout is in
    registered passes         the user's, in the order of registration, then those of this compile
    normalise                 on a copy: a later pass that fails costs kernels, never the dropout
    use_triton_rms_norm       first of the swaps: what it leaves is plainer for the others
    use_triton_rope           before attention, which reads its results
    use_triton_swiglu
    use_triton_geglu
    use_triton_sdpa           reads through the casts that rope left
    use_triton_linear_cross_entropy
    fuse_dropout_add_rms_norm behind the norms and the dropout that it joins
    remove_noop_views         last on it: views and casts that the swaps put back to back
    split_gradient_sums       on backward graphs that inductor is about to lower, where alone the
                              sums of autograd can be seen; behind a hook of the user's there

`after` places a registered pass behind any of these: behind one of the normalised graph, or of the
backward, it runs there, together with it. The passes from normalise on run in training graphs, with
kernels other than "off" and backends that compile; where only a pass of the user's asks for the
normalised graph, normalise runs for it alone. Those of the backward run wherever inductor does.

A pass is a function on one fx.Graph that changes it in place and returns a PassResult; it may look
into `walk_graphs(graph.owning_module)` for the bodies of checkpointed blocks.

graph.py is the one reading of a graph that all share; run.py runs passes and names them for the
cache; sites/ finds where dropout belongs and puts it there, swaps/ changes subgraphs for ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from torch import fx

from xtrain.passes.run import Pass, PassError, PassResult, cache_key, run_passes

INSERT_RESIDUAL_DROPOUT = "insert_residual_dropout"
NORMALISE = "normalise"
# Pass -> the file under xtrain/passes that has the function of its name, in running order; each
# stands where it does for the reason in this module's docstring.
_FILES = {
    INSERT_RESIDUAL_DROPOUT: "sites.insert_residual_dropout",
    NORMALISE: "swaps.normalise",
    "use_triton_rms_norm": "swaps.use_triton_rms_norm",
    "use_triton_rope": "swaps.use_triton_rope",
    "use_triton_swiglu": "swaps.use_triton_glu",
    "use_triton_geglu": "swaps.use_triton_glu",
    "use_triton_sdpa": "swaps.use_triton_sdpa",
    "use_triton_linear_cross_entropy": "swaps.use_triton_linear_cross_entropy",
    "fuse_dropout_add_rms_norm": "swaps.fuse_dropout_add_rms_norm",
    "remove_noop_views": "swaps.normalise",
    "split_gradient_sums": "swaps.split_gradient_sums",
}
PASSES: tuple[str, ...] = tuple(_FILES)
SWAPS: tuple[str, ...] = tuple(n for n in PASSES if n.startswith(("use_triton_", "fuse_")))

UserPass = Callable[[fx.Graph], PassResult | None]

_registered: dict[str, tuple[UserPass, str | None]] = {}

__all__ = [
    "PASSES",
    "SWAPS",
    "Pass",
    "PassError",
    "PassResult",
    "cache_key",
    "function",
    "order",
    "register",
    "run_passes",
    "unregister",
]


def function(name: str) -> Callable[..., PassResult]:
    """Return the function of one of our passes; its file is read on first use."""
    found: Callable[..., PassResult] = getattr(import_module(f"xtrain.passes.{_FILES[name]}"), name)
    return found


def register(name: str, pass_fn: UserPass, *, after: str | None = None) -> None:
    """Add a pass to every xtrain.compile that follows; the same name again replaces it.

    Args:     name: what logs, reports and `disable_passes` call it.
              pass_fn: takes one fx.Graph, changes it in place, returns a PassResult or None.
              after: name of the pass that it follows; None: behind all that run on Dynamo's graph.
    Raises:   ValueError if the name belongs to xtrain or `after` is unknown; TypeError if pass_fn
              cannot be called.
    """
    if name in PASSES:
        raise ValueError(f"pass name {name!r} belongs to xtrain; choose another")
    if not callable(pass_fn):
        raise TypeError(f"pass {name!r} must be a function of one fx.Graph, got {pass_fn!r}")
    if after is not None and after not in (*PASSES, *_registered):
        known = ", ".join((*PASSES, *_registered))
        raise ValueError(f"after={after!r} names no pass; known passes: {known}")
    _registered[name] = (pass_fn, after)


def unregister(name: str) -> None:
    """Take back a registered pass. Raises ValueError if there is none of that name."""
    if name not in _registered:
        raise ValueError(f"no registered pass {name!r}; registered: {', '.join(_registered)}")
    del _registered[name]


def order(
    builtin: Iterable[Pass], extra: Sequence[Any] = (), disabled: Iterable[str] = ()
) -> list[Pass]:
    """Return the passes in running order, less disabled; the user's stand before `normalise`.

    A registered pass whose `after` names a pass of another graph runs on that graph.

    Args:     builtin: xtrain's own passes with their options.
              extra: functions, or (name, function) pairs, of one call of xtrain.compile.
              disabled: exact names.
    Raises:   ValueError for a disabled name that no pass has, or a name used twice; TypeError for
              an extra pass that is neither a function nor (name, function).
    """
    passes = list(builtin)

    def end_of_first_stage() -> int:
        return next((i for i, p in enumerate(passes) if p.stage != "traced"), len(passes))

    for name, (pass_fn, after) in _registered.items():
        names = [p.name for p in passes]
        place = names.index(after) + 1 if after in names else end_of_first_stage()
        stage = passes[place - 1].stage if after in names else "traced"
        passes.insert(place, Pass(name, pass_fn, pass_fn, stage=stage))
    for item in extra:
        name, pass_fn = _named(item)
        passes.insert(end_of_first_stage(), Pass(name, pass_fn, pass_fn))
    names = [p.name for p in passes]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"two passes are named {twice[0]!r}; give each its own name")
    unknown = sorted(set(disabled) - set(names) - set(PASSES))
    if unknown:
        known = ", ".join(dict.fromkeys((*PASSES, *names)))
        raise ValueError(f"disable_passes names {unknown[0]!r}; the passes are {known}")
    return [p for p in passes if p.name not in set(disabled)]


def _named(item: Any) -> tuple[str, UserPass]:
    if (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and callable(item[1])
    ):
        return item
    name = getattr(item, "__name__", None)
    if callable(item) and isinstance(name, str):
        return name, item
    raise TypeError(f"a pass must be a function with a name, or (name, function), got {item!r}")
