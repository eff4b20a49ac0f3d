"""CompiledModel: the module that xtrain.compile returns.

Training and evaluation are compiled apart, each through an entry function of its own: a model that
never reads `self.training` gives Dynamo nothing to guard on, so the branch is taken here.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from xtrain import passes as graph_passes
from xtrain import torch_compat
from xtrain.compiler import entries, strict
from xtrain.compiler.compile_report import Report, Site
from xtrain.compiler.compile_session import Call, Session, SiteError
from xtrain.compiler.options import Options
from xtrain.compiler.sizes import Samples
from xtrain.compiler.step_keys import StepKeys, first_sample


def check_model(model: nn.Module) -> None:
    """Raise TypeError for what cannot be compiled: no module, or one that is compiled already."""
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


_HAS_GRAPHS = (
    "a CompiledModel runs graphs of its own, which another torch.compile cannot hold: leave out "
    "fullgraph=True, or the outer torch.compile"
)


class CompiledModel(nn.Module):
    """A model behind compiled graphs; everything but `forward` is the model's own.

    Parameters, buffers, submodules and their names are shared with the inner model, so state_dict,
    optimisers and wrappers see no prefix; other attributes fall through. `inner` is the model.
    Its `__class__` is the model's too: trainers ask isinstance(model, PreTrainedModel), and read
    the names of labels off the class.
    """

    # accelerate keeps the forward that it wraps as _original_forward, and looks for it there.
    _OWN = frozenset(
        "_session _inner _entries _group _forward forward _original_forward "
        "_compiled_call_impl".split()
    )

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
        torch_compat.ignore_logging_calls()
        if per_block:
            entries.compile_each_block(self._session)
            own["_entries"] = {True: model, False: model, None: model}
        else:
            own["_entries"] = {
                mode: functools.partial(
                    entries.compiled_entry(self._session, mode, entries.call_module, model), model
                )
                for mode in (True, False, None)
            }
        # A torch.compile around this object breaks its graph here: ours are compiled by themselves.
        own["_forward"] = torch.compiler.disable(self._run, reason=_HAS_GRAPHS)
        own["forward"] = MethodType(_forward_like(model.forward), self)

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

    @property
    def last_executed_sites(self) -> tuple[Site, ...]:
        """The sites whose dropout ran in the last forward through this object, in running order.

        Empty after an evaluation forward, with dropout 0 and before the first forward. Calls that
        reach the inner model past this object leave it as it was.
        """
        return self._session.last_executed

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session: Session = self._session
        mode = session.training_mode()
        training = mode is not False
        tensors = entries.tensors_in(args, kwargs)
        session.last_executed = ()
        call = None
        if training and session.options.dropout > 0:
            strict.check_can_drop(session, tensors)
            call = self._begin(tensors)
            call.is_mixed = mode is None
        elif not training:
            _warn_of_evaluation(session)
        session.shapes[training].note([tensor for tensor in tensors if tensor.ndim])
        session.shapes[training].mark(None, tensors)
        with (
            session.running(call),
            _clean_errors(session),
            entries.trace_settings(session),
            self._watching(call),
            strict.recorded(session, call, tensors) as program,
        ):
            result = self._entries[mode](*args, **kwargs)
        if call is not None:
            session.last_executed = tuple(call.executed)
            strict.check_forward(session, call, program, result)
        return result

    def _watching(self, call: Call | None) -> AbstractContextManager[Any]:
        """Follow the samples through code between graphs, where it matters where they are."""
        if call is None or not call.key.first_sample or self._session.is_one_graph:
            return nullcontext()
        return call.samples.watching()

    def _begin(self, tensors: list[torch.Tensor]) -> Call:
        session: Session = self._session
        strict.check_model_unchanged(session)
        sizes = [tensor.shape[0] for tensor in tensors if tensor.ndim]
        batch = next((size for size in sizes if size > 1), 1)
        samples = Samples(tensors)
        if torch_compat.in_backward():
            return Call(session.forwards.find("forward", tensors), batch, samples)
        is_default = not session.keys.is_bound
        default = first_sample(self._inner, batch, self._group) if is_default else 0
        key = session.keys.advance(default)
        session.forwards.record("forward", tensors, key)
        return Call(key, batch, samples, is_default)

    # --- what is the model's --------------------------------------------------------------------

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The inner model's class; type() still says CompiledModel."""
        inner = self.__dict__.get("_inner")
        return CompiledModel if inner is None else inner.__class__

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

    def _get_name(self) -> str:
        return type(self).__name__

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(type(self))})

    def extra_repr(self) -> str:
        """Name the wrapped class and the options that matter."""
        options = self._session.options
        return f"{type(self._inner).__name__}, dropout={options.dropout}, {options.backend}"

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")
        if inner is None:
            raise AttributeError(name)
        value = getattr(inner, name)
        if isinstance(value, MethodType) and value.__self__ is inner:
            return _watched(self._session, name, value)
        return value

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

    def __copy__(self) -> CompiledModel:
        raise TypeError(
            "a CompiledModel has no shallow copy: its steps and graphs belong to one object. Use "
            "copy.deepcopy(compiled), or compiled itself where the copy would share its weights."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a CompiledModel cannot be pickled: its compiled graphs live in this process. Save "
            "compiled.state_dict() (the inner model's keys), or pickle compiled.inner and compile "
            "it again after loading."
        )


