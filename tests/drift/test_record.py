"""What a record holds, against hooks, a plain forward and the model's own generate()."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from drift_models import (
    Gate,
    Rowwise,
    Scale,
    decoder,
    gpt2,
    llama,
    next_up,
    prompts,
    subject,
    tokens,
)
from torch import nn

from xtrain.drift import DriftError, Record, compare, record
from xtrain.drift.cli import main
from xtrain.drift.comparison.drift_report import as_json, as_text
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.recording.observe import Runner, find_blocks
from xtrain.drift.recording.recorded_model import derived_buffers, draw_weights
from xtrain.drift.recording.tensors import to_float64
from xtrain.drift.settings import Run


def test_ops_in_graph_order_with_their_modules_and_values():
    model, x = decoder(), tokens()
    outputs = {}
    for path in ("blocks.0.attention.query", "blocks.1.feed_forward_norm", "blocks.1"):
        module = model.get_submodule(path)
        module.register_forward_hook(lambda m, i, out, path=path: outputs.update({path: out}))
    with torch.no_grad():
        logits, _ = model(x)
    found = record(model, x, tensors=True)
    [step] = found.cases[0].steps
    keys = step.keys()
    assert keys[0] == ("embedding", "aten.embedding", "F32")
    # 7 products a block and the head; views are none
    assert sum(key.op == "aten.mm" for key in keys) == 2 * 7 + 1
    assert not {"aten.view", "aten.t", "aten.transpose", "aten.slice"} & {key.op for key in keys}
    paths = [key.path for key in keys]
    assert paths.index("blocks.0.attention.query") < paths.index("blocks.0.attention")
    assert paths[-1] == "head"
    for path, expected in outputs.items():
        kind = "blocks" if path == "blocks.1" else "ops"
        index = [i for i, key in enumerate(step.keys(kind)) if key.path == path][-1]
        if kind == "ops":
            np.testing.assert_array_equal(step.value(index)[0].ravel(), expected.detach().ravel())
        else:
            np.testing.assert_array_equal(step.rows(index)[0], expected[0].detach())
    np.testing.assert_array_equal(step.logits()[0], logits[0])
    assert step.tokens == logits[0].argmax(-1).tolist()
    top = logits[0].sort(dim=-1, descending=True)
    assert step.info["top_ids"] == top.indices[:, :8].tolist()
    margins = (top.values[:, 0].double() - top.values[:, 1].double()).tolist()
    assert step.info["margin"] == margins


@pytest.mark.parametrize("batch", [1, 2])
def test_the_hash_of_a_prompt_s_part_and_of_the_whole_tensor(batch):
    model, x, found = decoder(), tokens(batch=batch), []
    model.embedding.register_forward_hook(lambda m, i, out: found.append(out.detach().numpy()))
    kept = record(model, x)
    for row, step in enumerate(kept.steps()):
        columns = step.columns()
        for name, array in (("hash", found[0][row]), ("whole", found[0])):
            mark = getattr(columns, name)[0].tobytes()
            assert mark == xxhash.xxh3_128_digest(np.ascontiguousarray(array).tobytes())
        assert columns.shape[0].tolist() == [1, 9, 32, *[-1] * 5]
        assert columns.whole_shape[0].tolist() == [batch, 9, 32, *[-1] * 5]


def test_mode_and_weights_are_left_as_they_were():
    model = decoder().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    record(model, tokens())
    assert model.training and "forward" not in vars(model)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class InPlace(nn.Module):
    """Writes into its own results, into fresh memory, and makes several at once."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, input_ids):
        x = torch.empty(*input_ids.shape, 8)
        x.copy_(input_ids.unsqueeze(-1) * self.weight)
        x.add_(1)
        values, _ = x.sort(dim=-1)
        return values


