"""Are the weights of two records the same numbers, whatever dtype each model has them in?"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
import xxhash
from drift_models import Rowwise, decoder, llama, tokens
from forge import edited, put

from xtrain.drift import compare, record
from xtrain.drift.cli import main
from xtrain.drift.recording.recorded_model import hash_weights

NAME = "blocks.1.feed_forward.up.weight"
PAIRS = [("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32")]
PAIRS += [("float64", "bfloat16"), ("float64", "float16")]


def model_in(dtype: str, change=None):
    """The decoder in a dtype; change(flat weights of one matrix) comes before the cast."""
    model = decoder().double() if dtype == "float64" else decoder()
    if change is not None:
        with torch.no_grad():
            change(model.get_parameter(NAME).view(-1))
    return model.to(getattr(torch, dtype))


def unseen(size: int) -> int:
    """An element that is none of the 16 samples: evenly spaced, first and last among them."""
    seen = {int(i) for i in np.linspace(0, size - 1, 16)}
    return next(i for i in range(size // 2, size) if i not in seen)


def a_little_larger(flat):
    """By 1/64: two units in the last place of bf16, so that every dtype shows it."""
    flat[unseen(flat.numel())] *= 1 + 2.0**-6


def by_one_ulp(flat):
    """Of fp32: less than what rounding to 8 or 11 digits keeps, most times."""
    index = unseen(flat.numel())
    flat[index] = torch.nextafter(flat[index].float(), torch.tensor(torch.inf))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_cast_model_has_the_same_weights_and_a_changed_one_has_not(pair):
    x = tokens()
    wide, narrow = (record(model_in(dtype), x) for dtype in pair)
    for a, b in ((wide, narrow), (narrow, wide)):
        assert compare(a, b).reason is None
    for changed in pair:
        other = record(model_in(changed, a_little_larger), x)
        kept = narrow if changed == pair[0] else wide
        for a, b in ((other, kept), (kept, other)):
            found = compare(a, b)
            assert (found.exit_code, found.reason) == (4, f"other weights: {NAME}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_the_rounding_takes_away_is_no_other_weight(dtype):
    """An element changed by one ulp of fp32 away from a tie rounds to the same number."""
    before, after = model_in("float32"), model_in("float32", by_one_ulp)
    cast = getattr(torch, dtype)
    parameters = (model.get_parameter(NAME).detach() for model in (before, after))
    one, two = parameters
    assert not torch.equal(one, two) and torch.equal(one.to(cast), two.to(cast))
    assert compare(record(after, tokens()), record(model_in(dtype), tokens())).reason is None
    assert compare(record(after, tokens()), record(before, tokens())).exit_code == 4


def test_a_bf16_checkpoint_loaded_in_each_dtype():
    """What bf16 holds fp32 holds too; fp16 holds it rounded, and has a smaller range."""
    values = [1e5, -1e5, 65520.0, 1e-7, -1e-9, 3e-5, 0.1, -0.0]

    def ends(flat):
        flat[3 : 3 + len(values)] = torch.tensor(values)

    x = tokens()
    kept, low = model_in("bfloat16", ends), record(model_in("bfloat16", ends), x)
    wide = record(model_in("bfloat16", ends).float(), x)
    half = record(model_in("bfloat16", ends).half(), x)
    for other in (wide, half):
        assert compare(low, other).reason is None and compare(other, low).reason is None
    with torch.no_grad():
        flat = kept.get_parameter(NAME).view(-1)
        flat[unseen(flat.numel())] *= 1.5
    found = compare(record(kept, x), half)  # of bf16 and fp16 nobody can tell why they differ
    assert found.exit_code == 4 and f"are the same: {NAME}, BF16 in A" in found.reason


def test_two_roundings_of_other_numbers_cannot_be_compared():
    """From bf16 and fp16 alone nobody can tell whether one fp32 checkpoint was behind both."""
    found = compare(record(model_in("bfloat16"), tokens()), record(model_in("float16"), tokens()))
    assert found.exit_code == 4 and "BF16 in A and F16 in B" in found.reason
    assert "record both in one dtype" in found.reason


def test_nan_in_the_same_place_is_the_same_weight():
    def spoil(flat):
        flat[unseen(flat.numel())] = torch.nan

    def negative(flat):
        flat[unseen(flat.numel())] = -torch.nan

    x = tokens()
    for dtype in ("bfloat16", "float16"):
        for spoiled in (spoil, negative):
            narrow = record(model_in(dtype, spoiled), x)
            assert compare(record(model_in("float32", spoil), x), narrow).reason is None
        assert compare(record(model_in("float32"), x), narrow).reason == f"other weights: {NAME}"


def test_the_hashes_are_those_of_the_rounded_numbers():
    """Against NumPy and integers: ties go to the even neighbour; several pieces are one tensor."""
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000], np.uint32)
    draw = np.random.default_rng(0).standard_normal(3 * (1 << 18) + 5).astype(np.float32)
    values = np.concatenate([ties.view(np.float32), draw, [65519.996, 65520.0, 2.0**-25, -1e-30]])
    values = values.astype(np.float32)
    module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.from_numpy(values))})
    [found] = hash_weights(module)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    bits = values.view(np.uint32).astype(np.uint64)
    brains = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert brains[:5].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80]
    assert found["xxh3_128"] == xxhash.xxh3_128_hexdigest(values.tobytes())
    assert found["rounded"] == {
        "BF16": xxhash.xxh3_128_hexdigest(brains.tobytes()),
        "F16": xxhash.xxh3_128_hexdigest(halves.tobytes()),
    }


def test_integers_empty_and_complex_weights_have_their_hashes():
    module = torch.nn.Module()
    module.register_buffer("steps", torch.arange(5))
    module.register_buffer("none", torch.empty(0, 3))
    module.register_buffer("complex", torch.tensor([complex(1, 2), complex(0, -0.5)]))
    steps, none, numbers = hash_weights(module)
    assert steps["rounded"] == {} and steps["xxh3_128"] == xxhash.xxh3_128_hexdigest(
        np.arange(5).tobytes()
    )
    assert none["xxh3_128"] == xxhash.xxh3_128_hexdigest(b"")
    halves = np.array([1, 2, 0, -0.5], np.float16)
    assert numbers["rounded"]["F16"] == xxhash.xxh3_128_hexdigest(halves.tobytes())


def test_a_record_from_before_the_rounded_hashes_is_compared_by_its_samples(tmp_path):
    def old(values):
        for weight in values["model"]["weights"]:
            del weight["rounded"]

    x = tokens()
    record(model_in("float32"), x, out=tmp_path / "a")
    record(model_in("bfloat16"), x, out=tmp_path / "b")
    a = edited(tmp_path / "a", tmp_path / "old", "record.json", old)
    assert compare(a, tmp_path / "b").reason is None


def test_edited_hashes_of_rounded_weights(tmp_path, capsys):
    x = tokens()
    record(Rowwise(), x, out=tmp_path / "a")
    record(Rowwise().bfloat16(), x, out=tmp_path / "b")
    weights = ("model", "weights", 0)

    for value in ([], {"F99": "0" * 32}, {"F16": "x"}, "0" * 32, None):
        forged = edited(
            tmp_path / "a", tmp_path / "x", "record.json", put(value, *weights, "rounded")
        )
        assert main(["compare", str(forged), str(tmp_path / "b")]) == 5
        assert "model.weights[0].rounded is" in capsys.readouterr().err
    forged = edited(tmp_path / "a", tmp_path / "x", "record.json", put(7.0, *weights, "samples", 3))
    for pair in ((forged, tmp_path / "b"), (tmp_path / "b", forged)):
        assert main(["compare", *map(str, pair)]) == 5
        assert "contradict each other" in capsys.readouterr().err


def test_a_hugging_face_folder_in_each_dtype(tmp_path, capsys):
    """Its fp32 numbers are behind bf16 and fp16 both; a folder with one other number is told.

    Cast by the library, which keeps the tables of frequencies in fp32.
    """
    model = llama()
    model.save_pretrained(tmp_path / "llama")
    with torch.no_grad():
        a_little_larger(model.model.layers[1].mlp.up_proj.weight.view(-1))
    model.save_pretrained(tmp_path / "other")
    flags = ["--tokens=1", "--num-prompts=1", "--threads=1", "--warm-up=0"]
    dtypes = ("fp32", "bf16", "fp16")
    for source in ("llama", "other"):
        for dtype in dtypes:
            out = str(tmp_path / f"{source}_{dtype}")
            source_flags = [str(tmp_path / source), *flags, "--dtype", dtype]
            assert main(["record", "--out", out, *source_flags]) == 0
    for one, two in itertools.product(dtypes, dtypes):
        same = compare(tmp_path / f"llama_{one}", tmp_path / f"llama_{two}")
        assert same.reason is None and (same.exit_code == 0) == (one == two)
        if one != two:
            assert tuple(same.first_divergence) == ("model.embed_tokens", "aten.embedding")
        found = compare(tmp_path / f"llama_{one}", tmp_path / f"other_{two}")
        assert found.exit_code == 4, (one, two)
    written = json.loads((tmp_path / "llama_bf16" / "record.json").read_text())
    assert len(written["model"]["checkpoint"]) == 32
