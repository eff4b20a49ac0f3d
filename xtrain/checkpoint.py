"""Checkpoints that are complete or absent: a folder per step, written aside and renamed as a set.

    step_00000200/
        model.safetensors       weights and buffers, under the names of the plain model
        optimizer.safetensors   "parameter name / entry"
        rng.safetensors         states of torch's generators
        state.json              step, configuration, data position, versions
        manifest.json           size and SHA-256 of each file above, written last

A folder is written under a name that starts with `.tmp-`, every file and the folder are flushed to
the disk, then the folder is renamed. A kill at any moment leaves either the old set of checkpoints
or the new one; what a broken disk cuts short is found by the manifest. No pickle: a checkpoint of
unknown origin runs no code.

There is one set of names for a model's tensors, however it is wrapped. torch.compile,
DistributedDataParallel and checkpoint wrappers put a segment of their own into the names of a
state_dict (`_orig_mod.`, `module.`, `_checkpoint_wrapped_module.`). Here names are those of the
plain model: a segment is dropped where the module at that place *is* such a wrapper, so that a
child truly named `_orig_mod` keeps its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from xtrain.files import check_fields, flush, is_count, json_file, why

FORMAT = 1  # of the folder; raised when an older reader could not read a newer folder
_FOLDER_NAME = re.compile(r"step_(\d{8,})")
_TEMP, _OLD = ".tmp-", ".old-"  # names that no reader takes for a checkpoint


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found, read or loaded; the message says what to do."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint that the disk did not take."""