def test_in_place_ops_are_recorded_and_fresh_memory_is_not():
    found = record(InPlace(), tokens(length=3), tensors=True)
    [step] = found.cases[0].steps
    ops = [key.op for key in step.keys()]
    assert ops == ["aten.mul", "aten.copy", "aten.add", "aten.sort", "aten.sort.1"]
    x = tokens(length=3).float().unsqueeze(-1).expand(1, 3, 8)
    for index, expected in ((1, x), (2, x + 1)):  # as it was then, not as it became
        np.testing.assert_array_equal(step.value(index)[0], expected)


def test_a_model_that_mixes_its_rows_is_caught():
    class Mixing(Rowwise):
        def forward(self, input_ids):
            x = super().forward(input_ids)
            return x + 1e-3 * x.mean(dim=0, keepdim=True)

    lists = [[1, 2, 3], [4, 5, 6]]
    alone = record_prompts(subject(Mixing()), prompts(*lists), Run(num_tokens=1))
    both = record_prompts(subject(Mixing()), prompts(*lists), Run(num_tokens=1, batch_size=2))
    found = compare(alone, both)
    assert found.exit_code in (1, 2) and found.first_divergence.op != "logits"
    assert found.first_divergence.module_path == ""


def test_padding_is_cut_off_scores_too():
    model = decoder()
    plain = record_prompts(subject(model), prompts([1, 2, 3, 4]), Run(num_tokens=2))
    padded = record_prompts(subject(model), prompts([1, 2, 3, 4]), Run(num_tokens=2, pad_to=7))
    found = compare(plain, padded)
    assert not found.unmatched
    shapes = [
        [tuple(row[row >= 0]) for row in r.cases[0].steps[0].columns().shape]
        for r in (plain, padded)
    ]
    assert shapes[0] == shapes[1]
    assert found.max_shift < 1e-6 and found.exit_code in (0, 1)


@pytest.mark.parametrize("make", [decoder, llama, gpt2], ids=lambda make: make.__name__)
def test_the_graph_of_aot_eager_matches_the_dispatch_trace(make):
    """Both run the same aten ops; what only one has is listed, and no bit may differ."""
    model, x = make(), tokens(length=11)
    eager, graph = record(model, x), record(model, x, mode="aot_eager")
    found = compare(eager, graph)
    assert found.exit_code == 0 and found.first_divergence is None
    assert found.num_matched >= 40
    assert graph.contents["observer_effect"] == {"differs": False, "max_abs": 0.0}
    if make is decoder:
        assert not found.unmatched
    paths = {
        key.path for key in graph.cases[0].steps[0].keys() if key.op in ("aten.mm", "aten.addmm")
    }
    assert paths == {
        p.rpartition(".")[0]
        for p, _ in model.named_parameters()
        if "norm" not in p
        and "ln_" not in p
        and "embed" not in p
        and "wte" not in p
        and "wpe" not in p
    } | ({"lm_head"} if make is gpt2 else set())


def test_inductor_keeps_block_outputs_and_the_logits_of_the_unobserved_run():
    model, x = decoder(1), tokens(length=11)
    eager, fused = record(model, x), record(model, x, mode="inductor")
    [step] = fused.cases[0].steps
    assert step.keys() == () and [k.path for k in step.keys("blocks")] == ["blocks.0"]
    with torch.no_grad():
        expected, _ = torch.compile(model, dynamic=False)(x)
    np.testing.assert_array_equal(step.logits()[0], expected[0])
    found = compare(eager, fused)
    assert found.exit_code in (0, 1, 2) and found.max_shift < 1e-5
    assert {item.record for item in found.unmatched} == {"a"}
    if found.first_divergence:
        assert found.first_divergence.op in ("output", "logits")


def test_tensors_of_ops_that_nobody_sees_are_refused(tmp_path):
    for model, mode in ((decoder(), "inductor"), (torch.compile(decoder(), backend="eager"), None)):
        with pytest.raises(DriftError, match="tensors=True keeps the results of ops, and with mod"):
            record(model, tokens(), mode=mode, tensors=True, out=tmp_path / "x")
    assert not list(tmp_path.iterdir())


