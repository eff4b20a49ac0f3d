"""xtrain.explain: what it says of models whose answer is known, its output, its page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import explained_models
import pytest
from transformers import AutoConfig, DeepseekV3Config, GPT2Config, LlamaConfig

from xtrain import passes, subject
from xtrain.config import ConfigError, RunConfig
from xtrain.data.tokenizer import ByteTokenizer
from xtrain.explain.__main__ import main
from xtrain.explain.capture import explain
from xtrain.explain.output import as_json, as_text, page
from xtrain.model import PRESETS, Config
from xtrain.subject import shrink_hugging_face, shrunk_preset

LLAMA = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    architectures=["LlamaForCausalLM"],
)
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(**LLAMA).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(llama_folder):
    """One run; the tests below look at it from all sides."""
    return explain(subject.load(str(llama_folder)), dropout=0.1)


# --- what is found, against what the architecture says ------------------------------------------


def test_every_site_is_tied_to_the_projection_that_it_drops(llama):
    """The op that draws a site's mask reads that branch's last projection, by its module path."""
    data = as_json(llama)
    compiled = {node["key"]: node for node in data["graphs"][0]["compiled"]}
    traced = {node["key"]: node for node in data["graphs"][0]["traced"]}
    last = {"attention": "self_attn.o_proj", "feed_forward": "mlp.down_proj"}
    expected = [
        (f"model.layers.{layer}.{kind}", layer, kind)
        for layer in range(NUM_LAYERS)
        for kind in ("attention", "feed_forward")
    ]
    assert [(s["name"], s["layer"], s["site"]) for s in data["sites"]] == expected
    for site in data["sites"]:
        block = f"model.layers.{site['layer']}"
        mask = compiled[site["mask"]]
        branch = compiled[mask["inputs"][0]]
        assert (branch["target"], branch["module"]) == ("linear", f"{block}.{last[site['site']]}")
        assert traced[site["add"]]["target"] == "add" and traced[site["add"]]["module"] == block
        assert site["value"] == "f32[2, 16, 32]" and site["dropout"] == "xtrain"
        assert mask["target"].startswith("xtrain.dropout")


def test_swaps_and_refusals_are_those_of_the_architecture(llama):
    data = as_json(llama)
    targets = [node["target"] for node in data["graphs"][0]["compiled"]]
    norms = targets.count("xtrain.rms_norm") + targets.count("xtrain.dropout_add_rms_norm")
    assert norms == 2 * NUM_LAYERS + 1
    for op in ("xtrain.rope_qk", "xtrain.sdpa", "xtrain.swiglu"):
        assert targets.count(op) == NUM_LAYERS, op
    assert [(row["pass"], row["count"]) for row in data["left_alone"]] == [
        ("use_triton_linear_cross_entropy", 1)
    ]
    assert "logits" in data["left_alone"][0]["reason"]
    assert [row["name"] for row in data["passes"]] == list(passes.PASSES[:-1])  # not inductor's
    assert data["strict"] == {"accepts": True, "reason": ""}
    assert data["unseeded"] == data["uncovered"] == data["graph_breaks"] == []


def test_each_op_is_kept_taken_out_or_put_in_and_swaps_name_what_they_replaced(llama):
    graph = as_json(llama)["graphs"][0]
    traced = {node["key"]: node for node in graph["traced"]}
    compiled = {node["key"]: node for node in graph["compiled"]}
    assert traced.keys() - compiled.keys() == graph["removed"].keys()
    assert compiled.keys() - traced.keys() == graph["added"].keys()
    for nodes in (traced, compiled):  # running order: an op reads what stands above it
        seen = set()
        for key, node in nodes.items():
            assert set(node["inputs"]) <= seen
            seen.add(key)
    replaced = [key for entry in graph["added"].values() for key in entry["replaces"]]
    assert len(replaced) == len(set(replaced)) and set(replaced) <= graph["removed"].keys()
    heart = {
        "xtrain.rms_norm": "rsqrt",
        "xtrain.dropout_add_rms_norm": "rsqrt",
        "xtrain.swiglu": "silu",
        "xtrain.sdpa": "scaled_dot_product_attention",
        "xtrain.rope_qk": "neg",
    }
    for key, entry in graph["added"].items():
        if (target := compiled[key]["target"]) in heart:
            gone = [traced[k] for k in entry["replaces"]]
            count = 2 if target == "xtrain.rope_qk" else 1
            assert [n["target"] for n in gone].count(heart[target]) == count, key
            assert len({n["block"] for n in gone if n["target"] == heart[target]}) == 1
            block = compiled[key]["block"]
            assert {n["block"] for n in gone if n["target"] == heart[target]} == {block}


def test_parameters_are_named_by_their_paths(llama_folder, llama):
    graph = as_json(llama)["graphs"][0]
    names = {name for name, _ in llama.subject.model.named_parameters()}
    read = {
        name for node in graph["traced"] for name in re.findall(r"[\w.]+\.weight\b", node["text"])
    }
    assert read == names
    assert graph["num_parameters"] == len(names) + 1  # and the buffer inv_freq


# --- other models -------------------------------------------------------------------------------


def test_a_models_own_dropout_is_shown_and_what_stays_unseeded_is_listed(tmp_path):
    GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32).save_pretrained(
        tmp_path
    )
    loaded = subject.load(str(tmp_path), layers=1)
    data = as_json(explain(loaded, dropout=0.1))
    traced = {node["key"]: node for node in data["graphs"][0]["traced"]}
    assert data["model"]["class"] == "GPT2LMHeadModel"
    assert [(s["dropout"], s["mask"]) for s in data["sites"]] == [("model", "")] * 2
    assert [traced[s["own"]]["target"] for s in data["sites"]] == ["dropout"] * 2
    assert data["unseeded"] == [
        "dropout in transformer.drop",
        "attention probabilities (p = 0.1) in transformer.h.0.attn",
    ]
    text = as_text(explain(loaded, dropout=0.1, existing="replace", kernels="off"))
    assert "transformer.h.0.attention           0  xtrain" in text
    assert "xtrain.dropout" in text and "xtrain.sdpa" not in text


def test_checkpointed_blocks_are_shown_inside_their_calls():
    data = as_json(explain(subject.load("tiny", changes={"recompute": "full"}), dropout=0.1))
    compiled = {node["key"]: node for node in data["graphs"][0]["compiled"]}
    names = [f"blocks.{i}.{kind}" for i in range(2) for kind in ("attention", "feed_forward")]
    assert [site["name"] for site in data["sites"]] == names
    for site in data["sites"]:
        call, _, _ = site["mask"].partition("/")
        assert compiled[call]["target"] == "tag_activation_checkpoint"
        assert compiled[site["mask"]]["depth"] == 1
        assert compiled[site["mask"]]["row"] == names.index(site["name"])


def test_an_add_that_hides_in_another_op_is_shown_there():
    explanation = explain(subject.load("explained_models:fused"), dropout=0.1)
    data = as_json(explanation)
    assert [site["name"] for site in data["sites"]] == ["0.feed_forward", "1.feed_forward"]
    assert [site["add"] for site in data["sites"]] == ["addmm", "addmm_1"]
    compiled = {node["key"]: node for node in data["graphs"][0]["compiled"]}
    assert [compiled[site["mask"]]["row"] for site in data["sites"]] == [0, 1]
    parsed = _Page()
    parsed.feed(page(explanation))
    assert {link[1:] for link in parsed.links} <= set(parsed.ids)


def test_a_graph_break_is_placed_and_what_strict_mode_raises_is_said(capsys):
    assert main(["explained_models:broken", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    lines = Path(explained_models.__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, start=1) if text.endswith("# the break"))
    places = {entry["place"] for entry in data["graph_breaks"]}
    assert any(place.endswith(f"explained_models.py:{line}") for place in places), places
    assert len(data["graphs"]) > 1
    assert not data["strict"]["accepts"] and "graph break" in data["strict"]["reason"]
    assert data["uncovered"]


def test_a_function_may_return_a_model_alone_and_passes_of_the_users_run(capsys):
    arguments = ["explained_models:guess", "--seq", "6", "--batch", "3"]
    assert main([*arguments, "--pass", "explained_models:keep"]) == 0
    output = capsys.readouterr().out
    assert "input i64[3, 6]" in output
    assert re.search(r"^keep +0 +0 +", output, re.M)
    assert output.count("f32[3, 6, 8]") and "no graph break" in output


# --- the output ---------------------------------------------------------------------------------


def test_the_text_is_short_by_default_and_whole_on_demand(llama):
    short, whole = as_text(llama), as_text(llama, whole_graph=True)
    graph = as_json(llama)["graphs"][0]
    gone = [node for node in graph["traced"] if node["key"] in graph["removed"]]
    for node in (*gone, *graph["compiled"]):
        assert node["text"] in whole
    assert "model.layers.0 in the graph" in short and "model.layers.1.self_attn" not in short
    assert len(short.splitlines()) < 110
    signs = [line[0] for line in whole.splitlines() if re.match(r"[-+~]   ", line)]
    assert signs.count("-") == len(graph["removed"]) and signs.count("+") == len(graph["added"])
    for site in ("attention", "feed_forward"):
        assert re.search(rf"^[-+] .*# .*site \.{site}\b", short, re.M)


class _Page(HTMLParser):
    """Collects what a page refers to, and checks that its tags close in order."""

    VOID = {"meta", "input", "br"}

    def __init__(self):
        super().__init__()
        self.ids, self.links, self.open, self.loads, self.ops = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if "href" in attrs else []
        self.loads += [attrs[name] for name in ("src", "data", "action") if name in attrs]
        self.loads += ["link"] if tag == "link" else []
        self.ops += [attrs] if "data-side" in attrs else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_its_links_lead_somewhere(llama):
    text = page(llama)
    parsed = _Page()
    parsed.feed(text)
    assert parsed.open == [] and parsed.loads == []
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttp", text)
    assert len(parsed.ids) == len(set(parsed.ids))
    ids = set(parsed.ids)
    assert parsed.links and all(link[0] == "#" and link[1:] in ids for link in parsed.links)
    graph = as_json(llama)["graphs"][0]
    assert len(parsed.ops) == len(graph["traced"]) + len(graph["compiled"])
    for op in parsed.ops:
        for name in ("data-inputs", "data-kin"):
            assert set(op.get(name, "").split()) <= ids
    kin = [op for op in parsed.ops if "data-kin" in op and op["data-side"] == "b"]
    assert len(kin) == sum(bool(entry["replaces"]) for entry in graph["added"].values())
    assert sum("site" in op["class"].split() for op in parsed.ops) == 2 * 2 * NUM_LAYERS


def test_names_from_outside_are_escaped_in_the_page(llama, monkeypatch):
    monkeypatch.setattr(llama.subject, "title", "<script>alert(1)</script>")
    assert "<script>alert" not in page(llama)


def test_the_command_writes_its_files_and_dumps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["explained_models:whole", "--html", "a.html", "--json", "a.json", "--graph"]
    assert main([*arguments, "--dump-graphs", "dumps", "--disable-pass", "normalise"]) == 0
    data = json.loads(Path("a.json").read_text())
    assert [site["name"] for site in data["sites"]] == ["0.feed_forward", "1.feed_forward"]
    assert "normalise" not in [row["name"] for row in data["passes"]]
    assert Path("a.html").read_text().startswith("<!DOCTYPE html>")
    assert list(Path("dumps").glob("train_graph_01/*insert_residual_dropout.after.py"))
    assert "0.feed_forward" in capsys.readouterr().out


# --- smaller models -----------------------------------------------------------------------------


def test_shrunk_configurations_keep_ratios_and_lists_of_layers(tmp_path):
    LlamaConfig(**LLAMA | dict(hidden_size=128, num_attention_heads=8, num_key_value_heads=2,
                intermediate_size=512, num_hidden_layers=5)).save_pretrained(tmp_path)  # fmt: skip
    config = AutoConfig.from_pretrained(tmp_path)
    config.layer_types = ["a", "a", "a", "b", "a"]
    config.window_of_layer = [1, 2, 3, 4, 5]
    shrink_hugging_face(config, layers=3, hidden=64)
    assert (config.num_hidden_layers, config.layer_types) == (3, ["a", "a", "b"])
    assert config.window_of_layer == [1, 2, 4]
    assert (config.hidden_size, config.intermediate_size) == (64, 256)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 16)
    split = DeepseekV3Config()
    shrink_hugging_face(split, layers=1, hidden=64)
    assert (split.qk_rope_head_dim, split.qk_nope_head_dim, split.qk_head_dim) == (16, 16, 32)
    values = shrunk_preset(PRESETS["8b"], layers=2, hidden=128)
    built = Config(**values)
    assert (built.n_layers, built.dim, built.ffn_hidden) == (2, 128, 448)
    assert (built.n_heads, built.n_kv_heads, built.head_dim) == (8, 2, 16)


def test_a_large_model_is_built_with_two_layers_unless_told_otherwise(llama_folder, monkeypatch):
    def load(*arguments, **size):
        return subject.load(*arguments, **size, max_parameters=1000)

    deep = {"num_hidden_layers": 3}
    loaded = load(str(llama_folder), changes=deep)
    assert len(loaded.model.model.layers) == 2 and "2 of 3 layers" in loaded.facts[0]
    assert len(load(str(llama_folder), layers=3).model.model.layers) == 3
    assert len(subject.load(str(llama_folder), changes=deep).model.model.layers) == 3
    monkeypatch.setattr(subject, "REFUSED_PARAMETERS", 2000)
    with pytest.raises(ConfigError, match="--hidden 64 builds it narrower"):
        load(str(llama_folder))
    assert len(load("small", layers=3).model.blocks) == 3
    small = load("small")
    assert len(small.model.blocks) == 2 and "2 of 4 layers" in small.facts[0]


def test_what_a_name_brings_along_besides_its_model(llama_folder, tmp_path):
    """Its tokenizer and longest sequence; a run keeps the tokenizer that it was trained with."""
    small = subject.load("small", layers=1)
    assert (small.kind, small.tokenizer.name, small.max_length) == ("preset", "byte", 256)
    folder = subject.load(str(llama_folder))
    assert (folder.kind, folder.tokenizer, folder.max_length) == ("folder", None, 2048)
    config = RunConfig().override({"model.preset": "tiny", "run.kernels": "off"})
    (tmp_path / "config.toml").write_text(config.to_toml())
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    run = subject.load(str(tmp_path))
    assert (run.kind, run.tokenizer.vocab_size, run.options["kernels"]) == ("run", 256, "off")
    assert subject.load("explained_models:whole").tokenizer is None
