"""What no swap may change: the state that ops run in, what memory holds when, who looks on.

Writes in place: a swap where they are over before a value is read, else a refusal. Grad mode and
contexts: a swap where no gradient depends on a change of them, else a refusal.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness import calls
from swapping import assert_left_alone, assert_swapped, graph_of, run, run_swap
from tolerances import assert_close
from torch.utils.checkpoint import checkpoint

from xtrain import ops
from xtrain.compiler.backend import _SWAPS
from xtrain.passes.graph import walk_graphs
from xtrain.passes.swaps.account import CONTEXT, GRAD_MODE
from xtrain.passes.swaps.normalise import remove_noop_views
from xtrain.passes.swaps.use_triton_rms_norm import use_triton_rms_norm
from xtrain.passes.swaps.use_triton_rope import use_triton_rope
from xtrain.passes.swaps.use_triton_sdpa import use_triton_sdpa

B, N, M, T, H = 2, 4, 2, 6, 8
attend = F.scaled_dot_product_attention


def heads(dtype=torch.float32, kv=N):
    return tuple(torch.randn(B, n, T, H).to(dtype) for n in (N, kv, kv))


# --- what attention reads -----------------------------------------------------------------------


def buffer(q, k, v):
    """Latent attention: keys of two parts are copied into a fresh tensor."""
    keys = k.new_empty(B, N, T, H)
    keys[..., :6].copy_(k[..., :6])
    keys[..., 6:].copy_(k[..., :1, :, 6:].expand(-1, N, -1, -1))
    return attend(q, keys, v, is_causal=True)


def buffer_by_index(q, k, v):
    keys = torch.zeros_like(k)
    keys[..., :6] = k[..., :6]
    keys[..., 6:] = 2 * k[..., 6:]
    return attend(q, keys, v, is_causal=True)


def clipped(q, k, v):
    q, k, v = 3 * q, 3 * k, 3 * v
    q.clamp_(min=-1, max=1)
    k.clamp_(min=-1, max=1)
    v.clamp_(min=-1, max=1)
    return attend(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [buffer, buffer_by_index, clipped])
def test_attention_reads_what_was_written_before(attention, dtype):
    (call,) = calls(assert_swapped(use_triton_sdpa, attention, *heads(dtype)), "sdpa")
    assert call.args[4] is True


@pytest.mark.parametrize("writes_before", [True, False])
def test_heads_that_are_written_behind_their_repeat_are_read_repeated(writes_before):
    def attention(q, k, v):
        k = 2 * k
        if writes_before:
            k.mul_(3)
        wide = k[:, :, None].expand(B, M, 2, T, H).reshape(B, N, T, H)
        if not writes_before:
            k.mul_(3)
        return attend(q, wide, v.repeat_interleave(2, 1)), k

    (call,) = calls(assert_swapped(use_triton_sdpa, attention, *heads(kv=M)), "sdpa")
    assert call.args[1].meta["example_value"].shape[1] == (M if writes_before else N)


# --- masks ------------------------------------------------------------------------------------


def by_triu(q, k, v):
    return attend(q, k, v, torch.full((T, T), -math.inf).triu_(1).to(q.dtype))


def by_or(q, k, v):
    i = torch.arange(T)
    mask = torch.zeros(T, T, dtype=torch.bool)
    mask |= i[None, :] <= i[:, None]
    return attend(q, k, v, mask)


def by_fill(q, k, v):
    i = torch.arange(T)
    mask = torch.full((T, T), -math.inf)
    mask.masked_fill_(i[None, :] <= i[:, None], 0.0)
    return attend(q, k, v, mask[None, None].to(q.dtype))


def outside_a_body(q, k, v):
    def block(q, k, v, mask):
        return attend(q, k, v, mask[None])

    mask = torch.ones(T, T, dtype=torch.bool)
    mask.tril_()
    return checkpoint(block, q, k, v, mask[None], use_reentrant=False)


@pytest.mark.parametrize("attention", [by_triu, by_or, by_fill, outside_a_body])
def test_a_mask_that_is_made_in_place_is_proved(attention):
    (call,) = calls(assert_swapped(use_triton_sdpa, attention, *heads()), "sdpa")
    assert call.args[4] is True


def hole(q, k, v):
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[3, 1] = False
    return attend(q, k, v, mask[None, None])


def written_behind_a_body(q, k, v):
    def block(q, k, v, mask):
        return attend(q, k, v, mask)

    mask = torch.ones(T, T, dtype=torch.bool)
    first = checkpoint(block, q, k, v, mask, use_reentrant=False)
    mask.tril_()
    return first + q * mask.sum()


def hole_in_itself(q, k, v):
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[3, 1] = False
    return attend(q, k, v, mask)


def filled_from_an_input(q, k, v):
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[3] = q[0, 0, :, 0].detach()[:T] > 0
    return attend(q, k, v, mask[None, None])


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (hole, "its mask is neither causal nor a sliding window"),
        (written_behind_a_body, "its mask is written in place"),
        (hole_in_itself, "its mask is written in place"),
        (filled_from_an_input, "its mask depends on an input"),
    ],
)
def test_a_write_into_a_mask_is_no_secret(attention, reason):
    assert_left_alone(use_triton_sdpa, attention, *heads(), reason=reason)


# --- patterns of several ops ----------------------------------------------------------------------


def rotate(x, late=lambda x: None):
    angles = torch.arange(T)[:, None] / 10.0 ** torch.arange(H // 2)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    straight = x * cos
    late(x)
    return straight + torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1) * sin


def clip(x):
    x.clamp_(min=-1, max=1)


def test_a_rotation_of_values_that_were_clipped_before_is_swapped():
    def model(x):
        x = (3 * x).view(B, T, N, H)
        clip(x)
        return rotate(x.transpose(1, 2))

    assert_swapped(use_triton_rope, model, torch.randn(B, T, N * H))


def test_a_write_between_the_reads_of_a_rotation_is_refused():
    def model(x):
        return rotate(3 * x, clip)

    module = graph_of(model, torch.randn(B, N, T, H))
    result = run_swap(module, use_triton_rope)
    assert result.num_replaced == 0
    assert result.skipped == {"an op writes in place into what it reads": 1}


def norm(x, weight, late=lambda x: None):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    late(x)
    return x * rstd * weight


def test_norms_of_what_is_written_before_and_between():
    def before(x, weight):
        x = 3 * x
        clip(x)
        return norm(x.view(B, T, N * H), weight)

    def between(x, weight):
        return norm((3 * x).view(B, T, N * H), weight, clip)

    inputs = torch.randn(B, T, N, H), torch.randn(N * H)
    assert_swapped(use_triton_rms_norm, before, *inputs)
    result = run_swap(graph_of(between, *inputs), use_triton_rms_norm)
    assert result.num_replaced == 0
    assert result.skipped == {"an op writes in place into what it reads": 1}


def square_is_written(x, weight):
    square = x.pow(2)
    square.mul_(2)
    return x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6) * weight[0]


def activation_is_written_through_a_view(x, weight):
    gate = F.silu(x)
    gate.ravel()[:3].mul_(2)
    return gate * weight


def a_body_writes(x, weight):
    """The call of a checkpoint is the write: no op of the outer graph is."""

    def body(y):
        y.mul_(2)
        return y.sum()

    gate = F.silu(x)
    return checkpoint(body, gate, use_reentrant=False) + gate * weight


def result_is_written_through_a_view(x, weight):
    """ravel views what the model makes; of the op's result, laid out as x is, it is a copy."""
    x = x.view(B, T, N, H).transpose(1, 2)
    angles = torch.arange(T)[:, None] / 10.0 ** torch.arange(H // 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., : H // 2], x[..., H // 2 :]
    y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    y.ravel()[:5].mul_(2)
    return y * weight.sum()


def attention_is_written(x, weight):
    q = x.view(B, T, N, H).transpose(1, 2)
    y = attend(q, 2 * q, q, is_causal=True)
    y.mul_(1.5)
    return y.detach().sum() * weight


@pytest.mark.parametrize(
    "function",
    [
        attention_is_written,
        square_is_written,
        activation_is_written_through_a_view,
        a_body_writes,
        result_is_written_through_a_view,
    ],
)
def test_a_write_into_what_lies_between_is_seen(function):
    inputs = torch.randn(B * T, N * H).double(), torch.randn(B * T, N * H).double()
    assert swaps_as_eager(function, *inputs) == 0


# --- grad mode, contexts, detach, hooks -----------------------------------------------------------


def evaluated(function, args):
    """Results and gradients by position: None where there is none."""
    leaves = [a.detach().clone().requires_grad_(a.dtype.is_floating_point) for a in args]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    sum((r * torch.linspace(1, 2, r.numel()).view_as(r)).sum() for r in results).backward()
    return [*(r.detach() for r in results), *(leaf.grad for leaf in leaves)]


def swaps_as_eager(function, *args, reasons=()):
    """Assert that all passes leave values and gradients as eager's; return how many swaps."""
    module = graph_of(function, *(a.clone().requires_grad_() for a in args))
    results = [swap(module.graph, kernels="triton", backend="aot_eager") for swap in _SWAPS]
    remove_noop_views(module.graph)
    for part in walk_graphs(module):
        part.graph.lint()
        part.recompile()
    found, expected = (evaluated(f, args) for f in ((lambda *a: run(module, *a)), function))
    for actual, right in zip(found, expected, strict=True):
        assert (actual is None) == (right is None)
        if right is not None:
            assert_close(actual, right)
    skipped = {reason for result in results for reason in result.skipped}
    assert skipped >= set(reasons), skipped
    return sum(result.num_replaced for result in results)


def statistics_held_constant(x, y, w):
    with torch.no_grad():
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * r * w


def square_held_constant(x, y, w):
    with torch.no_grad():
        square = x.pow(2)
    return x / torch.sqrt(square.mean(-1, keepdim=True) + 1e-6) * w


def weight_held_constant(x, y, w):
    with torch.no_grad():
        scale = 1.0 + w
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale


def gate_held_constant(x, y, w):
    with torch.no_grad():
        gate = F.silu(x)
    return gate * y + x


def gelu_held_constant(x, y, w):
    was = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    gate = F.gelu(x)
    torch.set_grad_enabled(was)
    return gate * y + x


def inner_step_held_constant(x, y, w):
    with torch.no_grad():
        cube = x + 0.044715 * x**3
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * cube)) * y


