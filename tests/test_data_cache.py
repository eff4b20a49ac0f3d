"""The cache: keyed by content, complete or absent, safe for several processes, bounded memory."""

import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from xtrain import files
from xtrain.data import Corpus, DataError, cache, open_corpus


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("the quick brown fox\n" * 5000)
    return path


@pytest.fixture
def read(tmp_path, text_file):
    def read(**options) -> Corpus:
        options = {
            "data": [text_file],
            "cache_dir": tmp_path / "cache",
            "progress": False,
            **options,
        }
        return open_corpus(options.pop("data"), **options)

    return read


def token_files(tmp_path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*.tokens"))


def python(program: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, **pipes)


# Keys


def test_second_reading_uses_the_file(read, tmp_path, monkeypatch):
    first = read()
    (path,) = token_files(tmp_path)
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(cache, "_write_tokens", None)  # a second writing would fail
    second = read()
    assert path.stat().st_mtime_ns == written and token_files(tmp_path) == [path]
    assert isinstance(second.tokens, np.memmap) and not second.tokens.flags.writeable
    assert np.array_equal(first.tokens, second.tokens)
    assert (first.fingerprint, first.description) == (second.fingerprint, second.description)
    assert path.name == f"{first.fingerprint}.tokens"


def test_key_is_content_not_size_name_or_date(read, tmp_path, text_file):
    first = read()
    status = text_file.stat()
    text_file.write_text(text_file.read_text().replace("quick", "slick"))
    os.utime(text_file, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same date
    changed = read()
    assert changed.fingerprint != first.fingerprint
    assert changed.tokenizer.decode(changed.tokens[:10]) == "the slick "
    moved = text_file.rename(tmp_path / "moved.md")
    os.utime(moved, (0, 0))
    assert read(data=[moved]).fingerprint == changed.fingerprint


def test_key_knows_order_cut_tokenizer_and_options(read, tmp_path):
    names = {"b.txt": "aaa", "c.txt": "aab", "d.txt": "aaa\naab", "e.jsonl": '{"a": "x", "b": "y"}'}
    for name, content in names.items():
        (tmp_path / name).write_text(content)
    b, c, d, e = (tmp_path / name for name in names)
    prints = [
        read(data=data, **options).fingerprint
        for data, options in (
            ([b, c], {}),
            ([c, b], {}),
            ([b, c], {"errors": "replace"}),
            ([b, c], {"tokenizer": "bpe:257"}),
            ([b, c], {"tokenizer": "bpe:258"}),
            ([d], {}),
            ([e], {"field": "a"}),
            ([e], {"field": "b"}),
        )
    ]
    assert len(set(prints)) == len(prints)
    assert all(len(p) == 64 and int(p, 16) for p in prints)


def test_default_folder(monkeypatch, tmp_path, read):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    corpus = read(cache_dir=None)
    assert (tmp_path / "xdg" / "xtrain" / f"{corpus.fingerprint}.tokens").exists()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache.default_cache_dir() == tmp_path / "home" / ".cache" / "xtrain"


# Damage


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: data[:-1], "instead of"),
        (lambda data: data[:5000], "instead of"),
        (lambda data: data + b"\0\0", "instead of"),
        (lambda data: data[:50_000] + b"\x7f" + data[50_001:], "its checksum differs"),
        (lambda data: data[:100], "header is not intact"),
        (lambda data: b"", "header is not intact"),
        (lambda data: bytes(len(data)), "header is not intact"),
        (lambda data: b"\xff" * 4096 + data[4096:], "header is not intact"),
        (lambda data: data.replace(b"tokens", b"tokenS", 1), "header is not intact"),
        (lambda data: b"[]" + data[2:], "header is not intact"),
    ],
)
def test_a_damaged_file_is_noticed_and_built_again(read, tmp_path, damage, problem, caplog):
    good = read().tokens.tolist()
    (path,) = token_files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert read().tokens.tolist() == good
    assert caplog.text.count(f"{path} is damaged") == 1 and problem in caplog.text
    caplog.clear()
    assert read().tokens.tolist() == good and not caplog.text


