"""use_triton_linear_cross_entropy: the heads and losses of models, logits kept and dropped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import calls
from swapping import assert_left_alone, assert_swapped, c_of, graph_of, run, run_swap

from xtrain.model import cross_entropy as our_loss
from xtrain.passes.swaps.use_triton_linear_cross_entropy import IS_OUTPUT
from xtrain.passes.swaps.use_triton_linear_cross_entropy import (
    use_triton_linear_cross_entropy as swap,
)

B, T, D, V = 2, 5, 6, 11


def tensors(dtype=torch.float32):
    targets = torch.randint(0, V, (B, T))
    targets[0, 1] = -100
    return torch.randn(B, T, D).to(dtype), (torch.randn(V, D) / 2).to(dtype), targets


def ours(x, w, t):
    return our_loss(x @ w.t(), t)


def tied(x, w, t):
    return our_loss(F.linear(x, w), t)


def hugging_face(x, w, t):
    """The labels are shifted by padding, the logits are not."""
    logits = F.linear(x, w).to(c_of(x))
    labels = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100)


def logits_are_shifted(x, w, t):
    logits = F.linear(x, w)[..., :-1, :].contiguous().to(c_of(x))
    return F.cross_entropy(logits.view(-1, V), t[..., 1:].reshape(-1), reduction="sum") / 7


def nano_gpt(x, w, t):
    logits = F.linear(x, w)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), t.view(-1), ignore_index=-1)


def soft_capped(x, w, t):
    logits = F.linear(x, w)
    logits = torch.tanh(logits / 3.0) * 3.0
    return F.cross_entropy(logits.to(c_of(x)).flatten(0, 1), t.flatten(), label_smoothing=0.1)


def by_token(x, w, t):
    return F.cross_entropy(F.linear(x, w).flatten(0, 1), t.flatten(), reduction="none")


def scaled(x, w, t):
    """Cohere multiplies, Granite divides."""
    return F.cross_entropy((0.0625 * F.linear(x, w) / 0.5).flatten(0, 1).to(c_of(x)), t.flatten())


FUNCTIONS = [scaled, ours, tied, hugging_face, logits_are_shifted, nano_gpt, soft_capped, by_token]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_spelling(function, dtype):
    x, w, t = tensors(dtype)
    if function is nano_gpt:
        t = t.clamp(min=-1)
    module = assert_swapped(swap, function, x, w, t)
    assert not calls(module, "linear") and not calls(module, "cross_entropy")
    (call,) = calls(module, "linear_cross_entropy")
    softcap, reduction = call.args[7:9]
    assert softcap == (3.0 if function is soft_capped else None)
    others = {ours: "sum", tied: "sum", logits_are_shifted: "sum", by_token: "none"}
    assert reduction == others.get(function, "mean")


def test_under_autocast_the_head_is_bf16_and_the_loss_fp32():
    for function in (tied, hugging_face):
        module = assert_swapped(swap, function, *tensors(), autocast=True)
        (call,) = calls(module, "linear_cross_entropy")
        assert {n.meta["example_value"].dtype for n in call.args[:2]} == {torch.bfloat16}


def test_a_head_without_gradient_asks_for_none():
    x, w, t = tensors()
    x.requires_grad_()
    module = graph_of(tied, x, w, t)
    assert run_swap(module, swap).num_replaced == 1
    assert calls(module, "linear_cross_entropy")[0].args[9:11] == (True, False)
    run(module, x, w, t)[0].backward()
    assert x.grad is not None and w.grad is None


def test_ignored_targets_alone_give_zero():
    """Row C24."""
    x, w, t = tensors()
    t = torch.full_like(t, -100)
    module = graph_of(tied, x, w, t)
    assert run_swap(module, swap).num_replaced == 1
    x.requires_grad_()
    loss = run(module, x, w, t)[0]
    loss.backward()
    assert loss.item() == 0.0 and not x.grad.any()


def with_logits(x, w, t):
    logits = F.linear(x, w)
    return logits, F.cross_entropy(logits.view(-1, V), t.view(-1))


def test_logits_that_are_an_output_are_kept_or_dropped_as_told():
    args = tensors()
    assert_left_alone(swap, with_logits, *args, reason=IS_OUTPUT)
    module = graph_of(with_logits, *args)
    assert run_swap(module, swap, logits="drop").num_replaced == 1
    logits, loss = run(module, *args)
    assert logits is None and torch.allclose(loss, with_logits(*args)[1])


# --- what must stay -----------------------------------------------------------------------------


def with_bias(x, w, t):
    return F.cross_entropy(F.linear(x, w, w[:, 0]).flatten(0, 1), t.flatten())


def class_weights(x, w, t):
    return F.cross_entropy(F.linear(x, w).flatten(0, 1), t.flatten(), weight=w[:, 0].exp())


def probabilities(x, w, t):
    p = torch.softmax(x @ w.t() * 0.5, -1).detach()
    return F.cross_entropy((x @ w.t()).flatten(0, 1), p.flatten(0, 1))


def read_again(x, w, t):
    logits = F.linear(x, w)
    return F.cross_entropy(logits.flatten(0, 1), t.flatten()) + logits.square().mean()


def scaled_by_three(x, w, t):
    return F.cross_entropy((F.linear(x, w) * 3).flatten(0, 1), t.flatten())


def scaled_behind_the_cap(x, w, t):
    return F.cross_entropy((torch.tanh(F.linear(x, w) / 3) * 3 * 2).flatten(0, 1), t.flatten())


def cap_of_two_numbers(x, w, t):
    return F.cross_entropy((torch.tanh(F.linear(x, w) / 3) * 4).flatten(0, 1), t.flatten())


def not_a_head(x, w, t):
    return F.cross_entropy(torch.relu(F.linear(x, w)).flatten(0, 1), t.flatten())


def classes_are_cut(x, w, t):
    return F.cross_entropy(F.linear(x, w)[..., : V - 1].flatten(0, 1), t.flatten() % (V - 1))


def one_head_a_sample(x, w, t):
    return F.cross_entropy((x @ w.t().expand(B, D, V)).flatten(0, 1), t.flatten())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (with_bias, "its head has a bias"),
        (class_weights, "it weighs classes"),
        (probabilities, "its targets are no class indices"),
        (read_again, "its logits have other readers than the loss"),
        (scaled_by_three, "scaled by a number that is no power of two"),
        (scaled_behind_the_cap, "its logits are scaled behind the soft-cap"),
        (cap_of_two_numbers, "do not come from a linear head alone"),
        (not_a_head, "do not come from a linear head alone"),
        (classes_are_cut, "do not come from a linear head alone"),
        (one_head_a_sample, "its head is no product with one matrix"),
    ],
)
def test_what_is_refused_with_its_reason(function, reason):
    assert_left_alone(swap, function, *tensors(), reason=reason)
