"""The coverage table: a dozen families of it, and that it cannot pass over what goes wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mask_oracle import keep_mask

import xtrain
from bench import coverage
from bench.coverage import check as coverage_check
from xtrain.rng import site_seed

ROOT = Path(__file__).resolve().parent.parent

EXPECTED = coverage.expected_sites()

# --- a dozen families ---------------------------------------------------------------------------

SITES_OF = [
    "bert",  # post-norm
    "bloom",  # adds inside the modules of its branches
    "cohere",  # parallel residual
    "gemma4_text",  # three branches a layer
    "hrm_text",  # layers that run several times, an injected input
    "inkling_text",  # short convolutions on keys and values
    "mamba2",  # a state space, one branch a layer
    "minimax",  # scaled stream, linear attention
    "xlm",  # attentions and feed-forwards in lists of their own
    "xlnet",  # relative positions in the scores
    "zamba2",  # a mixer that reads another branch's sum
    "zaya",  # a stream that is scaled and shifted
]


@pytest.mark.parametrize("name", SITES_OF)
def test_sites_and_masks(name):
    """Every dropout of a forward is that of one site, by NumPy's mask (class E0)."""
    model = coverage_check.build(name)
    compiled = xtrain.compile(model, dropout=0.5, seed=1, backend="eager", kernels="off")
    with coverage_check.recorded_dropout() as calls, torch.no_grad():
        compiled(**coverage_check.inputs(model))
    sites = compiled.report().sites
    assert coverage_check.spelt_sites(sites) == EXPECTED[name]
    assert coverage_check.masks_agree(sites, calls) is True
    assert len(calls) == len(sites)
    for x, out in calls:
        seeds = [site_seed(1, 0, site.layer, site.site) for site in sites]
        masks = [torch.from_numpy(keep_mask(tuple(x.shape), 0.5, seed)) for seed in seeds]
        assert sum(torch.equal(torch.where(mask, x * 2.0, 0.0), out) for mask in masks) == 1


def test_every_check_of_a_class():
    """Class E1 at p = 0 and under checkpointing, E0 for masks; swaps move no loss by 1e-6."""
    records = []
    coverage_check.check_class("qwen3_moe", coverage.CHECKS, records.append)
    record = records[-1]
    assert coverage.verdict(record, EXPECTED["qwen3_moe"]) == (coverage.EXACT, "")
    assert record["plain"] is record["p0"] is record["masks"] is record["checkpoint"] is True
    assert record["swaps"]["use_triton_sdpa"] == 2
    assert record["swapped_loss_difference"] < 1e-6
    verified = record["verified"]
    assert verified["num_losses"] == 1 and verified["num_gradients"] > 20
    assert not verified["failures"] and not verified["left_out"] and verified["largest"] <= 1


# --- nothing is passed over ---------------------------------------------------------------------

RIGHT = dict(plain=True, sites="AF AF", masks=True, p0=True, checkpoint=True, swaps={})


@pytest.mark.parametrize(
    ("change", "word", "said"),
    [
        ({}, "exact", ""),
        (dict(sites="A A"), "WRONG", "sites A A, expected AF AF"),
        (dict(masks="never dropped: layers.0.attention"), "WRONG", "masks: never dropped"),
        (dict(p0=False), "WRONG", "p = 0: differs"),
        (dict(p0="ValueError: no"), "WRONG", "p = 0: ValueError"),
        (dict(checkpoint=False), "WRONG", "checkpointing: differs"),
        (dict(checkpoint="SiteError: no"), "WRONG", "checkpointing: SiteError"),
        (dict(checkpoint="the class has no gradient checkpointing"), "exact", ""),
        (dict(checkpoint="plain torch.compile fails too: x"), "exact", ""),
        (dict(swaps="KeyError: 1"), "WRONG", "swaps: KeyError"),
        (dict(swaps="VerifyError: verify: x is wrong"), "WRONG", "swaps: VerifyError"),
        (dict(failed="KeyError: 1"), "WRONG", "failed: KeyError"),
        (dict(ended="the process ended with -11"), "WRONG", "ended: the process ended with -11"),
        (dict(refused="SiteError: a break"), "refused", "SiteError: a break"),
        (dict(plain="Unsupported: x"), "torch fails", "Unsupported: x"),
        (dict(plain="Unsupported: x", sites="A"), "torch fails", "sites A, expected AF AF"),
        (dict(not_built="ImportError: timm"), "not built", "ImportError: timm"),
    ],
)
def test_verdicts(change, word, said):
    found = coverage.verdict(RIGHT | change, "AF AF")
    assert found[0] == word
    assert said in found[1] and (said or not found[1])


