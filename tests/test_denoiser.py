"""The network: bidirectional, and blind to padding."""

from collections.abc import Callable

import pytest
import torch

import tiny
from minidrl import denoiser
from minidrl.tasks.countdown import tokenizer

TOKENS = torch.randint(3, 23, (4, 9), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([0, 4, 2, 1])
MASK = torch.arange(9) >= LEFT[:, None]


# ------------------------------------------------------------------------------------------------------------- function


def test_a_later_token_changes_an_earlier_logit():
    model, other = tiny.network(), TOKENS.clone()
    other[:, -1] = torch.where(TOKENS[:, -1] == 5, 6, 5)
    before, after = (model.head(model.encode(x, MASK))[:, 4, 3:] for x in (TOKENS, other))
    assert ((before - after).abs().amax(-1) > 1e-3).all()


def test_what_stands_in_the_padding_changes_nothing():
    model, other = tiny.network(), TOKENS.masked_fill(~MASK, 7)
    assert not torch.equal(TOKENS, other)
    assert torch.equal(model.encode(TOKENS, MASK)[MASK], model.encode(other, MASK)[MASK])
    assert not torch.allclose(model.encode(TOKENS, None)[MASK], model.encode(other, None)[MASK], atol=1e-3)


def test_a_left_padded_batch_equals_its_rows_alone():
    model = tiny.network(torch.float64)
    together = model.head(model.encode(TOKENS, MASK))
    for row, start in enumerate(LEFT.tolist()):
        alone = model.head(model.encode(TOKENS[row : row + 1, start:], None))
        torch.testing.assert_close(together[row, start:], alone[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_logit_of_mask_and_no_other_is_minus_infinity(dtype):
    model = tiny.network(dtype)
    logits = model.head(model.encode(TOKENS, MASK))
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (logits[..., model.mask_token_id] == -torch.inf).all()
    assert int(torch.isfinite(logits).sum()) == logits.numel() - TOKENS.numel()


def test_a_compiled_network_shares_weights_and_answers_alike(monkeypatch):
    calls = []

    def spy(function: Callable) -> Callable:
        return lambda *inputs: calls.append(len(inputs)) or function(*inputs)

    monkeypatch.setattr(torch, "compile", spy)
    model = tiny.network()
    other = denoiser.compiled(model)
    assert torch.equal(other.encode(TOKENS, MASK), model.encode(TOKENS, MASK))
    assert calls == [2], "the copy goes through torch.compile, the original does not"
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------------- initialisation


def test_build_follows_its_seed_and_leaves_the_global_generators_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("reseeds the GPUs"))
    before = torch.get_rng_state()
    first, second, third = (tiny.weights(denoiser.build(tiny.SIZES, tokenizer(), seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.lm_head.weight"], third["model.lm_head.weight"])


@pytest.mark.parametrize("size, padded", [(None, True), (None, False), (3, True)])
def test_equal_rows_are_computed_once_and_mean_the_same(size, padded, monkeypatch):
    """Hidden states and gradient are those of all rows, each computed; what stands under padding tells no rows apart."""
    model, place = tiny.network(torch.float64), torch.tensor([2, 0, 2, 1, 0, 2])
    model.block_length = size
    tokens, mask = TOKENS[place].clone(), MASK[place] if padded else None
    tokens[0, 0] = 5 if padded else tokens[0, 0]
    slope = torch.randn(6, 9, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows, found = [], []
    inner = model._encode
    monkeypatch.setattr(model, "_encode", lambda x, real: rows.append(len(x)) or inner(x, real))
    for encode in (model.encode, inner):
        h = encode(tokens, mask)
        h = h if mask is None else h * mask[..., None]
        (h * slope).tanh().sum().backward()
        found.append([h.detach(), *(p.grad.clone() for p in model.model.model.parameters())])
        model.zero_grad()
    assert rows == [3]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_no_embedding_row_is_frozen():
    model = tiny.network()
    model.encode(torch.zeros_like(TOKENS), None).square().sum().backward()
    assert model.model.model.embed_tokens.weight.grad[0].abs().sum() > 0, "row 0 is [PAD]"


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="network.hidden_size: got 30; allowed multiples of"):
        denoiser.build({**tiny.SIZES, "hidden_size": 30}, tokenizer(), 0)