@dataclass(frozen=True)
class Checkpoint:
    """What `read` returns: tensors by file stem, and the contents of state.json."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def write(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep_last: int,
) -> Path:
    """Write the checkpoint of `step` finished steps; keep it and the keep_last - 1 before it.

    Args:     tensors: file stem -> name -> tensor, such as {"model": ..., "optimizer": ...}.
              state: anything JSON holds; "format" and "step" are added.
    Raises:   CheckpointWriteError when the disk is full or refuses; older ones are intact then.
    """
    final = folder / f"step_{step:08d}"
    temp = folder / f"{_TEMP}{final.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temp.mkdir()
        _write_files(temp, tensors, {"format": FORMAT, "step": step, **state})
        if final.exists():  # a broken one that a resume passed over
            os.rename(final, folder / f"{_OLD}{final.name}-{os.getpid()}")
        os.rename(temp, final)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temp, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        kept = steps(folder)
        newest = f"the newest is {folder / kept[-1][1].name}" if kept else "there is none yet"
        raise CheckpointWriteError(
            f"cannot write the checkpoint of step {step} to {final}: {reason}. Earlier "
            f"checkpoints are untouched ({newest}); free some space and resume"
        ) from error
    _remove_leftovers(folder)
    _drop_old(folder, step, keep_last)
    return final


def steps(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of everything that has a checkpoint's name, oldest first.

    Raises: CheckpointError for a folder that cannot be read.
    """
    try:
        found = [(match, path) for path in folder.iterdir() if (match := _match(path))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {why(error)}") from error
    return sorted((int(match[1]), path) for match, path in found)


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and why each newer one was passed over."""
    passed_over: list[str] = []
    for _, path in reversed(steps(folder)):
        reason = defect(path)
        if reason is None:
            return path, passed_over
        passed_over.append(f"{path}: {reason}")
    return None, passed_over


def defect(path: Path, *, contents: bool = True) -> str | None:
    """Return what is wrong with a checkpoint's files, None if they are as they were written.

    contents: read every byte, not the sizes alone.
    """
    name = "manifest.json"
    try:
        manifest = json_file(path / name)
        files = manifest["files"]
        if manifest["format"] > FORMAT:
            return f"written by a newer xtrain (format {manifest['format']})"
        for name, expected in files.items():
            status = (path / name).stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is no file"
            size = status.st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, not {expected['bytes']}"
        for name, expected in files.items() if contents else ():
            if _sha256(path / name) != expected["sha256"]:
                return f"{name} is damaged (its SHA-256 differs)"
        if contents:
            return _wrong_contents(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:  # no permission, a broken disk: nothing is said of what it holds
        return f"{name} cannot be read: {why(error)}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json is unreadable ({why(error)})"
    return None


def _wrong_contents(path: Path) -> str | None:
    """Return what is wrong with files that are as their manifest says, which may be forged."""
    match = _match(path)
    try:
        state = json_file(path / "state.json")
        check_fields(state, {"format": is_count, "step": is_count})
        if match is not None and state["step"] != int(match[1]):
            raise ValueError(f"step is {state['step']}, not {int(match[1])}")
    except (OSError, ValueError) as error:
        return f"state.json is damaged ({why(error)})"
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):  # reads the header
                pass
        except (OSError, SafetensorError) as error:
            return f"{file.name} is damaged ({why(error)})"
    return None


def read(path: Path, *, is_complete: bool = False) -> Checkpoint:
    """Read a checkpoint into CPU memory after checking every byte of it.

    is_complete: newest_complete has just done so.
    Raises: CheckpointError saying which file is missing or damaged.
    """
    reason = None if is_complete else defect(path)
    if reason is not None:
        raise CheckpointError(f"{path} is not a complete checkpoint: {reason}")
    state = json_file(path / "state.json")
    tensors = {
        # cloned: loaded tensors are a map of the file, which later saves delete
        file.stem: {name: tensor.clone() for name, tensor in load_file(file).items()}
        for file in sorted(path.glob("*.safetensors"))
    }
    return Checkpoint(path=path, step=state["step"], tensors=tensors, state=state)


def _write_files(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    files = {}
    for stem, group in tensors.items():
        path = folder / f"{stem}.safetensors"
        # what safetensors takes: contiguous, and no two tensors in one storage
        save_file({name: _own_storage(t) for name, t in group.items()}, path, {"format": "pt"})
        files[path.name] = path
    files["state.json"] = _write_json(folder / "state.json", state)
    manifest = {
        "format": FORMAT,
        "files": {
            name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for name, path in files.items()
        },
    }
    for path in (*files.values(), _write_json(folder / "manifest.json", manifest), folder):
        flush(path)


def _write_json(path: Path, value: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _own_storage(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _match(path: Path) -> re.Match[str] | None:
    return _FOLDER_NAME.fullmatch(path.name)


def _drop_old(folder: Path, step: int, keep_last: int) -> None:
    """Delete the checkpoints before step, all but the newest keep_last - 1 whole ones.

    One after it, which the resume has passed over as damaged, takes nobody's place: it stays until
    the run reaches its step.
    """
    older = [path for number, path in steps(folder) if number < step]
    whole = [path for path in older if defect(path, contents=False) is None]
    kept = whole[max(len(whole) - (keep_last - 1), 0) :]
    for path in older:
        if path not in kept:
            _discard(path)


def _discard(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that a kill half-way leaves no half of one."""
    aside = path.with_name(f"{_OLD}{path.name}-{os.getpid()}")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed save or deletion left behind; one process writes to a run's folder."""
    for path in folder.iterdir():
        if path.name.startswith((_TEMP, _OLD)):
            shutil.rmtree(path, ignore_errors=True)


# --- names ----------------------------------------------------------------------------------------

# class of torch -> the attribute under which it holds the wrapped module
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def plain_name(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return a tensor's name in the plain model.

    Args: name: as state_dict() or named_parameters() of the wrapped model gives it; modules: its
          named_modules(remove_duplicate=False) as a dict.
    """
    path, plain = "", []
    for segment in name.split("."):
        child = _wrapped_child(modules.get(path))
        # some wrappers have taken their own segment out already: step over it
        while child is not None and segment != child:
            path = _join(path, child)
            child = _wrapped_child(modules.get(path))
        path = _join(path, segment)
        if child is None:
            plain.append(segment)
    return ".".join(plain)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return id(parameter) -> name in the plain model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {id(p): plain_name(name, modules) for name, p in model.named_parameters()}


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (name -> tensor, alias -> name): a tensor under two names, as a tied head, once."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple, str] = {}
    for name, tensor in _plain_state(model).items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = tensor
    return tensors, aliases


@torch.no_grad()
def load_model_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None
) -> None:
    """Copy tensors into the model in place, so that ties and compiled graphs stay valid.

    Names with wrapper segments, as other programs save them, are understood.
    Raises: CheckpointError naming what is missing, left over or of another shape.
    """
    tensors = dict(tensors)
    for alias, name in (aliases or {}).items():
        if name not in tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name}, which {alias} is to be")
        tensors[alias] = tensors[name]
    own = _plain_state(model)
    found = _under_own_names(tensors, own)
    missing = [name for name in own if name not in found]
    left_over = [name for name in found if name not in own]
    shapes = [
        f"{name} is {tuple(found[name].shape)} in the checkpoint and {tuple(tensor.shape)} here"
        for name, tensor in own.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if missing or left_over or shapes:
        problems = [
            *([f"missing: {_few(missing)}"] if missing else []),
            *([f"not in the model: {_few(left_over)}"] if left_over else []),
            *([_few(shapes)] if shapes else []),
        ]
        raise CheckpointError(
            f"the checkpoint does not fit the model; {'; '.join(problems)}. Use the configuration "
            "that it was saved with"
        )
    for name, tensor in own.items():
        tensor.copy_(found[name])


def _plain_state(model: nn.Module) -> dict[str, Tensor]:
    modules = dict(model.named_modules(remove_duplicate=False))
    state: dict[str, Any] = model.state_dict()
    return {plain_name(name, modules): t for name, t in state.items() if isinstance(t, Tensor)}


def _under_own_names(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a file whose names carry wrapper segments to the model's own names."""
    by_stripped: dict[str, list[str]] = {}
    for name in own:
        by_stripped.setdefault(_stripped(name), []).append(name)
    found = {}
    for name, tensor in tensors.items():
        candidates = [name] if name in own else by_stripped.get(_stripped(name), [])
        found[candidates[0] if len(candidates) == 1 else name] = tensor
    return found


def _stripped(name: str) -> str:
    return ".".join(s for s in name.split(".") if s not in WRAPPERS.values())


def _wrapped_child(module: nn.Module | None) -> str | None:
    for base in type(module).__mro__:
        if base.__name__ in WRAPPERS and base.__module__.startswith("torch."):
            return WRAPPERS[base.__name__]
    return None


def _join(path: str, segment: str) -> str:
    return f"{path}.{segment}" if path else segment


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more