def test_verdicts_of_what_was_measured_in_part():
    quick = dict(sites="AF AF", masks=True)
    assert coverage.verdict(quick, "AF AF")[0] == "sites right"
    assert coverage.verdict(quick, "AF")[0] == "WRONG"
    assert coverage.verdict(RIGHT, None)[0] == "WRONG"
    assert coverage.verdict(None, "AF AF")[0] == "not measured"


def test_the_table_says_what_was_verified(tmp_path):
    found = dict(num_graphs=1, num_losses=1, num_outputs=2, num_gradients=20, largest=0.61)
    right = RIGHT | {"verified": {**found, "left_out": []}}
    part = RIGHT | {"verified": {**found, "left_out": ["gradients: why"]}}
    none = RIGHT | {"verified": dict.fromkeys(found, 0)}
    data = {"environment": coverage.environment(), "classes": dict(bloom=right, gpt2=part, t5=none)}
    coverage.write_table(tmp_path / "t.md", data, dict.fromkeys(data["classes"], "x"))
    table = (tmp_path / "t.md").read_text()
    assert "held 46 losses, outputs and gradients of 2 classes with swaps" in table
    assert "of 1 a part was left out." in table
    ends = [line.split(" | ")[-1] for line in table.splitlines() if line.startswith("| ")]
    assert ends[-3:] == ["23; 0.61 |", "23; 0.61 (in part) |", "- |"]


def test_wrong_masks_are_seen():
    """One that is applied to another site, one that is never applied, one dropped by chance."""
    site = xtrain.compiler.Site("layers.0.attention", 0, "attention")
    x = torch.ones(4, 8)
    right = xtrain.ops.dropout(x, 0.5, site_seed(coverage_check.SEED, 0, 0, "attention"))
    other = xtrain.ops.dropout(x, 0.5, site_seed(coverage_check.SEED, 0, 1, "attention"))
    assert coverage_check.masks_agree([site], [(x, right)]) is True
    assert "no site's mask" in coverage_check.masks_agree([site], [(x, other)])
    assert "no site's mask" in coverage_check.masks_agree([site], [(x, right), (x, right)])
    assert "never dropped: layers.0.attention" in coverage_check.masks_agree([site], [])


def test_every_type_has_expected_sites_and_no_other_has():
    assert set(EXPECTED) == set(coverage.model_types())
    assert all(set(sites) <= set("ACF ") and sites for sites in EXPECTED.values())


def _hangs(name, checks, sender, log):
    sender.send({"plain": True, "running": "sites"})
    time.sleep(60)


def _dies(name, checks, sender, log):
    sender.send({"plain": True, "running": "sites"})
    os.abort()


def test_a_child_that_hangs_or_dies_is_its_result():
    fork = multiprocessing.get_context("fork")  # children need none of what the server loads
    record = coverage.checked_in_a_child(fork, "llama", ("plain",), 2.0, _hangs)
    assert record["plain"] is True and record["running"] == "sites"
    assert record["ended"] == "no result within 2 s" and record["seconds"] < 30
    record = coverage.checked_in_a_child(fork, "llama", ("plain",), 30.0, _dies)
    assert record["ended"].startswith("the process ended with -6")
    assert coverage.verdict(record, "AF AF")[0] == "WRONG"


def test_a_run_takes_up_where_the_last_ended(tmp_path):
    store = coverage.Store(tmp_path / "coverage.json")
    assert not store.holds("llama", coverage.CHECKS)
    store.put("llama", dict(RIGHT, checks=list(coverage.CHECKS)))
    store.put("gpt2", dict(sites="AF AF", masks=True, checks=list(coverage.QUICK)))
    again = coverage.Store(tmp_path / "coverage.json")
    assert again.holds("llama", coverage.CHECKS) and again.holds("llama", coverage.QUICK)
    assert again.holds("gpt2", coverage.QUICK) and not again.holds("gpt2", coverage.CHECKS)
    text = json.loads((tmp_path / "coverage.json").read_text())
    text["environment"]["torch"] = "1.0"
    (tmp_path / "coverage.json").write_text(json.dumps(text))
    assert not coverage.Store(tmp_path / "coverage.json").holds("llama", coverage.CHECKS)


def test_the_command(tmp_path, monkeypatch, capsys):
    """One class from end to end, and a name that does not exist."""
    flags = ["--quick", "--results", str(tmp_path / "r.json"), "--table", str(tmp_path / "t.md")]
    command = [sys.executable, str(ROOT / "bench" / "coverage.py"), *flags]
    run = subprocess.run([*command, "--only", "openai-gpt"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    table = (tmp_path / "t.md").read_text()
    assert "| openai-gpt | sites right | 1 | AF AF | AF AF | yes |" in table
    number = len(coverage.model_types())
    assert f"{number - 1} of {number} are still to be measured" in table
    monkeypatch.setattr(sys, "argv", ["coverage.py", *flags, "--only", "gpt9"])
    assert coverage.main() == 2
    assert "no causal language model to ['gpt9']" in capsys.readouterr().err