class Shy(Rowwise):
    """Has a faster path where nobody watches, as some of torch's own modules do."""

    def __init__(self, watched, alone=0.0):
        super().__init__()
        self.watched, self.alone = watched, alone

    def forward(self, input_ids):
        moved = self.watched if self.layers[0]._forward_hooks else self.alone
        return super().forward(input_ids) + moved


@pytest.mark.parametrize("number", [0.5, torch.nan, torch.inf])
def test_an_observer_effect_is_said(number):
    found = record(Shy(number), tokens(), warm_up=1)
    size = number if number == 0.5 else float("inf")
    effect = {"differs": True, "max_abs": pytest.approx(size)}
    assert found.contents["observer_effect"] == effect
    result = compare(found, found)
    assert f"observer effect in A: watched, the logits move by {size:g}" in as_text(result)
    json.dumps(as_json(result), allow_nan=False)
    both = record(Shy(number, number), tokens(), warm_up=1)
    assert both.contents["observer_effect"]["differs"] is False


def test_the_largest_observer_effect_counts():
    runner = Runner(decoder(), "aot_eager")
    assert runner.observer_effect == {"differs": False, "max_abs": 0.0}
    runner.note_effect(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.25]))
    runner.note_effect(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.125]))
    assert runner.observer_effect == {"differs": True, "max_abs": 0.25}


def test_a_graph_break_is_one_line():
    class Breaking(Rowwise):
        def forward(self, input_ids):
            torch._dynamo.graph_break()
            return super().forward(input_ids)

    with pytest.raises(DriftError, match="does not compile as one graph .* --mode eager"):
        record(Breaking(), tokens(), mode="aot_eager")


def test_bf16_is_kept_as_it_is():
    model = decoder().bfloat16()
    found = record(model, tokens(), tensors=True)
    [step] = found.cases[0].steps
    bits, dtype = step.logits()
    assert dtype == "BF16"
    with torch.no_grad():
        logits, _ = model(tokens())
    np.testing.assert_array_equal(to_float64(bits, dtype), logits[0].double())


def test_buffers_that_the_model_computes_are_results_not_weights():
    model = llama()
    assert [name for name, _ in derived_buffers(model)][:1] == ["model.rotary_emb.inv_freq"]
    plain = record(model, tokens())
    model.model.rotary_emb.inv_freq[3] *= 1 + 2.0**-20
    found = compare(plain, record(model, tokens()))
    assert found.reason is None  # no other weights: the environment computed it
    assert tuple(found.first_divergence) == ("model.rotary_emb", "buffer.inv_freq")


def test_inputs_of_other_forms_and_models_without_logits():
    x = tokens(batch=2)
    model = llama()
    named = {"input_ids": x, "attention_mask": torch.ones_like(x)}
    assert compare(record(model, x), record(model, x.tolist())).exit_code == 0
    assert record(model, named).cases[1].prompt["tokens"] == x[1].tolist()
    assert record(model, [1, 2]).cases[0].prompt["tokens"] == [1, 2]
    for wrong in ([], {"input_ids": None}, [["a"]]):
        with pytest.raises(DriftError, match="inputs"):
            record(model, wrong)
    for output in ({"hidden": x}, x.float()[None, None], (None,), x.float().sum()):
        model = Rowwise()
        model.forward = lambda input_ids, output=output: output
        with pytest.raises(DriftError, match=r"the model returns no logits \[B, T, V\] but"):
            record(model, x)


SCRIPT = """
import sys; sys.path[:0] = [{here!r}]
import numpy as np, torch
torch.set_num_threads(1)
if {busy}:  # unrelated work: other draws, other memory, another model before
    torch.randn(3000, 30).softmax(-1).sum(); np.random.rand(10)
    [torch.full((1 << k,), float("nan")) for k in range(16)]
from drift_models import decoder, tokens
from xtrain.drift import record
record(decoder(), tokens(batch=2), out={out!r})
"""


