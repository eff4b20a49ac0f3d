"""xtrain.compile: torch.compile with graph passes, seeded dropout and a report of what they did.

    compiled = xtrain.compile(model, dropout=0.1, seed=0)
    loss = compiled(tokens, targets)[1]; loss.backward()
    print(compiled.report())

The only place where passes and torch.compile meet. Training and evaluation are compiled apart, each
through an entry function of its own: a model that never reads `self.training` gives Dynamo nothing
to guard on, so the branch is taken here.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from xtrain import data_parallel, torch_compat
from xtrain import passes as graph_passes
from xtrain.backend import Backend, Call, Options, Session, SiteError
from xtrain.report import Report
from xtrain.step_keys import ReplayLedger, StepKey, StepKeys

__all__ = ["CompiledModel", "SiteError", "compile", "compile_blocks"]

_BACKENDS = ("inductor", "aot_eager", "eager")
_KERNELS = ("auto", "triton", "off")
_EXISTING = ("skip", "replace")
_LOGITS = ("keep", "drop")


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
    passes: Sequence[Any] = (),
    disable_passes: Sequence[str] = (),
    dump_graphs: str | Path | None = None,
    data_parallel_group: Any = None,
    **torch_compile_kwargs: Any,
) -> CompiledModel:
    """Compile a decoder and put seeded, stateless dropout on its residual branches.

    Args:     model: any nn.Module, unchanged; it stays usable, without our dropout, by itself.
              dropout: probability of dropping in training; None takes `model.config.dropout` of
              xtrain's own Transformer and 0 for any other model.
              seed: base seed of the masks; None draws one at each training forward from torch's
              default CPU generator.
              backend: "inductor" | "aot_eager" | "eager": what runs the graphs after the passes.
              kernels: "auto" | "triton" | "off": which form swapped ops take.
              existing: for a site with an active dropout of its own, "skip" it or "replace" it.
              logits: "keep" | "drop": whether a training forward with labels returns logits.
              strict: raise when a site is left without dropout, when blocks of one class differ in
              their sites, or when a forward executed fewer sites than the report lists.
              passes: graph passes of your own, functions or (name, function), run last.
              disable_passes: exact names of passes to leave out.
              dump_graphs: folder for each pass's graph, before and after, as readable Python.
              data_parallel_group: process group whose ranks share a global batch, for the default
              first_sample.
              torch_compile_kwargs: fullgraph, dynamic, mode, options, as for torch.compile.
    Returns:  CompiledModel, an nn.Module with the model's own forward signature, state_dict and
              names.
    Random:   mask = ops.dropout_mask(shape, p, rng.site_seed(seed, step, layer, site), offset),
              the same in every backend, dtype, device, recompute and cut of the batch.
    Raises:   TypeError, ValueError for a wrong argument; SiteError (strict) at a training forward.
    """
    options = _checked_options(
        model,
        dropout=dropout,
        backend=backend,
        kernels=kernels,
        existing=existing,
        logits=logits,
        strict=strict,
        passes=passes,
        disable_passes=disable_passes,
        dump_graphs=dump_graphs,
        **torch_compile_kwargs,
    )
    return CompiledModel(model, options, seed, data_parallel_group, per_block=False)


def compile_blocks(
    model: nn.Module, *, data_parallel_group: Any = None, seed: int | None = None, **keywords: Any
) -> CompiledModel:
    """Compile each block class of a model once, for all its layers, and run the rest as it is.

    The first step of a deep model is much shorter than with `compile`; ops outside the blocks are
    not fused. Keywords, masks and report are those of `compile`.

    Raises:   ValueError if the model has no blocks (elements of a ModuleList with two matrices or
              more); else as `compile`.
    """
    options = _checked_options(model, **keywords)
    return CompiledModel(model, options, seed, data_parallel_group, per_block=True)


class CompiledModel(nn.Module):
    """A model behind compiled graphs; everything but `forward` is the model's own.

    Parameters, buffers, submodules and their names are shared with the inner model, so state_dict,
    optimisers and wrappers see no prefix; other attributes fall through. `inner` is the model.
    """

    _OWN = frozenset({"_session", "_inner", "_entries", "_group", "_replays", "forward"})

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        seed: int | None,
        data_parallel_group: Any,
        *,
        per_block: bool,
    ):
        super().__init__()
        own = self.__dict__
        own["_inner"] = model
        for shared in ("_parameters", "_buffers", "_modules"):
            own[shared] = model.__dict__[shared]
        own["_session"] = Session(model, options, StepKeys(seed), per_block=per_block)
        own["_group"] = data_parallel_group
        own["_replays"] = ReplayLedger[StepKey]()
        torch_compat.ignore_logging_calls()
        if per_block:
            _compile_each_block(self._session)
            own["_entries"] = {True: model, False: model}
        else:
            own["_entries"] = {
                training: _compiled_entry(self._session, training, _call_module)
                for training in (True, False)
            }
            own["_entries"] = {
                training: functools.partial(entry, model)
                for training, entry in own["_entries"].items()
            }
        own["forward"] = _with_signature(self._forward, model.forward)

    # --- what is ours ---------------------------------------------------------------------------

    @property
    def inner(self) -> nn.Module:
        """The model that was compiled; calling it runs it as it is, without our dropout."""
        return self._inner

    def set_step(self, step: int, first_sample: int = 0) -> None:
        """Say which step, and which samples of the global batch, the next training forward holds.

        Args:     step: any int; the mask's key is (seed, step).
                  first_sample: global index of the first sample of the next forward's batch.
        Random:   binds exactly one training forward; one without it uses the last step + 1 and the
                  default first_sample. Ranks and micro-batches that name their samples draw the
                  masks that one process draws for the whole batch.
        """
        self._session.keys.set_step(step, first_sample)

    def report(self) -> Report:
        """Return what the passes found and did so far.

        Raises:   RuntimeError before the first forward, when nothing has been traced yet.
        """
        session = self._session
        report = session.report
        if not report.num_train_graphs and not report.num_eval_graphs:
            raise RuntimeError(
                "nothing has been compiled yet: run a forward before asking for the report"
            )
        report.sites = sorted(session.sites.values(), key=lambda s: s.layer)
        return report

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        session: Session = self._session
        training = self._inner.training and session.options.dropout > 0
        tensors = _tensors_in(args, kwargs)
        call = self._begin(tensors) if training else None
        session.shapes.note(tensors)
        session.shapes.mark(tensors)
        with _running(session, call), _clean_errors():
            with torch_compat.trace_config(**_trace_overrides(self._session.per_block)):
                result = self._entries[training](*args, **kwargs)
        if call is not None:
            _check_executed(session, call)
        return result

    def _begin(self, tensors: list[torch.Tensor]) -> Call:
        batch = tensors[0].shape[0] if tensors and tensors[0].ndim else 1
        if torch_compat.in_backward():
            return Call(self._replays.find("forward", tensors), batch)
        keys = self._session.keys
        default = 0
        if not keys.is_bound:
            default = data_parallel.first_sample(self._inner, batch, self._group)
        key = keys.advance(default)
        self._replays.record("forward", tensors, key)
        return Call(key, batch)

    # --- what is the model's --------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Whether the inner model is in training mode."""
        return self._inner.training

    @training.setter
    def training(self, mode: bool) -> None:
        inner = self.__dict__.get("_inner")
        if inner is not None:  # nn.Module.__init__ sets it before there is a model
            inner.training = mode

    def train(self, mode: bool = True) -> CompiledModel:
        """Set training mode on the inner model."""
        self._inner.train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CompiledModel:
        self._inner._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the inner model's state_dict, without any prefix."""
        return self._inner.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state_dict into the inner model."""
        return self._inner.load_state_dict(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the inner model's modules, itself first."""
        return self._inner.named_modules(*args, **kwargs)

    def extra_repr(self) -> str:
        """Name the wrapped class and the options that matter."""
        options = self._session.options
        return f"{type(self._inner).__name__}, dropout={options.dropout}, {options.backend}"

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_inner" not in self.__dict__ or name in self._OWN:
            super().__setattr__(name, value)
        elif name == "training":
            self._inner.training = value
        else:
            setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._inner, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        session = self._session
        return CompiledModel(
            copy.deepcopy(self._inner, memo),
            session.options,
            session.keys.seed,
            self._group,
            per_block=session.per_block,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a CompiledModel cannot be pickled: its compiled graphs live in this process. Save "
            "compiled.state_dict() (the inner model's keys), or pickle compiled.inner and compile "
            "it again after loading."
        )


