"""The Python of a replay: what a recording wrote down, as straight lines.

As inductor does for a graph: a loop over steps would cost as much of the host's time again as the
launches in it. A plan is run(tensors, pointers, device) -> what the op returns, such as

    def run(tensors, pointers, device):
        stream = stream_of(device)
        p0, p1 = pointers
        t2 = empty((64, 128), (128, 1), c0)
        p2 = t2.data_ptr()
        start0((p0, p1 + 256, p2, 128, None, None), stream)
        return t2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from xtrain import torch_compat

Plan = Callable[[list[Tensor], list[int], int], Any]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# start(arguments, stream), its arguments without addresses, [(argument, slot, offset in bytes)]
Launch = tuple[Callable[[tuple[Any, ...], int], None], list[Any], list[tuple[int, int, int]]]
# operator, arguments, [(argument or name, value)], keywords, [(place in its result, value)]
Call = tuple[Any, list[Any], list[tuple[Any, int]], dict[str, Any], list[tuple[Any, int]]]


def of_launches(
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


def of_calls(
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