def test_two_processes_write_the_same_bytes(tmp_path):
    folders = [tmp_path / "a.drift", tmp_path / "b.drift"]
    for busy, out in enumerate(folders):
        code = SCRIPT.format(here=str(Path(__file__).parent), busy=bool(busy), out=str(out))
        subprocess.run([sys.executable, "-c", code], check=True)
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir()) and "manifest.json" in names
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    assert compare(*folders).exit_code == 0


def test_a_record_is_complete_or_absent(tmp_path):
    class Failing(Rowwise):
        def forward(self, input_ids):
            super().forward(input_ids)
            raise RuntimeError("in the middle")

    out = tmp_path / "x.drift"
    with pytest.raises(RuntimeError, match="in the middle"):
        record(Failing(), tokens(), out=out)
    assert list(tmp_path.iterdir()) == []
    record(Rowwise(), tokens(), out=out)
    with pytest.raises(DriftError, match="exists; choose another name"):
        record(Rowwise(), tokens(), out=out)
    record(Rowwise(), tokens(length=3), out=out, overwrite=True)
    assert len(Record(out).cases[0].prompt["tokens"]) == 3
    (tmp_path / "mine").mkdir()
    with pytest.raises(DriftError, match="it is no record and stays"):
        record(Rowwise(), tokens(), out=tmp_path / "mine", overwrite=True)
    (tmp_path / "mine" / "manifest.json").write_text("{}")  # as a checkpoint's folder has one
    with pytest.raises(DriftError, match="it is no record and stays"):
        record(Rowwise(), tokens(), out=tmp_path / "mine", overwrite=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(DriftError, match="holds 'notes.txt', which is no part of a record"):
        record(Rowwise(), tokens(), out=out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "x.drift"]


def test_a_model_that_is_compiled_already_is_run_as_it_is():
    import xtrain

    model, x = decoder(), tokens()
    plain = record(model, x)
    for compiled in (
        torch.compile(model, backend="eager"),
        xtrain.compile(model, dropout=0.5, seed=0, backend="eager"),
    ):
        found = compare(plain, record(compiled, x))
        assert found.b.run["mode"] == "unobserved" and not found.b.cases[0].steps[0].keys()
        assert found.exit_code == 0 and found.num_matched == 0 and len(found.positions) == 9


def test_integers_of_a_batch_are_no_numbers_of_a_prompt():
    class Counting(Rowwise):
        """Counts its tokens and rows first, as some models do for masks and positions."""

        def forward(self, input_ids):
            count = torch.ones_like(input_ids).sum() + torch.arange(len(input_ids)).sum()
            return super().forward(input_ids) + (count - count).float()

    lists = prompts([1, 2, 3], [4, 5, 6])
    alone = record_prompts(subject(Counting()), lists, Run(num_tokens=2))
    both = record_prompts(subject(Counting()), lists, Run(num_tokens=2, batch_size=2))
    found = compare(alone, both)
    assert found.exit_code == 0 and found.first_divergence is None
    assert ("both", "", "aten.sum") in {item[:3] for item in found.unmatched}


@pytest.mark.parametrize("shape", [(48,), (3, 48)], ids=str)
def test_any_module_on_numbers(shape):
    """Row C52: a linear layer on one vector; its product is the only op there is."""
    draw = np.random.default_rng(0).standard_normal
    linear = nn.Linear(48, 440)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(draw((440, 48))))
        linear.bias.zero_()
    x = torch.from_numpy(draw(shape)).float()
    a, b = record(linear, x), record(linear, x)
    assert compare(a, b).exit_code == 0
    assert len(a.cases) == (3 if len(shape) == 2 else 1)
    np.testing.assert_array_equal(
        a.cases[-1].steps[0].logits()[0][0], linear(x).detach().view(-1, 440)[-1]
    )
    with torch.no_grad():
        linear.bias[7] += 1e-3
    found = compare(a, record(linear, x))
    assert found.first_divergence.op in ("aten.addmm", "aten.addmv", "aten.add")
    assert found.reason == "other weights: bias"
    assert "other inputs" in compare(a, record(linear, x + 1)).reason


