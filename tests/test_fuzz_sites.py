"""Models of a grammar of residual sums: dropout as the oracle has it, or a refusal; never silence.

python tests/test_fuzz_sites.py 2000 [SEED]     as many models, and what became of them
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import torch
from branch_oracle import refusal_or_dropout
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from residual_grammar import (
    AROUND,
    BEGINNINGS,
    BRANCHES,
    SKIPS,
    SUMS,
    B,
    D,
    Form,
    Step,
    T,
    model_class,
)

import xtrain

# Forms that must run and are refused, each with the reason: none.
FALSE_REFUSALS_ALLOWED: dict[Form, str] = {}
_PARTS = {"skip": SKIPS, "branch": BRANCHES, "sum": SUMS, "around": AROUND}


@st.composite
def forms(draw) -> Form:
    """Two parts of a step at most are out of the ordinary; half of the models must run."""
    must_run = draw(st.booleans())

    def one_of(table):
        return draw(st.sampled_from([k for k, (_, runs) in table.items() if runs or not must_run]))

    def step() -> Step:
        unusual = draw(st.sets(st.sampled_from(sorted(_PARTS)), max_size=2))
        return Step(**{part: one_of(_PARTS[part]) for part in sorted(unusual)})

    first = draw(st.sampled_from([(Step(branch="attention"),), (), "any"]))
    first = (step(),) if first == "any" else first
    return Form(
        (*first, step()),
        beginning=one_of(BEGINNINGS),
        **dict.fromkeys(draw(st.sets(st.sampled_from(LAYOUTS), max_size=1)), True),
    )


LAYOUTS = ["handed_on", "in_last_only", "returns_sums", "joins_first"]


def inputs():
    generator = torch.Generator().manual_seed(3)
    condition, memory = (torch.randn(B, n, D, generator=generator) for n in (T, T + 1))
    return torch.arange(B * T).view(B, T) % 8, condition, memory


def runs_by_blocks(form: Form) -> bool:
    """Whether each block's graph shows its sites.

    Not those of branches that the next block adds; and where the first block does nothing, Dynamo
    takes its frame for one without ops, and never looks at it again.
    """
    does_nothing = form.in_last_only and len(form.steps) == 1 and form.beginning == "nothing"
    return not form.handed_on and not does_nothing


def outcome(form: Form, compile_it) -> str:
    """Return "dropout" or "refused"; raise AssertionError for anything else."""
    torch._dynamo.reset()
    cls = model_class(form)

    def make():
        torch.manual_seed(0)
        return cls()

    error = refusal_or_dropout(make, inputs(), compile_it)
    if error is None:
        return "dropout"
    must_run = form.must_run and (compile_it is xtrain.compile or runs_by_blocks(form))
    assert not must_run or form in FALSE_REFUSALS_ALLOWED, f"refused: {error}"
    return "refused"


LIMITS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=80, derandomize=True, **LIMITS)
@given(forms(), st.sampled_from([xtrain.compile, xtrain.compile_blocks]))
def test_every_branch_is_dropped_or_refused(form, compile_it):
    note(f"xtrain.{compile_it.__name__}\n{form.source()}")
    outcome(form, compile_it)


def main(count: int, start: int) -> int:
    """Run `count` models, print what is wrong with each that fails, and how many came out how."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes: Counter[str] = Counter()

    @seed(start)
    @settings(max_examples=count, phases=[Phase.generate], **LIMITS)
    @given(forms(), st.sampled_from([xtrain.compile, xtrain.compile_blocks]))
    def run(form, compile_it):
        try:
            result = outcome(form, compile_it)
        except Exception as error:
            result = "refused though it must run" if "refused:" in str(error) else "wrong"
            said = " ".join(str(error).split())[:300]
            print(f"{compile_it.__name__}: {form}\n    {type(error).__name__}: {said}", flush=True)
        outcomes[result] += 1

    run()
    print(", ".join(f"{n} {name}" for name, n in outcomes.most_common()))
    return bool(outcomes["wrong"] + outcomes["refused though it must run"])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