@contextmanager
def _clean_errors(session: Session) -> Iterator[None]:
    """Raise our own errors as they are, not wrapped into Dynamo's."""
    try:
        yield
    except Exception as error:
        cause = torch_compat.backend_cause(error)
        if isinstance(cause, SiteError | graph_passes.PassError | ValueError):
            raise cause from cause.__cause__
        strict.check_has_values(session.model, error)
        raise


def _forward_like(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return CompiledModel's forward under the signature of the model's: trainers inspect it.

    A method, and without `__wrapped__`: who unwraps a forward must not end at the model's own,
    which has no dropout.
    """

    @functools.wraps(model_forward)
    def forward(self: CompiledModel, *args: Any, **kwargs: Any) -> Any:
        return self._forward(args, kwargs)

    del forward.__wrapped__
    signature = inspect.signature(model_forward)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    free = [p for p in signature.parameters.values() if p.name != "self"]
    forward.__signature__ = signature.replace(parameters=[own, *free])  # type: ignore[attr-defined]
    return forward


# --- training that goes past the dropout which was asked for: a warning, once ---------------------


def _is_asked_for(session: Session) -> bool:
    return session.options.dropout > 0 and torch.is_grad_enabled()


def _warn_once(session: Session, what: str, text: str) -> None:
    if what not in session.warned_of:
        session.warned_of.add(what)
        warnings.warn(text, stacklevel=2)


def _warn_of_evaluation(session: Session) -> None:
    """Take note of a forward without dropout: from_pretrained hands out models in eval mode."""
    if not _is_asked_for(session) or torch_compat.in_backward():
        return
    if any(parameter.requires_grad for parameter in session.model.parameters()):
        name = type(session.model).__name__
        _warn_once(
            session,
            "evaluation",
            f"{name} ran with gradients in eval mode, so without the dropout of "
            f"{session.options.dropout} that was asked for: call model.train() before "
            "training, or evaluate under torch.no_grad()",
        )


def _watched(session: Session, name: str, method: MethodType) -> MethodType:
    """Return a method of the model's own that warns where it trains past our forward.

    Its `self` is the model itself, whose forward has no dropout.
    """
    model = session.model
    if not model.training or not _is_asked_for(session) or name in session.warned_of:
        return method
    parts = {model, *session.blocks.modules.values()}

    def before(module: nn.Module, args: Any) -> None:
        if module in parts and module.training and not session.is_running:
            if _is_asked_for(session):
                _warn_once(
                    session,
                    name,
                    f"{type(model).__name__}.{name} called the model past its compiled "
                    "forward in training, so without dropout: call the compiled model and "
                    f"compute what {name} does of its output, or let {name} take the output",
                )

    @functools.wraps(method.__func__)
    def watch(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hook: Callable[..., Any] = nn.modules.module.register_module_forward_pre_hook
        handle = hook(before)
        try:
            return method(*args, **kwargs)
        finally:
            handle.remove()

    return MethodType(watch, model)
