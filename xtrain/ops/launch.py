"""How kernels are launched: at once; from inductor's code, at a fraction of the cost to the host.

A call of an op goes through torch's dispatcher, the Python of its implementation, and Triton's own
launcher, which looks at each argument to find the kernel compiled for them; a GPU that has little
to do waits for that. Everything but the addresses follows from shapes, strides, dtypes and
constants. So the first call with each of them runs the implementation and writes down what it does:
which memory it takes and which compiled kernels it launches, with which arguments. Later calls do
just that, with the same kernels, so with the same bits.

Where inductor's code says all but the addresses, a call has a place of its own (Site) and is told
from others without a look at its tensors.

Where an implementation calls torch operators beside (attention by cuDNN, the copy of an input),
those are called again, in their order, without the Python around them. What cannot be written down
runs as it is, as a call of the op: what reads the values of tensors, writes to an input, or passes
a kernel more than addresses and constants (a descriptor holds an address).

Not user-defined kernels of inductor (torch.library.wrap_triton), which its launcher would start for
as little: up to torch 2.14 it hands on neither maxnreg, which the backward kernels of rows need,
nor enable_fp_fusion, on which the roundings of dropout_add_rms_norm depend.

CUDA graphs (mode="reduce-overhead") launch all kernels of a step at once and gain more, where their
fixed memory and shapes suit: a step of 256 tokens of the 124m model took 4.4 ms by them, 18.6 by
replays, 43.4 by calls of the ops; of 8192 tokens 17.4, 19.9 and 35.4
(bench/results/launch_124m_h200_2026-12.md). Replays are for all other compiles: the default mode,
and lengths that keep changing.

What a recording wrote down becomes straight lines of Python, as inductor does for a graph: a loop
over steps would cost as much of the host's time again as the launches in it. A plan is
run(tensors, pointers, device) -> what the op returns, such as

    def run(tensors, pointers, device):
        stream = stream_of(device)
        p0, p1 = pointers
        t2 = empty((64, 128), (128, 1), c0)
        p2 = t2.data_ptr()
        start0((p0, p1 + 256, p2, 128, None, None), stream)
        return t2

In this file: launch, by which every kernel starts; Replayed and Site, which inductor's code calls;
Recording, what an implementation does, written down; the plans that are made of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain import torch_compat

if TYPE_CHECKING:
    import triton

Plan = Callable[[list[Tensor], list[int], int], Any]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# start(arguments, stream), its arguments without addresses, [(argument, slot, offset in bytes)]
Launch = tuple[Callable[[tuple[Any, ...], int], None], list[Any], list[tuple[int, int, int]]]
# operator, arguments, [(argument or name, value)], keywords, [(place in its result, value)]
Call = tuple[Any, list[Any], list[tuple[Any, int]], dict[str, Any], list[tuple[Any, int]]]
_Origins = dict[int, tuple[int, int]]  # id of a tensor -> slot or value, offset in bytes
_Step = tuple[Launch | None, Call | None]  # one of the two
LAUNCH = 5  # parts of a noted launch; a call of an operator has four
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
CALLS: dict[str, Replayed] = {}  # by the op's name; what inductor's code calls, or from SITES
MAX_PLANS = 1024  # of an op; only changing shapes make more, and then the oldest are long dead
ALIGNMENT = 16  # bytes: Triton compiles for addresses that are multiples of it, and for others


class _OfThread(threading.local):
    note: Callable[[tuple[Any, ...]], None] | None = None


_of_thread = _OfThread()


def launch(
    kernel: triton.JITFunction, grid: tuple[int, ...], /, *args: Any, **options: Any
) -> None:
    """Do kernel[grid](*args, **options), and note it where somebody records what an op launches.

    Every kernel goes through here: one that did not would be missing where its op is replayed.
    """
    compiled = kernel[grid](*args, **options)
    if _of_thread.note is not None:
        _of_thread.note((kernel, compiled, grid, args, options))


@contextmanager
def noting(note: Callable[[tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `note` with each launch that this thread makes inside the context."""
    _of_thread.note = note
    try:
        yield
    finally:
        _of_thread.note = None


