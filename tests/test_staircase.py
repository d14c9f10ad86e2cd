"""Staircase attention: one forward equals the forwards of all blocks.

The judge is the slow path, written here in full: for every block one sequence [prompt, clean blocks before it, noisy block]
with a mask made by loops. Networks have random weights of order 1 in float64.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tiny
from minidrl import algorithms as alg
from minidrl import denoiser
from minidrl.tasks.countdown import tokenizer

STREAMS = ("block", "causal")
N, P, L, B = 3, 5, 12, 4
each_stream = pytest.mark.parametrize("stream", STREAMS)
each_depth = pytest.mark.parametrize("layers", [1, 3])


# ------------------------------------------------------------------------------------------------------------- the judge
def network(layers: int, block_length: int | None = None, family=None) -> denoiser.Denoiser:
    """Weights so large that attention is peaked: what a token may not see would move it by order 1."""
    model = tiny.exact(denoiser.build(tiny.SIZES | {"num_hidden_layers": layers}, tokenizer(), 0).eval().double())
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=noise, dtype=p.dtype) * 1.5 / p.shape[1] ** 0.5)
    return denoiser.Denoiser(model.model, family, block_length)


def batch(model, prompt_length: int = P, length: int = L) -> dict[str, Tensor]:
    """Full prompts, a response, and the same with about half of its tokens hidden."""
    noise = torch.Generator().manual_seed(2)
    prompt = torch.randint(3, 20, (N, prompt_length), generator=noise)
    clean = torch.randint(3, 20, (N, length), generator=noise)
    hidden = torch.rand(clean.shape, generator=noise) < 0.5
    noisy = clean.masked_fill(hidden, model.mask_token_id)
    return {"prompt": prompt, "prompt_mask": torch.ones_like(prompt, dtype=torch.bool), "clean": clean, "noisy": noisy}


def one_block(model, row: dict[str, Tensor], k: int, size: int, stream: str) -> Tensor:
    """Hidden states of noisy block k of one sequence without padding, by a forward of its own."""
    start = len(row["prompt"])
    tokens = torch.cat([row["prompt"], row["clean"][: k * size], row["noisy"][k * size : (k + 1) * size]])
    kind = ["prompt"] * start + ["clean"] * (k * size) + ["noisy"] * size
    place = [i - start for i in range(len(kind))]
    sees = torch.zeros(len(kind), len(kind), dtype=torch.bool)
    for q, other in itertools.product(range(len(kind)), repeat=2):
        if kind[q] == "prompt" or kind[other] == "prompt":
            sees[q, other] = kind[other] == "prompt"
        elif kind[q] == "clean" and kind[other] == "clean" and stream == "causal":
            sees[q, other] = place[other] <= place[q]
        elif kind[q] == "clean" and kind[other] == "clean":
            sees[q, other] = place[other] // size <= place[q] // size
        else:
            sees[q, other] = kind[q] == "noisy"  # a noisy block sees its past and itself
    h = model.model.model(input_ids=tokens[None], attention_mask=sees[None, None], use_cache=False).last_hidden_state
    return h[0, -size:]


def per_block(model, data: dict[str, Tensor], size: int, stream: str) -> Tensor:
    """(N, L, D) from N L / size forwards; padding of the prompts is cut off first."""
    rows = []
    for n, mask in enumerate(data["prompt_mask"]):
        row = {name: data[name][n] for name in ("clean", "noisy")} | {"prompt": data["prompt"][n][mask]}
        rows.append(torch.cat([one_block(model, row, k, size, stream) for k in range(len(row["clean"]) // size)]))
    return torch.stack(rows)


def staircase(model, data: dict[str, Tensor], size: int = B, stream: str = "block") -> Tensor:
    return model.encode_staircase(**data, block_length=size, clean_stream=stream)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def padded(data: dict[str, Tensor], lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """The prompts cut to their last ``lengths`` tokens, with something in the padding."""
    mask = torch.arange(data["prompt"].shape[1]) >= data["prompt"].shape[1] - torch.tensor(lengths)[:, None]
    return {**data, "prompt_mask": mask}


def changed(data: dict[str, Tensor], name: str, columns: slice) -> dict[str, Tensor]:
    """Other tokens in some columns of a stream."""
    other = data[name].clone()
    other[:, columns] = (other[:, columns] + 1) % 20
    return {**data, name: other}


def moved(before: Tensor, after: Tensor, size: int = B) -> list[bool]:
    """Which blocks differ; nothing in between: what does not change is the same to the last bits."""
    gap = (before - after).abs().unflatten(1, (-1, size)).amax((0, 2, 3))
    assert all(g < 1e-12 or g > 1e-3 for g in gap.tolist())
    return [g > 1e-3 for g in gap.tolist()]


# ------------------------------------------------------------------------------------------------------------- the law
def law_one_forward_is_all_forwards(model, size: int, stream: str) -> None:
    for lengths in ((P, P, P), (P, 2, 4)):
        data = padded(batch(model), lengths)
        close(staircase(model, data, size, stream), per_block(model, data, size, stream))


@each_depth
@each_stream
def test_one_forward_equals_one_forward_a_block(layers, stream):
    for size in (1, 4, 12):
        law_one_forward_is_all_forwards(network(layers), size, stream)


@each_stream
def test_gradients_are_equal_too(stream):
    """Of an arbitrary function of the rows, for every weight of the network."""
    model = network(2)
    data, grads = padded(batch(model), (P, 2, 4)), []
    weight = torch.randn(N, L, model.model.config.hidden_size, generator=torch.Generator().manual_seed(3)).double()
    for path in (staircase, per_block):
        (path(model, data, B, stream) * weight).sum().backward()
        grads.append(tiny.gradient(model.model.model))
    close(*grads)
    assert grads[0].abs().max() > 1


@each_depth
def test_the_two_clean_streams_are_not_interchangeable(layers):
    """In one layer they are: there the clean keys and values are the tokens' own, whatever the clean rows see."""
    model = network(layers)
    gap = (staircase(model, batch(model)) - staircase(model, batch(model), stream="causal")).abs()
    assert (gap.max() < 1e-12) if layers == 1 else (gap[:, B:].max() > 1e-3)
    assert gap[:, :B].max() < 1e-12, "the first block has no clean past"