def test_recording_costs_less_than_three_forwards():
    """CPU time of a layer and the head of the 124m shape: other processes do not enter it."""
    from time import process_time

    from xtrain.model import Config, Transformer

    model, x = Transformer(Config.preset("124m", n_layers=1)).eval(), torch.arange(128)[None]

    def cost(run):
        start = process_time()
        run()
        return process_time() - start

    with torch.no_grad():
        forward = min(cost(lambda: model(x)) for _ in range(3))
    recorded = min(cost(lambda: record(model, x)) for _ in range(3))
    assert recorded <= 3 * forward, f"{recorded:.3f} s against {forward:.3f} s"


# --- three ways to continue a prompt: whose tokens they are, and how many -------------------------


def test_greedy_is_the_models_own_generate():
    """Without a cache and with it, the tokens of a small model are those of generate()."""
    for model in (llama(), gpt2()):
        lists = prompts([1, 2, 3], [7, 8, 9], [5])
        ids = torch.tensor([[1, 2, 3]])
        expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        own = record_prompts(subject(model, 64), lists, Run(num_tokens=6))
        theirs = record_prompts(
            subject(model, 64), lists, Run(num_tokens=6, decode="generate", batch_size=2)
        )
        for found in (own, theirs):
            assert [step.tokens[0] for step in found.cases[0].steps] == expected[0, 3:].tolist()
        result = compare(own, theirs)
        assert result.exit_code in (0, 1) and result.max_shift < 1e-5
        assert len(result.positions) == 18
        assert [p.position for p in result.positions[:6]] == [2, 3, 4, 5, 6, 7]


def test_sampling_is_drawn_by_its_seed_alone():
    model = Rowwise()
    settings = Run(num_tokens=12, decode="sample", sample_seed=3)
    torch.manual_seed(1)
    first = record_prompts(subject(model), prompts([1], [1]), settings)
    torch.manual_seed(2)
    again = record_prompts(subject(model), prompts([1], [1]), settings)
    texts = [[s.tokens[0] for s in case.steps] for case in (*first.cases, *again.cases)]
    assert texts[:2] == texts[2:] and texts[0] != texts[1]  # a prompt's own draws
    other = Run(num_tokens=12, decode="sample", sample_seed=4)
    assert compare(first, record_prompts(subject(model), prompts([1], [1]), other)).exit_code == 4


@pytest.mark.parametrize("decode", ["greedy", "generate"])
def test_ops_are_recorded_of_as_many_steps_as_were_asked_for(decode):
    settings = Run(num_tokens=4, decode=decode, op_steps=2)
    found = record_prompts(subject(gpt2(), 64), prompts([1, 2, 3]), settings)
    counts = [len(step.keys()) for step in found.steps()]
    assert counts[0] > 20 and counts[1] > 20 and counts[2:] == [0, 0]
    assert [len(step.keys("blocks")) for step in found.steps()] == [2] * 4


def test_sampled_tokens_have_the_frequencies_of_softmax():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

        def forward(self, input_ids):
            return self.table.expand(*input_ids.shape, 3)

    settings = Run(num_tokens=40, decode="sample", temperature=2.0, op_steps=0)
    found = record_prompts(subject(Fixed(), 3), prompts(*[[0]] * 40), settings)
    drawn = np.array([step.tokens[0] for step in found.steps()])
    expected = np.exp([0, 0.5, 1]) / np.exp([0, 0.5, 1]).sum()
    rate = np.bincount(drawn, minlength=3) / drawn.size
    assert (np.abs(rate - expected) <= 5 * np.sqrt(expected * (1 - expected) / drawn.size)).all()


