"""`bench/compare.py --drift`: where do the compiled variants' numbers leave those of eager?

One forward of one sequence, no dropout: the eager model op by op against torch.compile (block
outputs) and against xtrain.compile (logits). xtrain.drift does the work.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.models import autocast, build_config
from bench.variants import Setting
from xtrain import compile as xtrain_compile
from xtrain import drift
from xtrain.drift.comparison.report import as_text
from xtrain.drift.recording.subject import draw_tokens, draw_weights
from xtrain.model import Transformer

MAX_TOKENS = 256  # of the sequence: the logits of every position are kept


def compare_with_eager(setting: Setting) -> dict[str, drift.Comparison]:
    """Return variant -> its comparison with the eager model, which is a."""
    setting = replace(setting, batch=1, seq=min(setting.seq, MAX_TOKENS))
    if setting.threads is not None:
        torch.set_num_threads(setting.threads)
    model = Transformer(build_config(setting))
    draw_weights(model, setting.seed)
    model.to(setting.device).eval()
    drawn = draw_tokens(setting.batch, setting.seq, setting.vocab, setting.seed)
    tokens = torch.from_numpy(drawn).to(setting.device)
    with autocast(setting):
        eager = drift.record(model, tokens)
        fused = drift.record(model, tokens, mode="inductor")
        compiled = xtrain_compile(model, dropout=setting.dropout, seed=setting.seed).eval()
        ours = drift.record(compiled, tokens)
    return {
        "torch.compile": drift.compare(eager, fused),
        "xtrain.compile": drift.compare(eager, ours),
    }


def report(setting: Setting) -> str:
    """Return the comparisons as text."""
    parts = []
    for name, comparison in compare_with_eager(setting).items():
        parts.append(f"=== eager (A) and {name} (B) ===\n\n{as_text(comparison)}")
    return "\n".join(parts)
