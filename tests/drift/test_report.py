"""Margins, plots, pages and the text that leads to a place: against numbers worked out by hand."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from drift_models import subject
from forge import edited, put
from torch import nn

from xtrain.drift import DriftError, Record, compare, record
from xtrain.drift.comparison.drift_report import as_json, as_text, context, page
from xtrain.drift.comparison.flip import margins
from xtrain.drift.comparison.two_runs import TrainingComparison
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.settings import Run
from xtrain.report import BAD, FIRST, line_plot, scatter_plot


class Same(nn.Module):
    """A layer that hands on what it is given; a block holds a matrix."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        return x


class Counting(nn.Module):
    """The margin is the number of tokens; token 3 wins, so that every text is a loop."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.shift = shift
        self.layers = nn.ModuleList([Same(), Same()])

    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, 8)
        logits[..., 3] = torch.arange(1.0, input_ids.shape[1] + 1)
        x = logits + self.shift * torch.arange(8)
        for layer in self.layers:
            x = layer(x)
        return x


def decoded(model, num_tokens, *lengths, decode="greedy"):
    prompts = [{"tokens": [1] * n, "text": "x" * n} for n in lengths]
    found = subject(model, 8)
    found.decode = lambda ids: "y" * len(ids)
    return record_prompts(found, prompts, Run(num_tokens=num_tokens, decode=decode))


def test_margins_by_step_and_at_both_ends():
    found = margins(decoded(Counting(), 25, 1, 2, 6))
    table = np.array([[n + step for step in range(25)] for n in (1, 2, 6)])
    assert found.by_step == tuple(np.median(table, axis=0))
    assert (found.ends, found.first, found.last) == (
        10,
        np.median(table[:, :10]),
        np.median(table[:, -10:]),
    )
    assert [(loop.prompt, loop.start, loop.period) for loop in found.loops] == [
        (n, 0, 1) for n in range(3)
    ]


def test_the_report_and_the_page_say_it():
    a, b = decoded(Counting(), 12, 1, 4), decoded(Counting(2.0**-6), 12, 1, 4)
    comparison = compare(a, b)
    assert comparison.exit_code == 1
    assert comparison.max_shift == 4 * 2.0**-6  # tokens 3 and 7 are four steps apart
    smallest = comparison.smallest_margin
    assert (smallest.prompt, smallest.step, smallest.margin) == (0, 0, 1.0)
    text = as_text(comparison)
    assert "median margin, first 10 steps" in text and "2 of 2 prompts" in text
    assert "smallest margin: 1 (shift 0.0625) at prompt 0, step 0" in text and "after 'x'" in text
    html = page(comparison)
    for title in ("Growth by layer", "Margins against shifts", "Margins by step", "Environment"):
        assert f"<h2>{title}</h2>" in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        ElementTree.fromstring(svg)  # well-formed
        assert "nan" not in svg
    assert html.count("<title>prompt ") == 24 and html.count("<title>A step ") == 12
    # else a browser gives long values beside them the width, and breaks names letter by letter
    assert "td:first-child code { white-space: nowrap; }" in html
    assert f'<div class="value">{a.environment["python.version"]}</div>' in html


def marks_of(plot):
    """Return (x, y, tip) of each mark, x to the right and y upwards, from the svg alone."""
    uses = ElementTree.fromstring(plot).iter("{http://www.w3.org/2000/svg}use")
    found = [(float(u.get("x")), -float(u.get("y")), u[0].text) for u in uses if len(u)]
    assert all(math.isfinite(value) for x, y, _ in found for value in (x, y))
    return found


def test_every_value_has_its_mark_also_where_a_logarithm_has_none():
    values = [1e-5, 0.0, 10**-2.5, math.inf, math.nan, 1.0]
    marks = marks_of(line_plot("t", {"a": values}, x_label="step", y_label="y"))
    assert [tip for *_, tip in marks] == [f"a step {i}: {v:.3g}" for i, v in enumerate(values)]
    low, zero, middle, inf, nan, high = (y for _, y, _ in marks)
    assert low == zero and high == inf == nan and middle == pytest.approx((low + high) / 2)
    steps = [b[0] - a[0] for a, b in zip(marks, marks[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * 5) and steps[0] > 0
    points = {FIRST: [(1e-3, 0.1, "one"), (0.0, 0.1, "two")], BAD: [(0.1, 1e-3, "three")]}
    text = scatter_plot("t", points, x_label="x", y_label="y", zero="at the edge")
    one, two, three = marks_of(text)
    assert [tip for *_, tip in (one, two, three)] == ["one", "two (at the edge)", "three"]
    assert two[0] == one[0] < three[0] and one[1] == two[1] > three[1]
    assert text.count("var(--bad)") > 1 and BAD not in text  # dark or light, as the page is
    for values in ([], [0.0], [math.nan]):
        marks_of(line_plot("t", {"a": values}, x_label="x", y_label="y"))


def test_text_in_plots_and_pages_is_escaped():
    points = {FIRST: [(1e-3, 0.1, 'a "<b>"')]}
    text = scatter_plot("<&>", points, x_label="<", y_label="&", zero="0")
    ElementTree.fromstring(text)
    assert "<b>" not in text
    ElementTree.fromstring(line_plot("t", {"a<": [1.0]}, x_label="x", y_label="y"))
    html = page(TrainingComparison("<b>", [], None, [], 0))
    assert "<b>" not in html and "not comparable: &lt;b&gt;" in html


class Choosing(Counting):
    """Its own generate() follows the logits but for prompts of one length."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def generate(self, ids, **_):
        likeliest = self(ids)[:, -1:].argmax(dim=-1)
        chosen = torch.full_like(likeliest, 5) if ids.shape[1] == self.length else likeliest
        return torch.cat([ids, chosen], dim=1)