# --- options ------------------------------------------------------------------------------------


def _checked_options(
    model: nn.Module,
    *,
    dropout: float | None = None,
    backend: str = "inductor",
    kernels: str = "auto",
    existing: str = "skip",
    logits: str = "keep",
    strict: bool = True,
    passes: Sequence[Any] = (),
    disable_passes: Sequence[str] = (),
    dump_graphs: str | Path | None = None,
    **torch_compile_kwargs: Any,
) -> Options:
    _check_model(model)
    for name, value, allowed in (
        ("backend", backend, _BACKENDS),
        ("kernels", kernels, _KERNELS),
        ("existing", existing, _EXISTING),
        ("logits", logits, _LOGITS),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    known = ("mode", "options", "dynamic", "fullgraph")
    if unknown := sorted(set(torch_compile_kwargs) - set(known)):
        raise TypeError(
            f"unexpected keyword {unknown[0]!r}; beside its own, xtrain.compile takes "
            f"{', '.join(known)} of torch.compile"
        )
    if isinstance(disable_passes, str):
        disable_passes = (disable_passes,)
    if not isinstance(passes, list | tuple):
        raise TypeError(f"passes must be a list of functions, got {passes!r}")
    graph_passes.order((), passes, disable_passes)  # wrong ones raise here, not in the first step
    if torch_compile_kwargs.get("options") is None:
        torch_compile_kwargs.pop("options", None)
    return Options(
        dropout=_probability(model, dropout),
        backend=backend,
        kernels=kernels,
        existing=existing,
        strict=strict,
        passes=tuple(passes),
        disable_passes=tuple(disable_passes),
        dump_graphs=None if dump_graphs is None else Path(dump_graphs),
        **torch_compile_kwargs,
    )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, CompiledModel):
        raise TypeError("model is compiled already; pass compiled.inner to compile it anew")
    for name, child in (pair for m in model.modules() for pair in m.named_children()):
        if isinstance(child, CompiledModel):
            raise TypeError(
                f"a part of the model, {name!r}, is compiled already; compile the whole or the part"
            )
    if hasattr(model, "_orig_mod") and type(model).__name__ == "OptimizedModule":
        raise TypeError("model comes from torch.compile; pass the model itself (model._orig_mod)")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        name = type(model).__name__
        raise TypeError(f"compile the model inside {name}: {name}(xtrain.compile(model), ...)")