class Replayed:
    """An op's CUDA implementation, called like the op.

    Without autograd, and on the current device, which must be that of the tensors: inductor's code
    sees to both.
    """

    def __init__(
        self,
        op: torch._ops.OpOverload,
        implementation: Callable[..., Any],
        state: Callable[[], Any] = lambda: None,
    ):
        self._op = op
        self._implementation = implementation
        self.state = state  # what beside its arguments the implementation goes by
        self._plans: dict[tuple[Any, ...], Plan | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the op returns."""
        return self.call(args, kwargs)[0]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return what the op returns, and the plan by which it was done, None if by none."""
        pointers: list[int] = []
        tensors: list[Tensor] = []
        device = args[0].get_device()
        key: list[Any] = [device, self.state(), *kwargs.items()]
        for arg in args:
            if isinstance(arg, Tensor):
                tensors.append(arg)
                pointers.append(_describe(arg, key))
            elif isinstance(arg, list):
                key.append(len(arg))
                for tensor in arg:
                    tensors.append(tensor)
                    pointers.append(_describe(tensor, key))
            else:
                key.append(arg)
        plan_key = tuple(key)
        try:
            plan = self._plans[plan_key]
        except KeyError:
            return self._record(plan_key, args, kwargs), None
        if plan is None:
            return self._op(*args, **kwargs), None
        return plan(tensors, pointers, device), plan

    def _record(self, key: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        # objects of their own: one tensor given twice is two arguments, which may differ next time
        args = pytree.tree_map_only(Tensor, torch.Tensor.detach, args)
        recording = Recording(pytree.tree_leaves(args))
        with torch.no_grad(), noting(recording.note_launch), recording:
            result = self._implementation(*args, **kwargs)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = recording.plan(result)
        return result


def _describe(tensor: Tensor, key: list[Any]) -> int:
    """Add to key all that decides how kernels are launched on tensor; return its address."""
    pointer = tensor.data_ptr()
    key += (tensor.dtype, tensor.shape, tensor.stride(), pointer % ALIGNMENT)
    return pointer


class Site:
    """A call in inductor's code that is always made with the same shapes, strides and constants.

    What is left to look at are addresses: where one is aligned otherwise than the last time, the
    call is for Replayed, whose key of a dozen parts a tensor costs more than the launch itself.
    """

    def __init__(self, replayed: Replayed):
        self._replayed = replayed
        self._plan: Plan | None = None
        self._state: Any = None
        self._device = 0
        self._places: list[tuple[int, bool]] = []  # of tensors, and of lists of them
        self._alignment: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the op returns."""
        tensors: list[Tensor] = []
        for place, is_list in self._places:
            if is_list:
                tensors += args[place]
            else:
                tensors.append(args[place])
        pointers = [tensor.data_ptr() for tensor in tensors]
        if (
            self._plan is None
            or [pointer % ALIGNMENT for pointer in pointers] != self._alignment
            or self._replayed.state() != self._state
        ):
            return self._call(args, kwargs)
        return self._plan(tensors, pointers, self._device)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, plan = self._replayed.call(args, kwargs)
        if plan is not None:
            kinds = [isinstance(arg, list) for arg in args]
            self._places = [
                (i, kinds[i]) for i, arg in enumerate(args) if kinds[i] or isinstance(arg, Tensor)
            ]
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            self._alignment = [tensor.data_ptr() % ALIGNMENT for tensor in tensors]
            self._device, self._state = args[0].get_device(), self._replayed.state()
            self._plan = plan
        return result


class _Sites(dict[tuple[str, str], Site]):
    def __missing__(self, key: tuple[str, str]) -> Site:
        site = self[key] = Site(CALLS[key[0]])
        return site


SITES = _Sites()  # by the op's name and all that is the same at each call, as text


# --- What an implementation does, written down ---------------------------------------------------


class Recording(TorchDispatchMode):
    """Notes what an implementation calls and launches."""

    def __init__(self, leaves: list[Any]):
        super().__init__()
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._steps: list[tuple[Any, ...]] = []  # (operator, args, kwargs, result), or a launch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _tensors((args, kwargs, result)):  # others tell from constants: torch.promote_types
            self._steps.append((func, args, kwargs or {}, result))
        return result

    def note_launch(self, launch: tuple[Any, ...]) -> None:
        """Take down a launch, as `launch` notes it."""
        self._steps.append(launch)

    def plan(self, result: Any) -> Plan | None:
        """Return how to do the same again, or None where it cannot be said."""
        results = list(result) if isinstance(result, tuple) else [result]
        is_tuple = isinstance(result, tuple)
        return self._launches(results, is_tuple) or self._calls(results, is_tuple)

    def _launches(self, results: list[Any], is_tuple: bool) -> Plan | None:
        origins = {id(t): (slot, 0) for slot, t in enumerate(self._inputs)}
        allocated: list[Tensor] = []
        launches = []
        for step in self._steps:
            if len(step) == LAUNCH:
                launch = _as_launch(origins, *step)
                if launch is None:
                    return None
                launches.append(launch)
            elif step[0] in _EMPTY:
                origins[id(step[3])] = (len(self._inputs) + len(allocated), 0)
                allocated.append(step[3])
            elif not _note_views(origins, *step):
                return None
        layouts, places = [_layout(t) for t in allocated], []
        for tensor in results:
            slot, offset = origins.get(id(tensor), (-1, 0))
            place = slot - len(self._inputs)
            if place < 0 or offset or place in places or not _fills(tensor, allocated[place]):
                return None
            places.append(place)
            layouts[place] = _layout(tensor)
        if not launches:
            return None
        device_type, num_inputs = self._inputs[0].device.type, len(self._inputs)
        return _plan_of_launches(device_type, num_inputs, layouts, launches, places, is_tuple)

    def _calls(self, results: list[Any], is_tuple: bool) -> Plan | None:
        values = {id(t): (number, 0) for number, t in enumerate(self._inputs)}
        steps: list[_Step] = []
        for step in self._steps:
            launch, call = None, None
            if len(step) == LAUNCH:
                launch = _as_launch(values, *step)
            else:
                call = self._as_call(values, *step)
            if launch is None and call is None:
                return None
            steps.append((launch, call))
        if any(id(tensor) not in values for tensor in results):
            return None
        places = [values[id(tensor)][0] for tensor in results]
        num_inputs = len(self._inputs)
        if min(places) < num_inputs:
            return None
        with_ends = _let_go(_without_unread(steps, places), num_inputs, places)
        device_type = self._inputs[0].device.type
        return _plan_of_calls(device_type, num_inputs, with_ends, places, is_tuple)

    def _as_call(
        self, values: _Origins, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> Call | None:
        """Return the call of an operator, or None for one that a replay may not make."""
        arguments = func._schema.arguments
        positional = self._read(values, dict(enumerate(args)), dict(enumerate(arguments)))
        by_name = self._read(values, kwargs, {argument.name: argument for argument in arguments})
        if positional is None or by_name is None or not _tensors(result):
            return None
        constants = [None if isinstance(arg, Tensor) else arg for arg in args]
        keywords = {name: arg for name, arg in kwargs.items() if not isinstance(arg, Tensor)}
        parts = [(None, result)] if isinstance(result, Tensor) else list(enumerate(result))
        made = []
        for place, part in parts:
            if isinstance(part, Tensor):
                made.append((place, values.setdefault(id(part), (_count(values), 0))[0]))
            elif _tensors(part):
                return None
        return func, constants, positional + by_name, keywords, made

    def _read(
        self, values: _Origins, given: dict[Any, Any], arguments: dict[Any, Any]
    ) -> list[tuple[Any, int]] | None:
        """Return (place or name, value) of each tensor given, or None where a replay may not."""
        read = []
        for place, arg in given.items():
            if isinstance(arg, Tensor):
                if id(arg) not in values:
                    return None
                number = values[id(arg)][0]
                info = arguments[place].alias_info
                if info is not None and info.is_write and number < len(self._inputs):
                    return None
                read.append((place, number))
            elif _tensors(arg):
                return None
        return read


def _as_launch(
    origins: _Origins,
    kernel: Any,
    compiled: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Launch | None:
    """Return what starts the kernel, its arguments, and where addresses go among them."""
    if compiled is None:  # under Triton's interpreter
        return None
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **named)
    bound.apply_defaults()
    start, kept, trailing = torch_compat.kernel_starter(compiled, (*grid, 1, 1)[:3])
    constants: list[Any] = []
    addresses = []
    for number, value in enumerate(bound.arguments.values()):
        if isinstance(value, Tensor):
            if id(value) not in origins:
                return None
            addresses.append((len(constants), *origins[id(value)]))
            value = None
        elif not _is_constant(value):
            return None
        if kept is None or number in kept:
            constants.append(value)
    return start, [*constants, *[None] * trailing], addresses


def _is_constant(value: Any) -> bool:
    """Whether an argument of a kernel says the same at every call; a descriptor does not."""
    return (
        value is None
        or type(value) in (bool, int, float, str)
        or type(value).__module__.startswith("triton.language")
    )


def _note_views(
    origins: _Origins, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any
) -> bool:
    """Note where the views lie that an operator gave; False where it did anything else."""
    if not args or id(args[0]) not in origins or func._schema.is_mutable:
        return False
    slot, offset = origins[id(args[0])]
    for view in pytree.tree_leaves(result):
        if not isinstance(view, Tensor) or _storage(view) != _storage(args[0]):
            return False
        origins[id(view)] = (slot, offset + view.data_ptr() - args[0].data_ptr())
    return True


def _without_unread(steps: list[_Step], results: list[int]) -> list[_Step]:
    """Return the steps but for operators whose results nothing reads: views to ask about."""
    read, kept = set(results), []
    for launch, call in reversed(steps):
        if call is None or call[0]._schema.is_mutable or any(v in read for _, v in call[4]):
            kept.append((launch, call))
            read |= set(_read(launch, call))
    return kept[::-1]


def _let_go(
    steps: list[_Step], num_inputs: int, results: list[int]
) -> list[tuple[Launch | None, Call | None, list[int]]]:
    """Return the steps, each with the values that it is the last to read or make."""
    last: dict[int, int] = {}
    for number, (launch, call) in enumerate(steps):
        made = [] if call is None else [value for _, value in call[4]]
        last |= dict.fromkeys([*_read(launch, call), *made], number)
    dead: list[list[int]] = [[] for _ in steps]
    for value, number in last.items():
        if value >= num_inputs and value not in results:
            dead[number].append(value)
    return [(launch, call, dead[i]) for i, (launch, call) in enumerate(steps)]


def _read(launch: Launch | None, call: Call | None) -> list[int]:
    pairs = [] if launch is None else [(place, value) for place, value, _ in launch[2]]
    return [value for _, value in [*pairs, *([] if call is None else call[2])]]


def _count(values: _Origins) -> int:
    return 1 + max((number for number, _ in values.values()), default=-1)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fills(view: Tensor, allocated: Tensor) -> bool:
    """Whether view is all of an allocation, its dims in whatever order."""
    dims = [
        (stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size != 1
    ]
    dense = 1
    for stride, size in sorted(dims):
        if stride != dense:
            return view.numel() == 0 == allocated.numel()
        dense *= size
    return dense == allocated.numel() and view.dtype == allocated.dtype


# --- Plans ---------------------------------------------------------------------------------------


def _plan_of_launches(
    device_type: str,
    num_inputs: int,
    allocations: list[Layout],
    launches: list[Launch],
    results: list[int],
    is_tuple: bool,
) -> Plan:
    """Return a plan that does nothing but launch, on inputs and on memory of its own.

    Args:     results: places among the allocations, whose slots follow those of the inputs.
    """
    code = _Code(device_type)
    code.unpack("p", num_inputs, "pointers")
    for slot, layout in enumerate(allocations, num_inputs):
        code.add(f"t{slot} = empty({', '.join(map(code.constant, layout))})")
        code.add(f"p{slot} = t{slot}.data_ptr()")
    for start, arguments, addresses in launches:
        texts = [code.constant(argument) for argument in arguments]
        for place, slot, offset in addresses:
            texts[place] = f"p{slot} + {offset}" if offset else f"p{slot}"
        code.launch(start, texts)
    return code.plan([f"t{num_inputs + place}" for place in results], is_tuple)


def _plan_of_calls(
    device_type: str,
    num_inputs: int,
    steps: list[tuple[Launch | None, Call | None, list[int]]],
    results: list[int],
    is_tuple: bool,
) -> Plan:
    """Return a plan of operators and launches; values count inputs, then what operators make.

    Args:     steps: a launch or a call, and the values that no later step reads: they are let go.
    """
    code = _Code(device_type)
    code.unpack("t", num_inputs, "tensors")
    for launch, call, dead in steps:
        if launch is not None:
            start, arguments, addresses = launch
            texts = [code.constant(argument) for argument in arguments]
            for place, value, _ in addresses:
                texts[place] = f"t{value}.data_ptr()"
            code.launch(start, texts)
        elif call is not None:
            _add_call(code, *call)
        if dead:
            code.add("del " + ", ".join(f"t{value}" for value in dead))
    return code.plan([f"t{value}" for value in results], is_tuple)


def _add_call(
    code: _Code,
    operator: Any,
    arguments: list[Any],
    read: list[tuple[Any, int]],
    keywords: dict[str, Any],
    made: list[tuple[Any, int]],
) -> None:
    texts = [code.constant(argument) for argument in arguments]
    named = {name: code.constant(value) for name, value in keywords.items()}
    for place, value in read:
        if isinstance(place, str):
            named[place] = f"t{value}"
        else:
            texts[place] = f"t{value}"
    texts += [f"{name}={text}" for name, text in named.items()]
    text = f"{code.constant(operator)}({', '.join(texts)})"
    if [place for place, _ in made] == [None]:
        code.add(f"t{made[0][1]} = {text}")
        return
    code.add(f"several = {text}")
    for place, value in made:
        code.add(f"t{value} = several[{place}]")
    code.add("del several")


class _Code:
    """Lines of a function and the objects that they name."""

    def __init__(self, device_type: str):
        self._lines = ["def run(tensors, pointers, device):"]
        self._names: dict[str, Any] = {
            "empty": torch_compat.empty_strided(device_type),
            "stream_of": torch_compat.raw_stream(device_type),
        }
        self.add("stream = stream_of(device)")

    def add(self, line: str) -> None:
        self._lines.append(f"    {line}")

    def unpack(self, prefix: str, count: int, name: str) -> None:
        if count:
            self.add("".join(f"{prefix}{i}, " for i in range(count)) + f"= {name}")

    def constant(self, value: Any) -> str:
        """Return text for value: itself where that is exact, or a name."""
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is tuple and all(type(part) is int for part in value):
            return repr(value)
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def launch(self, start: Callable[..., None], texts: Sequence[str]) -> None:
        arguments = "".join(f"{text}, " for text in texts)
        self.add(f"{self.constant(start)}(({arguments}), stream)")

    def plan(self, results: list[str], is_tuple: bool) -> Plan:
        self.add(f"return ({', '.join(results)},)" if is_tuple else f"return {results[0]}")
        exec(compile("\n".join(self._lines), "<replay of an xtrain op>", "exec"), self._names)
        return self._names["run"]