@pytest.mark.parametrize("batch", [1, 2])
def test_generate_goes_on_behind_the_end_of_a_text(tmp_path, batch):
    """Every record of a prompt has as many steps as were asked for, whatever the model says.

    The expected tokens are those of a greedy loop written out; the first prompt meets the end id
    before the last step, in a model whose generation_config and config both name it.
    """
    model = gpt2()
    lists = [[1, 2, 3], [7, 8, 9], [4, 5]]
    expected = [greedy_loop(model, ids, 8) for ids in lists]
    end = expected[0][2]
    model.generation_config.eos_token_id = model.config.eos_token_id = end
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "p.json").write_text(str(lists))
    flags = ["--prompts", tmp_path / "p.json", "--tokens=8", "--decode=generate"]
    outs = [tmp_path / f"{name}.drift" for name in "ab"]
    for out in outs:
        command = ["record", "--out", out, tmp_path / "hf", *flags, f"--batch={batch}"]
        assert main([str(word) for word in command]) == 0
    found = compare(*outs)
    assert found.exit_code == 0
    assert [[step.tokens[0] for step in case.steps] for case in found.a.cases] == expected
    assert main(["compare", *map(str, outs)]) == 0


def greedy_loop(model, ids, count):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]


# --- which modules are the layers: of mixed kinds, of several stacks, run twice or not at all -----


class Other(nn.Module):
    """A layer of another kind than Gate."""

    def __init__(self, dim):
        super().__init__()
        self.inner = Scale(dim)

    def forward(self, x):
        return x - self.inner(x).tanh()


class Two(Gate):
    """A layer of two matrices."""

    def __init__(self, dim):
        super().__init__(dim)
        self.second = Scale(dim)


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """Stacks called one after the other as `order` says."""

    def __init__(self, order=("first", "second"), **stacks):
        super().__init__()
        self.order = order
        self.embedding = nn.Embedding(16, 8)
        for name, stack in stacks.items():
            setattr(self, name, stack)
        self.head = nn.Linear(8, 16, bias=False)
        draw_weights(self, 1)

    def forward(self, input_ids):
        x = self.embedding(input_ids) * 50
        for name in self.order:
            x = getattr(self, name)(x)
        return self.head(x)


def test_layers_of_mixed_kinds():
    model = Model(("stack",), stack=Stack(Gate(8), Other(8), Gate(8)))
    assert list(find_blocks(model)) == [f"stack.layers.{n}" for n in range(3)]
    # stages of a whole are no layers, nor are lists of what has no parts
    model = Model(("stack",), stack=nn.Sequential(Stack(Two(8), Two(8)), Other(8)))
    model.norms = nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8)])
    assert list(find_blocks(model)) == ["stack.0.layers.0", "stack.0.layers.1"]


ORDERS = {
    "f0 f1 s0": ("first", "second"),
    "s0 f0 f1": ("second", "first"),
    "s0": ("second",),
    "f0 f1 s0 f0 f1": ("first", "second", "first"),
}


@pytest.mark.parametrize(
    ("mode", "ran"),
    [
        *(("eager", ran) for ran in ORDERS),
        ("aot_eager", "s0 f0 f1"),  # both compiled modes have block outputs by the same means
        ("aot_eager", "s0"),
        ("inductor", "f0 f1 s0 f0 f1"),
    ],
)
def test_stacks_in_any_order_run_twice_or_not_at_all(mode, ran):
    names = {"f0": "first.layers.0", "f1": "first.layers.1", "s0": "second.layers.0"}

    def model():
        return Model(ORDERS[ran], first=Stack(Gate(8), Gate(8)), second=Stack(Other(8)))

    one, other = model(), model()
    assert list(find_blocks(one)) == list(names.values())
    next_up(other.second.layers[0].inner.weight)
    records = [record(m, tokens(), mode=mode) for m in (one, other)]
    keys = [key.path for key in records[0].cases[0].steps[0].keys("blocks")]
    assert keys == [names[word] for word in ran.split()]
    found = compare(*records)
    moved = {layer.path for layer in found.growth if layer.max_abs > 0}
    behind = ran.split()[ran.split().index("s0") :]
    assert moved == {names[word] for word in behind}
    assert {g.path for g in found.growth if g.num_compared} == {names[w] for w in ran.split()}
