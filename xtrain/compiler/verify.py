"""verify=True: the first step computed a second time from the graphs without our swaps.

Beside the first call of each swapped graph (of every layer, where layers share it) the graph before
`normalise`, its dropout in, runs on copies of the same inputs with the same masks: forward beside
the forward, forward and backward once the gradients of its outputs are there. Two questions:

    formula   both graphs op by op in fp64: do they compute the same, to 8 digits of each op? What a
              matcher got wrong (an eps, a sign, a mask, a detached operand) shows in any dtype.
    as run    what the compiled graph gave, in the step's own dtypes: class E2 of docs/design.md,
              an error against fp64 of at most twice that of the graph without swaps.

One run's error may be small by luck. Where a bound is passed, the graph without swaps runs a few
times more with noise in the last digit of each op, and the largest of its errors counts.

What fails is put down to the first pass whose graph fails: with it and those behind it left out,
the graph agrees.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from xtrain import passes, torch_compat
from xtrain.compiler.compile_report import readable_path
from xtrain.compiler.compile_session import Session
from xtrain.compiler.graph_runs import CallRuns, Step
from xtrain.passes.graph import tensor_meta

log = logging.getLogger("xtrain.passes")

NUM_NOISY_RUNS = 3
TORCH = "torch"  # who is at fault where a graph without swaps is as wrong
# Constants of formulas are matched to 8 digits: what differs by more in fp64 is another formula.
FORMULA = 2.0**-26
Values = dict[str, Tensor | None]
Tangents = Sequence[Tensor | None] | None  # gradients of outputs; None: outputs are compared


class VerifyError(passes.PassError):
    """A swapped graph whose outputs or gradients are not those of the graph without swaps."""


class VerifiedGraph:
    """A compiled graph that is held against the graph without swaps in the first step.

    Args:     compiled: what runs it.
              compile_graph: compiles another stage of it in the same way.
              plain: the graph before `normalise`, with its dropout.
              stages: (pass, the graph behind it), the last as it was compiled.
    """

    def __init__(
        self,
        session: Session,
        compiled: Callable[..., Any],
        compile_graph: Callable[[fx.GraphModule], Callable[..., Any]],
        plain: fx.GraphModule,
        stages: Sequence[tuple[str, fx.GraphModule]],
    ):
        self.session = session
        self.compiled = compiled
        self.compile_graph = compile_graph
        self.plain = plain
        self.stages = stages
        verification = session.report.verification
        assert verification is not None
        self.verification = verification
        self.failure: VerifyError | None = None
        self._forward: int | None = None  # the number of the one whose calls are verified
        self._placeholders = [n for n in plain.graph.nodes if n.op == "placeholder"]
        output: Any = next(n for n in reversed(plain.graph.nodes) if n.op == "output")
        self.outputs = [tensor_meta(n) for n in output.args[0]]
        model = session.model
        self._names = {id(x): name for name, x in model.named_buffers()}
        self._names |= {id(x): name for name, x in model.named_parameters()}

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph: compiled, or without swaps after a failure that was not raised."""
        if self.failure is not None:
            if self.session.verify_raises:
                raise self.failure
            return self.plain(*inputs)
        if self._forward is None:
            self._forward = self.session.num_forwards
            self.verification.num_graphs += 1
        if self._forward != self.session.num_forwards:
            return self.compiled(*inputs)
        return _Check(self, inputs).call(inputs)

    def name(self, position: int, value: Any) -> str:
        """What to call an input: a parameter's path, or where a value comes from."""
        node = self._placeholders[position]
        known = self._names.get(id(value))
        return known or readable_path(torch_compat.source_name(node)) or node.name

    def fail(self, what: str, pass_name: str) -> None:
        """Raise what was found, or say it and run without swaps from now on.

        Args:     pass_name: the pass at fault, "" if it is unknown.
        """
        verification = self.verification
        if pass_name and pass_name not in passes.PASSES:
            verification.leave_out(f"{what}: your pass {pass_name!r} changes it")
            return
        verification.failures.append(f"{what}, by {pass_name or 'the swapped graph'}")
        advice = (
            f"The graph agrees without {pass_name} and what builds on it: "
            f"disable_passes=[{pass_name!r}] trains without that swap"
            if pass_name
            else "No pass alone is at fault: kernels='off' trains without swaps"
        )
        text = f"verify: {pass_name or 'the swapped graph'} is wrong: {what}. {advice}."
        self.failure = VerifyError(text, pass_name)
        if self.session.verify_raises:
            raise self.failure
        log.warning("%s From now on this graph runs without swaps, op by op.", text)