def _probability(model: nn.Module, dropout: float | None) -> float:
    if dropout is None:
        from xtrain.model import Transformer

        dropout = model.config.dropout if isinstance(model, Transformer) else 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, int | float):
        raise TypeError(f"dropout must be a number in [0, 1] or None, got {dropout!r}")
    if math.isnan(dropout) or not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be in [0, 1], got {dropout}")
    return float(dropout)


# --- entries ------------------------------------------------------------------------------------


def _call_module(_xtrain_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _xtrain_model(*args, **kwargs)


def _call_block(_xtrain_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(_xtrain_model).forward(_xtrain_model, *args, **kwargs)


def _compiled_entry(
    session: Session, training: bool, function: Callable[..., Any]
) -> Callable[..., Any]:
    name = f"xtrain_{type(session.model).__name__}_{'train' if training else 'eval'}"
    return torch.compile(
        torch_compat.fresh_entry(function, name),
        backend=Backend(session, training=training),
        dynamic=session.options.dynamic,
        fullgraph=session.options.fullgraph,
    )


def _compile_each_block(session: Session) -> None:
    """Give each block a forward that runs the compiled graph of its class inside our forwards.

    It stays on the block, since a checkpoint around it calls it again in the backward; outside a
    forward of the compiled model it runs the block's own code.
    """
    blocks = {path: session.model.get_submodule(path) for path in session.blocks.paths}
    if not blocks:
        raise ValueError(
            f"{type(session.model).__name__} has no blocks to compile one by one (elements of a "
            "ModuleList, Sequential or ModuleDict with two matrices or more); use xtrain.compile"
        )
    entries: dict[tuple[type, bool], Callable[..., Any]] = {}
    for path, block in blocks.items():
        for training in (True, False):
            key = (type(block), training)
            if key not in entries:
                entries[key] = _compiled_entry(session, training, _call_block)
        by_mode = {mode: entries[type(block), mode] for mode in (True, False)}
        block.forward = _BlockForward(session, path, block, by_mode)


class _BlockForward:
    """The forward of one block of a model that is compiled block by block."""

    def __init__(
        self,
        session: Session,
        path: str,
        block: nn.Module,
        entries: dict[bool, Callable[..., Any]],
    ):
        self._session = session
        self._path = path
        self._block = block
        self._entries = entries
        self.__signature__ = inspect.signature(type(block).forward.__get__(block))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        recomputing = not session.is_running and torch_compat.in_backward()
        if not session.is_running and not recomputing:
            return type(self._block).forward(self._block, *args, **kwargs)
        training = self._block.training and session.options.dropout > 0
        entry = functools.partial(self._entries[training], self._block)
        session.shapes.mark(_tensors_in(args, kwargs))
        with session.running_block(self._path):
            if recomputing:
                with torch_compat.trace_config(**_trace_overrides(True)):
                    return entry(*args, **kwargs)
            return entry(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of the block run its own code: graphs and keys stay here."""
        return _own_forward, (self._block,)


def _own_forward(block: nn.Module) -> Callable[..., Any]:
    return type(block).forward.__get__(block)


def _tensors_in(*arguments: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]


def _trace_overrides(per_block: bool) -> dict[str, Any]:
    return torch_compat.trace_overrides(shared_layers=per_block)


@contextmanager
def _running(session: Session, call: Call | None) -> Iterator[None]:
    session.push(call)
    try:
        yield
    finally:
        session.pop()


@contextmanager
def _clean_errors() -> Iterator[None]:
    """Raise our own errors as they are, not wrapped into Dynamo's."""
    try:
        yield
    except Exception as error:
        cause = torch_compat.backend_cause(error)
        if isinstance(cause, SiteError | graph_passes.PassError | ValueError):
            raise cause from cause.__cause__
        raise


def _check_executed(session: Session, call: Call) -> None:
    """Hold the sites that a forward ran against the report and the blocks against one another."""
    if not session.options.strict:
        return
    if not call.executed:
        raise SiteError(
            f"dropout={session.options.dropout}, but the training forward of "
            f"{type(session.model).__name__} ran no residual site: none was found, or Dynamo fell "
            "back to eager (TORCH_LOGS=graph_breaks,recompiles says why). Pass strict=False to "
            "train without dropout."
        )
    executed = set(call.executed)
    missing = [s.name for s in session.sites.values() if s not in executed]
    if missing:
        raise SiteError(
            f"a training forward ran {len(executed)} residual sites of {len(session.sites)}; "
            f"missing: {', '.join(missing[:5])}. A part of the model was skipped, or Dynamo fell "
            "back to eager there (TORCH_LOGS=graph_breaks,recompiles says why). strict=False "
            "accepts it."
        )
    _check_blocks_agree(session)


def _check_blocks_agree(session: Session) -> None:
    """Blocks of one class in one list must have equally many sites.

    Across lists they need not: the blocks of an encoder and a decoder can share a class.
    """
    counts = Counter(block for block, _ in session.sites)
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for path, class_name in session.blocks.class_names.items():
        groups.setdefault((class_name, path.rpartition(".")[0]), {})[path] = counts.get(path, 0)
    for (class_name, _), per_block in groups.items():
        if len(set(per_block.values())) > 1:
            listed = ", ".join(f"{path}: {n}" for path, n in per_block.items())
            raise SiteError(
                f"blocks of class {class_name} differ in their number of residual sites ({listed})"
                "; a pattern was missed in some. strict=False accepts it."
            )


def _with_signature(function: Callable[..., Any], model_forward: Callable[..., Any]) -> Any:
    """Return function under the signature of the model's forward: trainers inspect it."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    forward.__signature__ = inspect.signature(model_forward)  # type: ignore[attr-defined]
    return forward