def halves_held_constant(x, y, w):
    with torch.no_grad():
        gate, up = x.chunk(2, -1)
    return F.silu(gate) * up + y[..., : y.shape[-1] // 2]


def norm_of_a_frozen_sum(x, y, w):
    with torch.no_grad():
        h = x + y
    return h * 2 + F.rms_norm(h, (N * H,), w, 1e-6)


def frozen_norm_of_a_sum(x, y, w):
    h = x + ops.dropout(y, 0.5, torch.full((), 3, dtype=torch.int64))
    with torch.no_grad():
        n = F.rms_norm(h, (N * H,), w, 1e-6)
    return h * n


CUT = [statistics_held_constant, square_held_constant, weight_held_constant, gate_held_constant]
CUT += [gelu_held_constant, inner_step_held_constant, halves_held_constant]


def tensors(last=N * H):
    return tuple(torch.randn(B, T, last).double() for _ in range(2)), torch.randn(last).double()


def inside_a_checkpoint(function):
    return lambda *args: checkpoint(function, *args, use_reentrant=False)


@pytest.mark.parametrize("wrapped", [lambda f: f, inside_a_checkpoint])
@pytest.mark.parametrize("function", CUT)
def test_what_is_held_constant_gets_no_gradient(function, wrapped):
    (x, y), w = tensors()
    assert swaps_as_eager(wrapped(function), x, y, w, reasons=[GRAD_MODE]) == 0


@pytest.mark.parametrize("function", [norm_of_a_frozen_sum, frozen_norm_of_a_sum])
@pytest.mark.parametrize("wrapped", [lambda f: f, inside_a_checkpoint])
def test_a_sum_and_its_norm_fuse_in_one_grad_mode_alone(function, wrapped):
    (x, y), w = tensors()
    assert swaps_as_eager(wrapped(function), x, y, w, reasons=[GRAD_MODE]) == 1  # the norm


def test_gradients_of_constant_statistics_are_exact():
    """d y[0] of y = x r w with r constant is w r at its own place: 0.632455, and 0 elsewhere."""
    x = torch.tensor([[[1.0, 2.0] * 8]], requires_grad=True)
    module = graph_of(lambda x, w: statistics_held_constant(x, x, w), x, torch.ones(16))
    run_swap(module, use_triton_rms_norm)
    run(module, x, torch.ones(16))[0][0, 0, 0].backward()
    assert x.grad[0, 0, :2].tolist() == pytest.approx([0.632455, 0.0], abs=1e-6)
    z = torch.ones(1, 2, 16, requires_grad=True)
    u = torch.full((1, 2, 16), 2.0, requires_grad=True)
    module = graph_of(lambda z, u: gate_held_constant(z, u, u), z, u)
    for swap in _SWAPS:
        run_swap(module, swap)
    run(module, z, u)[0].sum().backward()
    assert z.grad[0, 0, 0] == 1.0 and u.grad[0, 0, 0] == pytest.approx(0.7310586)


def test_heads_repeated_under_no_grad_stay_repeated():
    def attention(q, k, v):
        with torch.no_grad():
            wide = k.repeat_interleave(2, 1)
        return attend(q, wide, v.repeat_interleave(2, 1)) + k.sum()

    assert swaps_as_eager(attention, *heads(torch.float64, kv=M), reasons=[GRAD_MODE]) == 0


def test_queries_and_keys_of_two_grad_modes_turn_apart():
    def model(q, k):
        with torch.no_grad():
            turned = rotate(k)
        return rotate(q) * turned + k

    module = graph_of(model, *heads()[:2])
    assert run_swap(module, use_triton_rope).num_replaced == 2
    assert len(calls(module, "rope")) == 2 and not calls(module, "rope_qk")
    assert swaps_as_eager(model, *heads(torch.float64)[:2]) == 2


def test_what_is_of_one_state_is_swapped_in_it():
    """Whole under no_grad, or left and entered again between its ops."""

    def frozen(x, y, w):
        with torch.no_grad():
            n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        return F.silu(n) * y

    def in_pieces(x, y, w):
        with torch.no_grad():
            r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            with torch.enable_grad():
                z = x * 2
        with torch.no_grad():
            return x * r * w * y + z * 0, z

    (x, y), w = tensors()
    assert swaps_as_eager(frozen, x, y, w) == 2
    assert swaps_as_eager(in_pieces, x, y, w) == 1


def test_constants_may_be_made_in_any_grad_mode():
    """As rotary embeddings make their tables, and models their masks."""

    def model(q, k, v, scale):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            angles = torch.arange(T)[:, None] / 10.0 ** torch.arange(H // 2)
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
            mask = torch.arange(T)[:, None] >= torch.arange(T)
            one_plus = 1.0 + torch.zeros(H, dtype=q.dtype)
        q, k = (
            x * cos + torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1) * sin for x in (q, k)
        )
        y = attend(q, k, v, mask)
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * one_plus * scale

    assert swaps_as_eager(model, *heads(torch.float64), torch.ones(()).double()) == 4


def test_a_value_of_inference_mode_is_kept_by_no_op():
    def model(x, y, w):
        with torch.inference_mode():
            c = x * 2
        return F.silu(c) * y + x

    (x, y), w = tensors()
    module = graph_of(model, x.requires_grad_(), y, w)
    results = [swap(module.graph) for swap in _SWAPS]
    reasons = {reason for r in results for reason in r.skipped}
    assert reasons == {"it reads a value of inference mode, which no op may keep"}


def test_a_match_ends_at_the_edge_of_a_context():
    def model(x, y, w):
        with torch.autocast("cpu", torch.bfloat16):
            gate = F.silu(x)
        return gate * y

    (x, y), w = tensors()
    assert swaps_as_eager(model, x, y, w, reasons=[CONTEXT]) == 0


def test_a_detach_or_a_hook_on_what_lies_between_is_no_part_of_a_match():
    def detached(x, y, w):
        return F.silu(x).detach() * y + x

    def data(x, y, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).data * w

    (x, y), w = tensors()
    assert swaps_as_eager(detached, x, y, w) == swaps_as_eager(data, x, y, w) == 0

    def hooked(x, y, w):
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = x * rstd * w
        rstd.register_hook(lambda gradient: 2 * gradient)
        return y

    inputs = (t.requires_grad_() for t in (x, y, w))
    # torch 2.11's Dynamo calls the hook between the ops, where nothing is matched
    is_seen = not torch.__version__.startswith("2.11")
    reason = "a hook hangs on a value" if is_seen else ""
    assert_left_alone(use_triton_rms_norm, hooked, *inputs, reason=reason)


def test_a_result_that_nobody_reads_gives_no_gradient():
    def keys_detached(q, k, cos):
        angles = torch.cat((cos, cos), -1)
        cos, sin = angles.cos(), angles.sin()
        q, k = (
            x * cos + torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1) * sin for x in (q, k)
        )
        return q * k.detach()

    def norm_detached(x, y, w):
        h = x + y
        return h * F.rms_norm(h, (N * H,), w, 1e-6).detach()

    (x, y), w = tensors()
    assert swaps_as_eager(norm_detached, x, y, w) == 2
    q, k, _ = heads(torch.float64)
    module = graph_of(keys_detached, q, k, torch.randn(T, H // 2).double())
    assert run_swap(module, use_triton_rope).num_replaced == 2
    q, k = q.requires_grad_(), k.requires_grad_()
    run(module, q, k, torch.randn(T, H // 2).double())[0].sum().backward()
    assert q.grad is not None and k.grad is None


def test_a_loss_with_gradients_enabled_inside_no_grad_has_them():
    def model(x, y, w):
        with torch.enable_grad():
            logits = F.linear(x, y[0])
            return F.cross_entropy(logits.flatten(0, 1), torch.arange(B * T) % T)

    (x, y), w = tensors()
    with torch.no_grad():
        module = graph_of(model, x.requires_grad_(), y.requires_grad_(), w)
        results = [swap(module.graph, kernels="triton") for swap in _SWAPS]
        module.recompile()
        assert sum(r.num_replaced for r in results) == 1
        run(module, x, y, w)[0].backward()
    found, x.grad, y.grad = (x.grad, y.grad), None, None
    model(x, y, w).backward()
    assert all(torch.allclose(a, b) for a, b in zip(found, (x.grad, y.grad), strict=True))


# --- what normalise takes out -------------------------------------------------------------------


def whole_slice(x):
    with torch.no_grad():
        y = x[:, 0:]
    return y * x


def same_view(x):
    with torch.no_grad():
        y = x.view(x.shape)
    return y * x


def cast_and_slice(x):
    """The cast hands out the sum itself, which keeps its gradient; the slice cuts it off."""
    with torch.no_grad():
        y = (x * 2).to(x.dtype)
    z = x * 3
    with torch.no_grad():
        z = z.to(z.dtype)[...]
    return y * x + z


def add_in_place(x):
    """Under no_grad the target keeps its gradient: a plain sum would have none."""
    h = x * 2
    with torch.no_grad():
        h += 1.0
    return h * x


@pytest.mark.parametrize("function", [whole_slice, same_view, cast_and_slice, add_in_place])
@pytest.mark.parametrize("wrapped", [lambda f: f, inside_a_checkpoint])
def test_what_cuts_a_gradient_is_no_noop(function, wrapped):
    swaps_as_eager(wrapped(function), torch.randn(B, T, H).double())


def test_a_view_that_leaves_a_graph_under_no_grad_stays_a_view():
    """Without it the graph would hand out its input itself, which carries a gradient."""

    def model(x, y):
        return x[:, 0:], y.view(y.shape) * 2

    with torch.no_grad():
        module = graph_of(model, *(torch.randn(B, T, H, requires_grad=True) for _ in range(2)))
    assert len(calls(module, "getitem")) == 1 and not calls(module, "view")
