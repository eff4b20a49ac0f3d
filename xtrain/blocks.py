"""What a block of a model is, and its ordinal: read off the module tree alone.

A residual site is named by the ordinal of its block, and that must not depend on what a graph
happens to show (a piece of the model, one layer that stands for all). So blocks are structure:
the elements of containers (ModuleList, Sequential, ModuleDict) that hold at least two matrices,
in module order, at the depth where the blocks of the architecture sit:

    encoder.block.0                T5: its `layer` list mixes classes, so the outer element counts
    layers.0.blocks.1              Swin: stages hold little but a list of equal blocks
    layers.0  (not mlp.experts.3)  mixture of experts: attention lies outside the inner list
    layers.0  (not layers.0.1)     ModuleList([attention, feed_forward]): its parts differ

Where nothing of two matrices is a block, modules of a single one are (x + linear(norm(x))), but for
torch's own layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# A stage may own a down-sampling or an embedding beside its list of blocks.
_MAX_MATRICES_OUTSIDE_INNER_BLOCKS = 2


class Blocks:
    """The blocks of one model: ordinals in module order, and which block a path belongs to."""

    def __init__(self, model: nn.Module):
        self.paths = next(filter(None, map(list, _candidates(model))), [])
        self.modules = {path: model.get_submodule(path) for path in self.paths}
        self._ordinals = {path: i for i, path in enumerate(self.paths)}
        # A module that stands in several places (layers that share weights) counts as its first.
        first = {module: path for path, module in model.named_modules()}
        self._first_path = {
            path: first[module] for path, module in model.named_modules(remove_duplicate=False)
        }
        # Sites outside any block are numbered behind the blocks, by their module's place.
        self._others = {
            path: len(self.paths) + i for i, (path, _) in enumerate(model.named_modules())
        }
        lists = {path.rpartition(".")[0] for path in self.paths}
        self._lists = {path: model.get_submodule(path) for path in sorted(lists)}
        self._lengths = {path: len(module._modules) for path, module in self._lists.items()}

    def block_of(self, path: str) -> str | None:
        """Return the path of the block that holds the module or parameter at `path`, or None."""
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            candidate = ".".join(parts[:end])
            candidate = self._first_path.get(candidate, candidate)
            if candidate in self._ordinals:
                return candidate
        return None

    def siblings(self, path: str) -> list[str]:
        """Return the blocks of the list that holds a block, itself among them, in order."""
        parent = path.rpartition(".")[0]
        return [other for other in self.paths if other.rpartition(".")[0] == parent]

    def changed_list(self) -> str:
        """Say which list of blocks has grown or shrunk since, "" when none has."""
        for path, module in self._lists.items():
            now, then = len(module._modules), self._lengths[path]
            if now != then and isinstance(module, _CONTAINERS):
                return f"{path or 'the model'} holds {now} modules and held {then}"
        return ""

    def layer(self, path: str) -> int:
        """Return the ordinal of a block, or of a module outside any. KeyError if there is none."""
        path = self._first_path[path]
        return self._ordinals[path] if path in self._ordinals else self._others[path]


def _candidates(model: nn.Module) -> Iterator[Iterator[str]]:
    for at_least in (2, 1):
        yield _blocks(model, "", at_least)
        yield _equal_siblings(model, at_least)


def _blocks(module: nn.Module, prefix: str, at_least: int) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_element = isinstance(module, _CONTAINERS)
        if is_element and (_is_list_of_parts(child) or _is_block(child, at_least)):
            yield path
        else:
            yield from _blocks(child, f"{path}.", at_least)


def _is_block(element: nn.Module, at_least: int) -> bool:
    is_container = isinstance(element, _CONTAINERS)
    return not is_container and _may_be_block(element, at_least) and not _is_stage(element)


def _may_be_block(module: nn.Module, at_least: int) -> bool:
    """Whether a module holds as many matrices; a single one is no layer of torch's own."""
    is_layer = at_least < 2 and type(module).__module__.startswith("torch.nn.modules")
    return not is_layer and _num_matrices(module) >= at_least


def _is_list_of_parts(element: nn.Module) -> bool:
    """Whether an element is a list whose members together are one block: attention, feed-forward.

    Members that are alike are blocks themselves, and so is what lies inside members that are lists.
    """
    if not isinstance(element, nn.ModuleList | nn.ModuleDict):
        return False
    members = [child for child in element.children() if _num_matrices(child)]
    if any(isinstance(m, nn.ModuleList | nn.ModuleDict) or _is_stage(m) for m in members):
        return False
    return len(members) >= 2 and len({_form(m) for m in members}) == len(members)


def _form(module: nn.Module) -> tuple[object, ...]:
    """What alike modules have in common: the classes that they are made of, in order.

    PreNorm(attention) and PreNorm(feed_forward) are not alike.
    """
    return tuple((name, type(child)) for name, child in module.named_modules())


def _is_stage(element: nn.Module) -> bool:
    """Whether an element is a stage that holds blocks of its own rather than being one."""
    inner = list(_block_lists(element))
    if not inner:
        return False
    outside = _num_matrices(element) - sum(_num_matrices(container) for container in inner)
    return outside <= _MAX_MATRICES_OUTSIDE_INNER_BLOCKS


def _block_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Containers of equal elements with two matrices or more, not looking inside those."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            elements = list(child.children())
            if (
                elements
                and len({type(e) for e in elements}) == 1
                and all(_num_matrices(e) >= 2 for e in elements)
                and not isinstance(elements[0], _CONTAINERS)
            ):
                yield child
                continue
        yield from _block_lists(child)


def _equal_siblings(model: nn.Module, at_least: int) -> Iterator[str]:
    """Blocks held as attributes (`self.block0`, `self.block1`) where no container holds any."""

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        children = list(module.named_children())
        classes = [type(child) for _, child in children if _may_be_block(child, at_least)]
        for name, child in children:
            if _may_be_block(child, at_least) and classes.count(type(child)) >= 2:
                yield f"{prefix}{name}"
            else:
                yield from walk(child, f"{prefix}{name}.")

    yield from walk(model, "")


def _num_matrices(module: nn.Module) -> int:
    return sum(parameter.ndim >= 2 for parameter in module.parameters())
