"""Records edited together with their manifest, so that no checksum tells: what a forger would do.

Files are written here by json and struct alone, not by the code under test.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import xxhash


def redo_manifest(folder: Path) -> None:
    """Make the manifest fit every file that is there."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json" and path.is_file():
            content = path.read_bytes()
            digest = xxhash.xxh3_128_hexdigest(content)
            files[path.name] = {"bytes": len(content), "xxh3_128": digest}
    manifest = {"format": "xtrain.drift", "version": 1, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edited(source: Path, target: Path, name: str, edit) -> Path:
    """Return a copy of a record in which edit(values) has changed a JSON file, manifest redone."""
    copied(source, target)
    values = json.loads((target / name).read_text())
    edit(values)
    (target / name).write_text(json.dumps(values))
    redo_manifest(target)
    return target


def put(value, *where):
    """Return an edit for `edited` that puts a value at a place, a key or index a level."""

    def edit(values) -> None:
        for key in where[:-1]:
            values = values[key]
        values[where[-1]] = value

    return edit


def tensors_of(path: Path) -> tuple[dict, bytes]:
    """Return header and data of a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_tensors(path: Path, header, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def copied(source: Path, target: Path) -> Path:
    """Return a copy of a record, in the place of another."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


def with_tensors(source: Path, target: Path, name: str, edit) -> Path:
    """Return a copy in which edit(header, data) -> data has changed tensors, manifest redone."""
    copied(source, target)
    header, data = tensors_of(target / name)
    data = edit(header, data)
    write_tensors(target / name, header, data)
    redo_manifest(target)
    return target


# --- random damage -------------------------------------------------------------------------------

STRANGE = [
    *(None, True, False, -1, 0, 1, 7, 1.5, -0.0, 10**30, -(10**30), 1e308, 2**63, 2**64),
    *("", "x", "nan", "inf", "F32", "BOOL", "\ud800", "\x00", "<b>&", "0" * 32, "é" * 300),
    *([], {}, [[]], [None], [0] * 40, [[1, 2], [3]], {"a": {"b": []}}, ["x", "y", "F32"]),
]
RAW = [b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b"NaN", b"\x00" * 64]


def places(value, found=None):
    """Return every (container, key) of a JSON value."""
    found = [] if found is None else found
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        found.append((value, key))
        if isinstance(item, dict | list):
            places(item, found)
    return found


def damage_json(values, rng: random.Random) -> None:
    """Change one place: another value, one less, one twice, two exchanged."""
    container, key = rng.choice(places(values))
    how = rng.choice(("replace", "replace", "delete", "double", "swap", "scale"))
    if how == "delete":
        del container[key]
    elif how == "double" and isinstance(container, list):
        container.insert(key, container[key])
    elif how == "swap":
        other = rng.choice(list(container) if isinstance(container, dict) else [0, -1])
        container[key], container[other] = container[other], container[key]
    elif how == "scale" and type(container[key]) in (int, float):
        container[key] = container[key] * rng.choice((-1, 2, 10**6)) + rng.choice((0, 1, 0.5))
    else:
        container[key] = rng.choice(STRANGE)


def damage_text(path: Path, rng: random.Random) -> None:
    """Put NaN, an infinity, a huge number or rubbish into the text of a file."""
    content = path.read_bytes()
    if rng.random() < 0.4:
        path.write_bytes(rng.choice(RAW))
        return
    numbers = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    at = rng.choice(numbers) if numbers else 0
    word = rng.choice((b"NaN", b"Infinity", b"-1e999", b"9" * 5000, b"9" * 4000, b'"', b"\xc3"))
    path.write_bytes(content[:at] + word + content[at + 1 :])


def damage_tensors(path: Path, rng: random.Random) -> None:
    """Change the header as JSON, rename or exchange tensors, or overwrite numbers."""
    header, data = tensors_of(path)
    if not header:
        return
    names = list(header)
    one, other = rng.choice(names), rng.choice(names)
    how = rng.choice(("json", "rename", "swap", "bytes", "cut", "grow", "copy"))
    if how == "json":
        damage_json(header, rng)
    elif how == "rename":
        header[rng.choice((other, "x", f"{one}x"))] = header.pop(one)
    elif how == "swap":
        header[one], header[other] = header[other], header[one]
    elif how == "copy":
        header[f"{one}0"] = header[one]
    elif how == "bytes" and data:
        at = rng.randrange(len(data))
        junk = rng.choice((b"\xff" * 8, bytes(8), rng.randbytes(8)))
        data = (data[:at] + junk + data[at + 8 :])[: len(data)]
    elif how == "cut":
        data = data[: len(data) // 2]
    elif how == "grow":
        data += bytes(8)
    write_tensors(path, header, data)


def damage_files(path: Path, rng: random.Random) -> None:
    """Take a file away, or put a folder or a link in its place."""
    how = rng.choice(("delete", "folder", "loop", "dangling", "link", "extra"))
    if how == "extra":
        (path.parent / rng.choice(("case_0009.json", "notes.txt", ".hidden"))).write_text("{}")
        return
    content = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "dangling":
        path.symlink_to("nowhere")
    elif how == "link":
        target = path.parent.parent / f"linked_{path.name}"
        target.write_bytes(content)
        path.symlink_to(target)


def damage(folder: Path, rng: random.Random) -> str:
    """Damage one file of a record at random, most times with its manifest redone; say which."""
    path = rng.choice(sorted(folder.iterdir()))
    kind = rng.random()
    if kind < 0.1:
        damage_files(path, rng)
    elif kind < 0.2:
        damage_text(path, rng)
    elif path.suffix == ".json":
        values = json.loads(path.read_text())
        damage_json(values, rng)
        path.write_text(json.dumps(values))
    else:
        damage_tensors(path, rng)
    if path.name != "manifest.json" and rng.random() < 0.95:
        redo_manifest(folder)
    return path.name