def test_of_many_prompts_those_that_differ_are_shown():
    lengths = range(1, 31)
    a, b = (decoded(Choosing(n), 1, *lengths, decode="generate") for n in (0, 30))
    text = as_text(compare(a, b))
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("29 ")]
    assert rows and rows[0][:5] == ["29", "1", "same", "same", "differ"]
    assert "(18 more rows)" in text and text.endswith("verdict 3: the tokens differ\n")


def test_a_narrow_window_moves_plots_and_tables_sideways():
    """Shrunk to a telephone's width the labels were 7 pixels high, a text one letter wide."""
    records = [decoded(Counting(shift), 4, 1, 2) for shift in (0.0, 0.25)]
    text = page(compare(*records))
    assert text.count("<svg") == 3
    assert text.count("<svg") == len(re.findall(r'<div class="scroll"><svg', text))
    assert text.count("<table") == len(re.findall(r'<div class="scroll"><table', text))
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    rules = dict(re.findall(r"([^{}]+?)\s*\{([^{}]*)\}", style))
    rules = {selector.strip().split("\n")[-1]: body for selector, body in rules.items()}
    assert "overflow-x: auto" in rules[".scroll"]
    assert "min-width: 32rem" in rules["svg"] and "min-width: 16rem" in rules["td + td > code"]
    assert "stroke-dasharray" in text  # equal lines would hide each other


def test_ops_that_nobody_compared_are_not_called_the_same():
    """Of a model that is compiled already logits alone are known."""
    model, x = Counting(), torch.ones(1, 3, dtype=torch.long)
    found = compare(record(model, x), record(model, x, mode="unobserved"))
    assert found.prompts[0].num_matched == 0 and found.exit_code == 0
    assert re.search(r"^0 +1 +- +same +same +-$", as_text(found), re.MULTILINE)
    assert "<td>-</td><td>same</td><td>same</td>" in page(found)
    both = compare(record(model, x), record(model, x))
    assert both.prompts[0].num_matched == both.num_matched > 0
    assert both.prompts[0].words == ("same", "same", "same")


# --- the text that leads to a place, whatever the length of its tokens ---------------------------


WORDS = ["a ", "longer ", "I ", "considerably ", "of ", "\u20ac", "x ", "extraordinarily "]
CHOSEN = [1, 7, 0, 0, 2, 3, 0, 6, 7, 0]


class Scripted(nn.Module):
    """Chooses CHOSEN one after the other; the margin is smallest at step `tight`."""

    def __init__(self, tight, shift=0.0):
        super().__init__()
        self.tight, self.shift = tight, shift

    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, 8)
        step = input_ids.shape[1] - 2
        logits[:, -1, CHOSEN[step]] = 0.5 if step == self.tight else 2.0
        return logits + self.shift * torch.arange(8)


def recorded(tight, decode, shift=0.0, **settings):
    model = subject(Scripted(tight, shift), 8)
    model.decode = decode
    prompt = [{"tokens": [4, 4], "text": "of of "}]
    return record_prompts(model, prompt, Run(num_tokens=len(CHOSEN), **settings))


def words(ids):
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize("tight", [0, 1, 2, 6, 9])
def test_words_of_any_length(tight):
    a, b = recorded(tight, words), recorded(tight, words, 2.0**-10)
    found = compare(a, b)
    assert found.smallest_margin.step == tight
    expected = "of of " + words(CHOSEN[:tight])
    assert context(a, found.smallest_margin) == repr(expected[-60:])
    assert as_json(found)["smallest_margin"]["context"] == repr(expected[-60:])
    assert f"after {expected[-60:]!r}" in as_text(found) and "after" in page(found)


def test_a_character_of_several_tokens():
    """The bytes of one character: what is there before its last is no text yet."""
    pieces = [b"\xe2", b"\x82", b"\xac", b"z", b"longer ", b"", b"", b""]

    def decode(ids):
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    class Bytes(Scripted):
        def forward(self, input_ids):
            logits = torch.zeros(*input_ids.shape, 8)
            step = input_ids.shape[1] - 2
            logits[:, -1, [4, 0, 1, 2, 3][step]] = 0.5 if step == self.tight else 2.0
            return logits

    for tight, text in ((1, "longer "), (2, "longer "), (3, "longer "), (4, "longer \u20ac")):
        model = subject(Bytes(tight), 8)
        model.decode = decode
        prompt = [{"tokens": [4, 4], "text": ""}]
        found = record_prompts(model, prompt, Run(num_tokens=5))
        assert found.cases[0].text == "longer \u20acz"
        assert context(found, compare(found, found).smallest_margin) == repr(text)


def test_records_from_before_have_the_share_of_the_text(tmp_path):
    """Their steps do not say where the text of a token ends; forged numbers are refused."""
    found = subject(Scripted(6), 8)
    found.decode = lambda ids: "y" * len(ids)
    prompt = [{"tokens": [4, 4], "text": "of of "}]
    record_prompts(found, prompt, Run(num_tokens=10), out=tmp_path / "r")

    def without(values):
        assert [step.pop("text_end") for step in values["steps"]] == list(range(10))

    old = Record(edited(tmp_path / "r", tmp_path / "old", "case_0000.json", without))
    assert context(old, compare(old, old).smallest_margin) == repr("of of " + "y" * 6)
    for number in (-1, "x", 1.5, 11):
        edit = put(number, "steps", 3, "text_end")
        forged = edited(tmp_path / "r", tmp_path / "forged", "case_0000.json", edit)
        with pytest.raises(DriftError, match="text_end"):
            compare(forged, forged)