# --------------------------------------------------------------------------------------------------------- invariances
@each_stream
def test_a_noisy_block_depends_on_the_clean_blocks_before_it_and_on_itself(stream):
    model = network(2)
    data, columns = batch(model), slice(B, 2 * B)
    before = staircase(model, data, stream=stream)
    clean, noisy = (staircase(model, changed(data, name, columns), stream=stream) for name in ("clean", "noisy"))
    assert moved(before, clean) == [False, False, True]
    assert moved(before, noisy) == [False, True, False]
    prompt = staircase(model, changed(data, "prompt", slice(1, 2)), stream=stream)
    assert moved(before, prompt) == [True] * 3


@each_stream
def test_padding_and_the_other_rows_change_nothing(stream):
    model = network(2)
    data = padded(batch(model), (P, 2, 4))
    together = staircase(model, data, stream=stream)
    close(staircase(model, changed(data, "prompt", slice(0, 1)), stream=stream)[1:], together[1:])
    for n, mask in enumerate(data["prompt_mask"]):
        alone = {name: value[n : n + 1] for name, value in data.items()}
        close(staircase(model, alone, stream=stream), together[n : n + 1])
        cut = alone | {"prompt": alone["prompt"][:, mask], "prompt_mask": alone["prompt_mask"][:, mask]}
        close(staircase(model, cut, stream=stream), together[n : n + 1])


@each_stream
def test_a_row_of_padding_is_finite_and_so_is_its_gradient(stream):
    """A prompt of nothing but padding leaves query rows that see no key at all."""
    model = network(2)
    data = padded(batch(model), (0, 2, P))
    h = staircase(model, data, stream=stream)
    close(h, per_block(model, data, B, stream))
    h.sum().backward()
    assert h.isfinite().all() and tiny.gradient(model.model.model).isfinite().all()


# ------------------------------------------------------------------------------------------------------------- the mask
@pytest.mark.parametrize(("prompt", "length", "size"), [(5, 16, 4), (0, 8, 2), (4, 6, 6)])
def test_the_number_of_pairs(prompt, length, size):
    mask = alg.staircase_mask(torch.ones(2, prompt, dtype=torch.bool), length, size, clean="block")
    assert mask.dtype == torch.bool and mask.shape == (2, 1, prompt + 2 * length, prompt + 2 * length)
    pairs = prompt**2 + 2 * length * prompt + length * (length + size)
    assert mask.sum((1, 2, 3)).tolist() == [pairs, pairs]
    causal = alg.staircase_mask(torch.ones(1, prompt, dtype=torch.bool), length, size, clean="causal")
    assert int(causal.sum()) == pairs - length * (size - 1) // 2, "what a clean token no longer sees in its own block"
    assert (size, length) != (4, 16) or pairs == 505


# -------------------------------------------------------------------------------------------------------- special cases
@each_depth
@each_stream
def test_a_single_block_is_ordinary_denoising_with_a_clean_prompt(layers, stream):
    """``encode`` lets the prompt see the response, which is the same in one layer or without a prompt, and only there."""
    model = network(layers)
    bare = batch(model, prompt_length=0)
    close(staircase(model, bare, L, stream), model.encode(bare["noisy"], None))
    data = batch(model)
    tokens = torch.cat([data["prompt"], data["noisy"]], 1)
    one_way = (torch.arange(P + L)[:, None] >= P) | (torch.arange(P + L)[None, :] < P)
    body = model.model.model(input_ids=tokens, attention_mask=one_way.expand(N, 1, -1, -1), use_cache=False)
    close(staircase(model, data, L, stream), body.last_hidden_state[:, P:])
    gap = (model.encode(tokens, None)[:, P:] - staircase(model, data, L, stream)).abs().max()
    assert gap < 1e-10 if layers == 1 else gap > 1e-3


@pytest.mark.parametrize("family", [None, SimpleNamespace(shift=True)])
@pytest.mark.parametrize("lengths", [(B, 2 * B, 0), (1, 7, 6)])
def test_a_block_causal_model_is_scored_as_it_encodes(lengths, family):
    """Each of the forwards is ``encode`` itself, whether the prompt is whole blocks or its first one is shorter."""
    model = network(2, B, family)
    data = padded(batch(model, prompt_length=2 * B), lengths)
    got = staircase(model, data)
    for k in range(L // B):
        tokens = torch.cat([data["prompt"], data["clean"][:, : k * B], data["noisy"][:, k * B : (k + 1) * B]], 1)
        real = torch.cat([data["prompt_mask"], torch.ones_like(tokens[:, 2 * B :], dtype=torch.bool)], 1)
        close(got[:, k * B : (k + 1) * B], model.encode(tokens, real)[:, -B:])
    assert (got - staircase(network(2), data)).abs().max() > 1e-3, "a prompt that is one block is another model"