def test_a_file_of_another_key_is_not_taken(read, tmp_path, caplog):
    one = read()
    (tmp_path / "b.txt").write_text("other")
    two = read(data=[tmp_path / "b.txt"])
    folder = tmp_path / "cache"
    (folder / f"{one.fingerprint}.tokens").replace(folder / f"{two.fingerprint}.tokens")
    assert read(data=[tmp_path / "b.txt"]).tokens.tolist() == list(b"other")
    assert "damaged" in caplog.text


def test_a_damaged_trained_tokenizer_is_trained_again(read, tmp_path, caplog):
    first = read(tokenizer="bpe:270")
    (path,) = (tmp_path / "cache").glob("*.tokenizer.json")
    path.write_text(path.read_text()[:-50])
    again = read(tokenizer="bpe:270")
    assert again.fingerprint == first.fingerprint and f"{path} is damaged" in caplog.text


def test_a_file_that_changes_while_it_is_read(read, tmp_path, text_file, monkeypatch):
    write_tokens = cache._write_tokens

    def write_then_touch(file, key, dtype, arrays):
        def touched():
            for ids in arrays:
                os.utime(text_file, (0, 0))
                yield ids

        write_tokens(file, key, dtype, touched())

    monkeypatch.setattr(cache, "_write_tokens", write_then_touch)
    with pytest.raises(DataError, match="a.txt changed while it was read; run again"):
        read()
    assert not list((tmp_path / "cache").iterdir())


def test_folder_that_cannot_be_written(read, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot (read|write) the .*cache") as caught:
        read()
    assert "\n" not in str(caught.value)


def test_full_disk_is_one_line_and_leaves_nothing(read, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="cannot write the cache .*: No space left on device; name"):
        read()
    assert not list((tmp_path / "cache").iterdir())


# Processes

# Says "half" with part of the tokens written, then goes on when it is told to.
HALF = """
import sys
from xtrain.data import cache, open_corpus
write_tokens = cache._write_tokens
def slow(file, key, dtype, arrays):
    def half():
        for ids in arrays:
            yield ids
            file.flush()
            print("half", flush=True)
            sys.stdin.readline()
    write_tokens(file, key, dtype, half())
cache._write_tokens = slow
print(open_corpus([sys.argv[1]], cache_dir=sys.argv[2]).tokens.sum())
"""


def finish(process: subprocess.Popen) -> int:
    """Let a process of HALF go on to its end; return the sum of the tokens it read."""
    out, error = process.communicate(b"go on\n")
    assert process.returncode == 0, error
    return int(out.split()[-1])


def test_killed_half_way_leaves_nothing_that_looks_usable(read, tmp_path, text_file):
    process = python(HALF, text_file, tmp_path / "cache")
    assert process.stdout.readline() == b"half\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    left = list((tmp_path / "cache").iterdir())
    assert not token_files(tmp_path) and any(path.suffix == ".tmp" for path in left)
    assert read().tokens.size == text_file.stat().st_size
    assert list((tmp_path / "cache").iterdir()) == token_files(tmp_path)  # and it is swept


def test_a_living_writer_keeps_its_temporary_file(read, tmp_path):
    other = tmp_path / "b.txt"
    other.write_text("other " * 1000)
    process = python(HALF, other, tmp_path / "cache")
    assert process.stdout.readline() == b"half\n"
    read()
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".tmp"]
    assert finish(process) == sum(other.read_bytes())
    assert len(token_files(tmp_path)) == 2


def test_two_processes_meet_at_the_lock(tmp_path, text_file):
    """The second waits for the first and reads its file; both get the same tokens."""
    first = python(HALF, text_file, tmp_path / "cache")
    assert first.stdout.readline() == b"half\n"
    second = python(HALF, text_file, tmp_path / "cache")
    assert second.stderr.readline().startswith(b"waiting for another process: ")
    expected = sum(text_file.read_bytes())
    assert finish(first) == expected
    out, error = second.communicate()  # never told to go on: it writes nothing itself
    assert out.split() == [str(expected).encode()], error
    assert list((tmp_path / "cache").iterdir()) == token_files(tmp_path)