class _Doorway(torch.autograd.Function):
    """Hands inputs on to a graph, and shows the gradients that the graph gives to each."""

    @staticmethod
    def forward(ctx: Any, see: Callable[..., None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.see = see
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.see(gradients)
        return None, *gradients


class _Check:
    """One call of a graph, held against the graph without swaps."""

    def __init__(self, graph: VerifiedGraph, inputs: Sequence[Any]):
        self.graph = graph
        self.swapped = graph.stages[-1][1]
        self.verification = graph.verification
        self.runs = CallRuns(graph.plain, inputs)
        self.names = [graph.name(i, x) for i, x in enumerate(inputs)]
        self.entered: list[int] = []  # inputs whose gradients are seen
        self.given: list[bool] = []  # which outputs the compiled graph gave
        self.loss: int | None = None
        self.tangents: list[Tensor | None] = [None] * len(graph.outputs)
        self.is_interpreted = False
        self.is_done = False

    def call(self, inputs: Sequence[Any]) -> Any:
        """Call the compiled graph; compare its outputs now, and gradients in the backward."""
        try:
            plain = self.runs.run(self.graph.plain)
        except Exception as error:
            self._leave_out("", error)
            return self.graph.compiled(*inputs)
        outputs = self.graph.compiled(*self._through_doorway(inputs, plain))
        self.given = [isinstance(x, Tensor) for x in outputs]
        self.loss = _position_of_loss(outputs)
        # Inductor has a generator of its own, and draws other numbers than ops that run one by one.
        others = self.runs.has_drawn_otherwise(plain)
        compiles = self.graph.session.options.backend == "inductor"
        self.is_interpreted = bool(self.runs.tape.drawn) and (others or compiles)
        self._compare_outputs(plain, outputs, inputs)
        if self.entered and self.graph.failure is None:
            for i, x in enumerate(outputs):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(functools.partial(self._note_tangent, i))
        return outputs

    def _through_doorway(self, inputs: Sequence[Any], plain: Step) -> list[Any]:
        """Put inputs that have gradients behind a node that sees those.

        What the graph writes, or hands on as an output, must stay the tensor that it is.
        """
        given = list(inputs)
        wanted = [i for i, is_wanted in enumerate(self.runs.wants_grad) if is_wanted]
        if written := [self.names[i] for i in wanted if i in plain.written]:
            self._leave_out("gradients: ", f"the graph writes {', '.join(written)} in place")
            return given
        self.entered = [i for i in wanted if i not in plain.returned]
        if self.entered:
            behind = _Doorway.apply(self._see, *(inputs[i] for i in self.entered))
            for i, x in zip(self.entered, behind, strict=True):
                given[i] = x
        return given

    def _note_tangent(self, position: int, gradient: Tensor | None) -> None:
        if not self.is_done:
            self.tangents[position] = gradient

    def _compare_outputs(self, plain: Step, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        if self.entered:
            metas = self.graph.outputs
            expected = self._flags([meta is not None and meta.requires_grad for meta in metas])
            found = self._flags([isinstance(x, Tensor) and x.requires_grad for x in outputs])
            for name, flag in expected.items():
                if not torch.equal(flag, found[name]):
                    other = functools.partial(_is_other, flag)
                    pass_name = self._blame(name, other, self.tangents, {})
                    self.graph.fail(f"{name} is not as without swaps", pass_name)
                    return
        step = Step(list(outputs), {i: inputs[i] for i in plain.written})
        num = self._judge(self._outputs(step), None, self._outputs(plain))
        self.verification.num_losses += num > 0 and self.loss is not None
        self.verification.num_outputs += num - (num > 0 and self.loss is not None)

    def _see(self, gradients: Sequence[Tensor | None]) -> None:
        """Compare the gradients of the first backward."""
        if self.is_done or self.graph.failure is not None:
            return
        self.is_done = True
        if not self.runs.parameters_are_as_before():
            self._leave_out("gradients: ", "parameters were written before the backward")
            return
        step = Step([], {}, gradients=dict(zip(self.entered, gradients, strict=True)))
        self.verification.num_gradients += self._judge(self._gradients(step), self.tangents)
        self.tangents = []

    # --- what a run gave, by name -----------------------------------------------------------------

    def _run(self, graph: Any, tangents: Tangents, **options: Any) -> Values:
        step = self.runs.run(graph, tangents=tangents, **options)
        return self._outputs(step) if tangents is None else self._gradients(step)

    def _outputs(self, step: Step) -> Values:
        """Outputs that the compiled graph gave (an option drops logits), and inputs written."""
        values: Values = {}
        for i, (x, is_given) in enumerate(zip(step.outputs, self.given, strict=True)):
            if is_given:
                values["the loss" if i == self.loss else f"output {i}"] = x
        for i, x in step.written.items():
            values[f"what is written into {self.names[i]}"] = x
        return values

    def _gradients(self, step: Step) -> Values:
        gradients = {
            f"the gradient of {self.names[i]}": step.gradients.get(i) for i in self.entered
        }
        return {**gradients, **(self._flags(step.differentiable) if step.differentiable else {})}

    def _flags(self, flags: Sequence[bool]) -> dict[str, Tensor]:
        return {
            f"whether output {i} has a gradient": torch.tensor(float(flag))
            for i, (flag, is_given) in enumerate(zip(flags, self.given, strict=True))
            if is_given
        }

    # --- comparing --------------------------------------------------------------------------------

    def _judge(self, actual: Values, tangents: Tangents, plain: Values | None = None) -> int:
        """Compare formulas and what was run; how many values agree, 0 where something does not."""
        try:
            worst = self._worst(actual, tangents, plain)
        except Exception as error:
            self._leave_out("", error)
            return 0
        if worst.ratio <= 1:
            self.verification.note_error(worst.ratio, worst.name)
            return len(actual)
        options = {} if worst.is_as_run else {"in_double": True}
        pass_name = self._blame(worst.name, worst.is_missed_by, tangents, options)
        what = f"{worst.name} is {worst.said}, {'as it ran' if worst.is_as_run else 'in fp64'}"
        if pass_name == TORCH and not self.is_interpreted:
            backend = self.graph.session.options.backend
            self._leave_out("", f"{what}, and so it is without swaps under {backend!r}")
            self.is_interpreted = True
            return self._judge(actual, tangents, plain)
        self.graph.fail(what, pass_name)
        return 0

    def _worst(self, actual: Values, tangents: Tangents, plain: Values | None) -> Comparison:
        """The value that is worst, the formulas first."""
        source = self.graph.plain

        def noisy(**options: Any) -> Callable[[], list[Values]]:
            seeds = range(NUM_NOISY_RUNS)
            return functools.cache(
                lambda: [self._run(source, tangents, seed=seed, **options) for seed in seeds]
            )

        reference = self._run(source, tangents) if plain is None else plain
        truth, formulas = reference, NOTHING
        try:
            step = self.runs.run(source, tangents=tangents, in_double=True)
            exact = self._outputs(step) if tangents is None else self._gradients(step)
            formula = self._run(self.swapped, tangents, in_double=True)
        except Exception as error:
            self._leave_out("formulas: in fp64 ", error)
        else:
            truth = reference if step.has_redrawn else exact
            more = noisy(in_double=True, noise=FORMULA)
            formulas = compare(formula, exact, exact, more, is_as_run=False)
        if formulas.ratio > 1:
            return formulas
        if self.is_interpreted:
            actual = self._run(self.swapped, tangents)
        as_run = compare(actual, reference, truth, noisy(noise=0.0), is_as_run=True)
        return max(formulas, as_run, key=lambda c: c.ratio)

    def _blame(
        self,
        name: str,
        is_wrong: Callable[[Tensor | None], bool],
        tangents: Tangents,
        options: dict[str, Any],
    ) -> str:
        """The first pass whose graph gives a wrong value, run op by op or else compiled."""
        before = (TORCH, self.graph.plain)
        for compiles, stages in ((False, self.graph.stages), (True, (before, *self.graph.stages))):
            for pass_name, module in () if compiles and options else stages:
                try:
                    what = self.graph.compile_graph(module) if compiles else module
                    values = self._run(what, tangents, **options)
                except Exception:
                    continue  # a later one may run
                if is_wrong(values.get(name)):
                    return pass_name
        return ""

    def _leave_out(self, what: str, reason: object) -> None:
        if isinstance(reason, Exception):
            first = str(reason).strip().partition("\n")[0]
            reason = f"{type(reason).__name__}: {first}"
        if self.verification.leave_out(f"{what}{reason}"):
            log.warning("verify: not compared: %s%s", what, reason)


def _is_other(flag: Tensor, value: Tensor | None) -> bool:
    return value is None or not torch.equal(flag, value)


def _position_of_loss(outputs: Sequence[Any]) -> int | None:
    """Which output is the loss: the only number."""
    numbers = [
        i
        for i, x in enumerate(outputs)
        if isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()
    ]
    return numbers[0] if len(numbers) == 1 else None


# --- how far values are from the truth, and how far they may be -----------------------------------


@dataclass(frozen=True)
class Comparison:
    """How far one value of the swapped graph is from the truth.

    bounds:   of the whole tensor's error and of its worst element's.
    excused:  elements that are not finite without swaps either.
    """

    name: str
    ratio: float = 0.0
    said: str = ""
    is_as_run: bool = False
    target: Tensor | None = None
    dtype: torch.dtype | None = None
    bounds: tuple[float, ...] = ()
    excused: Tensor | None = None

    def is_missed_by(self, value: Tensor | None) -> bool:
        """Whether another run's value is out of the bounds too."""
        if _form_differs(value, self.target, self.dtype, self.is_as_run):
            return True
        if self.target is None or not self.bounds:
            return False
        errors = _errors(_or_zeros(value, self.target), self.target, self.excused)
        return any(_ratio(e, b) > 1 for e, b in zip(errors, self.bounds, strict=True))


NOTHING = Comparison("nothing")


def compare(
    actual: Values,
    plain: Values,
    truth: Values,
    noisy: Callable[[], list[Values]],
    *,
    is_as_run: bool,
) -> Comparison:
    """The value of `actual` that is worst, against class E2, or the same formula in fp64.

    Args:     plain: what the graph without swaps gave in the dtypes of actual; the truth, in fp64.
              noisy: gives more of those, asked where the first alone is passed.
    """
    worst = NOTHING
    for name, value in actual.items():
        found = _compare_one(name, value, plain.get(name), truth.get(name), noisy, is_as_run)
        if found.ratio >= worst.ratio:
            worst = found
    return worst


def _compare_one(
    name: str,
    value: Tensor | None,
    plain: Tensor | None,
    target: Tensor | None,
    noisy: Callable[[], list[Values]],
    is_as_run: bool,
) -> Comparison:
    dtype = plain.dtype if plain is not None else None
    if said := _form_differs(value, target, dtype, is_as_run):
        return Comparison(name, math.inf, said, is_as_run, target, dtype)
    if is_as_run:  # torch's own backward may fill in zeros
        value, plain, target = _zeros_for_none(value, plain, target)
    if value is None or plain is None or target is None:
        return Comparison(name)
    excused = ~_difference(plain, target).isfinite()
    errors, sizes = (
        _errors(value, target, excused),
        _errors(target, torch.zeros_like(target), excused),
    )
    unit = _unit(value.dtype) if is_as_run else FORMULA
    spread = _errors(plain, target, excused)

    def bounds() -> tuple[float, ...]:
        return tuple(2 * s + unit * size for s, size in zip(spread, sizes, strict=True))

    def ratio() -> float:
        return max(map(_ratio, errors, bounds()))

    if ratio() > 1:
        for other in noisy():
            more = _errors(_or_zeros(other.get(name), target), target, excused)
            spread = tuple(map(max, spread, more))
    said = (
        f"off by {ratio():.2g} times the bound (error {errors[0]:.2g} in a norm of {sizes[0]:.2g})"
    )
    return Comparison(name, ratio(), said, is_as_run, target, dtype, bounds(), excused)


def _form_differs(
    value: Tensor | None, target: Tensor | None, dtype: torch.dtype | None, is_as_run: bool
) -> str:
    """What is another kind of value, "" if nothing is."""
    if value is None or target is None:
        if value is target or is_as_run:
            return ""
        return "missing" if value is None else "there, and is missing without swaps"
    if value.shape != target.shape:
        return f"of shape {tuple(value.shape)}, and of {tuple(target.shape)} without swaps"
    if dtype is not None and value.dtype != dtype:
        return f"{value.dtype}, and {dtype} without swaps"
    return ""


def _or_zeros(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if value is None else value


def _zeros_for_none(*values: Tensor | None) -> list[Tensor | None]:
    known = next((v for v in values if v is not None), None)
    return [known if known is None else _or_zeros(v, known) for v in values]


def _difference(value: Tensor, target: Tensor) -> Tensor:
    """The absolute difference in fp64; 0 where both are the same infinity or no number."""
    kind = torch.complex128 if target.is_complex() else torch.float64
    a, b = value.detach().to(kind), target.detach().to(kind)
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def _errors(value: Tensor, target: Tensor, excused: Tensor | None) -> tuple[float, ...]:
    """The norm of the difference and its largest element."""
    difference = _difference(value, target)
    if excused is not None:
        difference = difference.masked_fill(excused, 0.0)
    if not difference.numel():
        return 0.0, 0.0
    return float(difference.norm()), float(difference.max())


def _unit(dtype: torch.dtype) -> float:
    """Half an ulp of 1: what a last rounding may be off by."""
    is_float = dtype.is_floating_point or dtype.is_complex
    return torch.finfo(dtype).eps / 2 if is_float else 0.0


def _ratio(error: float, bound: float) -> float:
    if error <= bound:  # both may be 0
        return error / bound if bound and bound < math.inf else 0.0
    return error / bound if bound else math.inf