def test_processes_without_locks_agree(tmp_path, text_file):
    """Where the file system has none, each writes its own temporary file; a rename settles it."""
    no_locks = (
        "import fcntl\ndef none(*_): raise OSError(95, 'not supported')\nfcntl.flock = none\n"
    )
    processes = [python(no_locks + HALF, text_file, tmp_path / "cache") for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == [b"half\n"] * 2
    assert [finish(process) for process in processes] == [sum(text_file.read_bytes())] * 2
    old = tmp_path / "cache" / "x.tokens.1-a.tmp"
    old.touch()
    os.utime(old, (0, 0))
    program = "import sys, pathlib; from xtrain import files;"
    sweep = no_locks + program + "files.remove_stale(pathlib.Path(sys.argv[1]))"
    python(sweep, tmp_path / "cache").communicate()
    assert list((tmp_path / "cache").iterdir()) == token_files(tmp_path)


def test_stale_files_go_by_their_lock(tmp_path):
    stale, alive = tmp_path / "a.tokens.1-a.tmp", tmp_path / "b.tokens.2-b.tmp"
    stale.touch()
    with files.open_locked(alive, "wb"):
        # Another process, for locks of one process never meet.
        sweep = "import sys, pathlib; from xtrain import files;"
        process = python(sweep + "files.remove_stale(pathlib.Path(sys.argv[1]))", tmp_path)
        process.communicate()
    assert list(tmp_path.iterdir()) == [alive]


# Output and memory


def test_lines_where_there_is_no_terminal(read, capfd):
    read(progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("tokenised 100,000 bytes with byte: 100,000")
    read(progress=True, tokenizer="bpe:300")
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["trained", "tokenised"]
    read(progress=True)
    read(progress=False, tokenizer="bpe:301")
    assert capfd.readouterr() == ("", "")


def test_a_bar_on_a_terminal(tmp_path, text_file):
    terminal, other_end = os.openpty()
    termios.tcsetwinsize(other_end, (24, 80))
    program = "import sys; from xtrain.data import open_corpus; open_corpus([sys.argv[1]], {})"
    options = f"cache_dir={str(tmp_path / 'cache')!r}"
    command = [sys.executable, "-c", program.format(options), str(text_file)]
    subprocess.run(command, stderr=other_end, check=True)
    os.close(other_end)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "hashing:" in shown and "tokenising:" in shown and "tokenised 100,000 bytes" in shown


# VmHWM, not ru_maxrss: a new program inherits the latter from the process that started it.
PEAK = """
import re, sys
from xtrain.data import open_corpus
def peak():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]) / 1024
small, large, folder, tokenizer = sys.argv[1:]
open_corpus([small], cache_dir=folder, tokenizer=tokenizer, progress=False)
before = peak()
open_corpus([large], cache_dir=folder, tokenizer=tokenizer, progress=False)
print(peak() - before)
"""


@pytest.mark.parametrize(("tokenizer", "megabytes", "bound"), [("byte", 128, 24), ("bpe", 4, 60)])
def test_memory_is_bounded(tmp_path, monkeypatch, tokenizer, megabytes, bound):
    """Growth of the peak over that of a small file: 6 MB measured for byte, 6 to 12 MB for BPE."""
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")  # each thread of BPE's adds pieces in flight
    rng = np.random.default_rng(0)
    words = np.array([b"alpha ", b"beta ", b"gamma\n", "d\u00e9lta ".encode(), b"0123 ", b"(x) "])
    block = b"".join(rng.choice(words, 200_000))  # about 1 MB
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    small.write_bytes(block)
    with open(large, "wb") as file:
        while file.tell() < megabytes << 20:
            file.write(block)
    if tokenizer == "bpe":
        tokenizer = tmp_path / "tokenizer.json"
        open_corpus(
            [small], tokenizer="bpe:300", cache_dir=tmp_path, progress=False
        ).tokenizer.save(tokenizer)
    process = python(PEAK, small, large, tmp_path / "cache", tokenizer)
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert float(out) < bound


def test_byte_tokens_come_at_disk_speed(tmp_path):
    """No Python per byte: 64 MB in well under a second of CPU (a loop over bytes takes 3)."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"0123456789abcde\n" * (4 << 20))
    started = time.process_time()
    corpus = open_corpus([path], cache_dir=tmp_path / "cache", progress=False)
    assert time.process_time() - started < 1.0
    assert np.array_equal(corpus.tokens, np.fromfile(path, dtype=np.uint8))
