"""Parity of the token-level trust regions with verl and UniRL, through the rows of the table; see test_golden.py.

The rows get the case's numbers as method options. A case is a rollout whose kept tokens were all revealed in one step.
"""

import json

import pytest
import torch

import laws
from judged import SHIPPED
from laws import double
from minidrl import algorithms as alg
from minidrl import methods
from parity import FOLDER, cases, same


class Case:
    """A golden case as a rollout of one prompt, its plan, anchor and policy."""

    def __init__(self, row, given, clamp=None, **options):
        changes = {f"objective.{name}" if name != "aggregation" else name: value for name, value in options.items()}
        self.method = methods.with_options(methods.METHODS[row], changes)
        keep, old = torch.tensor(given["keep"]).bool(), double(given["logp_old"])
        rollout = laws.rollout_of(SHIPPED, torch.zeros_like(keep, dtype=torch.long), keep, num_generations=len(keep))
        fields = {"logp": old * keep, "unmask_step": torch.where(keep, 0, -1)}
        self.rollout = alg.Rollout(**{**vars(rollout), **fields})
        self.plan = self.method.plan(self.rollout, laws.seeded())
        self.anchor = methods.behaviour_anchor(self.method, self.plan, self.rollout)
        self.logp, self.adv = double(given["logp_new"]).requires_grad_(), double(given["adv"])
        self.old, self.clamp = old, clamp

    @property
    def feature(self):
        policy = self.logp if self.clamp is None else self.old + (self.logp - self.old).clamp(-self.clamp, self.clamp)
        return {"logp": policy[None]}

    def loss(self):
        return methods.method_loss(self.method, self.plan, self.rollout, self.feature, self.adv, self.anchor, None)

    def per_token(self):
        """Loss of each kept token."""
        ll = methods.reduced(self.method, self.plan, self.rollout, self.feature)
        loss = self.method.objective(ll, self.anchor, self.adv[None, :, None].expand_as(ll), len(self.adv)).loss
        return (loss * self.plan.scored)[0]

    def agrees(self, loss, gradient):
        mine = self.loss()
        same(mine, loss, "loss")
        same(torch.autograd.grad(mine, self.logp)[0], gradient, "gradient")

    def tokens(self, loss, gradient=None):
        """A loss per token; its own gradient is that of the sum."""
        mine, keep = self.per_token(), self.rollout.keep
        same(mine, double(loss) * keep, "per token")
        if gradient is not None:
            same(torch.autograd.grad(mine.sum(), self.logp)[0], double(gradient) * keep, "gradient per token")


# --------------------------------------------------------------------------------------------------------------- the clips


@cases("token_family", "gspo")
def test_gspo(case):
    """GSPO is the sequence ratio, normalised by the kept length, in PPO's clip.

    The official code spreads the same loss over the tokens with a stop-gradient trick and averages back: no difference.
    """
    given, out = case["inputs"], case["outputs"]
    mine = Case("gspo", given, epsilon_low=given["clip_low"], epsilon_high=given["clip_high"])
    mine.agrees(out["loss"], out["grad_logp_new"])


@cases("token_family", "vanilla")
def test_ppo(case):
    """verl's vanilla loss: token ratios, token mean, and for adv < 0 at most -3 adv, with gradient 0 there."""
    given, out = case["inputs"], case["outputs"]
    clip = {"epsilon_low": given["clip_low"], "epsilon_high": given["clip_high"], "bound": given["dual_clip"]}
    mine = Case("ppo-released", given, **clip)
    mine.agrees(out["loss"], out["grad_logp_new"])


def test_dual_clip_separates_some_of_these_cases():
    """Otherwise the cases above would not see the bound of (8.6): without it some of them differ, and some do not."""
    found = [case for case in json.loads((FOLDER / "token_family.json").read_text()) if case["name"].startswith("vanilla")]
    changed = []
    for case in found:
        given = case["inputs"]
        clip = {"epsilon_low": given["clip_low"], "epsilon_high": given["clip_high"]}
        loss = Case("ppo", given, aggregation="token_mean", **clip).loss()
        changed.append(abs(loss.item() - case["outputs"]["loss"]) > 1e-6)
    assert any(changed) and not all(changed)


@cases("token_family", "cispo")
def test_cispo(case):
    """-sg[clip(ratio, 1 - low, 1 + high)] adv logp. The official code has the floor as well: 0 where low is 1."""
    given, out = case["inputs"], case["outputs"]
    mine = Case("cispo-released", given, floor=1 - given["clip_low"], cap=1 + given["clip_high"])
    mine.agrees(out["loss"], out["grad_logp_new"])
    if given["clip_low"] == 1:
        Case("cispo", given, cap=1 + given["clip_high"]).agrees(out["loss"], out["grad_logp_new"])


# ------------------------------------------------------------------------------------------------------- DPPO: verl, UniRL


@cases("dppo")
def test_dppo(case):
    """verl's loss -adv sg[min(ratio, C) M] logp. Its KL adds 1e-8 to both complements: no mask here depends on it."""
    given, out = case["inputs"], case["outputs"]
    row = "dppo-tv-released" if "_tv_" in case["name"] else "dppo-kl-released"
    mine = Case(row, given, delta=given["threshold"], cap=given["trunc"])
    mine.agrees(out["loss"], out["grad_logp_new"])
    ll = mine.logp.detach()[None]
    seen = methods.ratio_diagnostics(mine.method, mine.plan, mine.rollout, {"logp": ll}, mine.anchor, mine.adv)["clip_fraction"]
    shift = alg.binary_divergence(ll, mine.anchor, form=mine.method.objective.keywords["form"])
    ratios, wide = alg.log_ratio(ll, mine.anchor), mine.adv[None, :, None].expand_as(ll)
    masked, capped = ~alg.trust_mask(ratios, wide, shift > given["threshold"]), ratios.exp() > given["trunc"]
    # verl counts the entries of adv = 0 as negative ones; its mask there multiplies a gradient that is 0 anyway.
    if bool((mine.adv != 0).all()):
        same(masked[mine.plan.scored].double().mean(), out["masked_fraction"], "masked fraction")
    same((masked | capped)[mine.plan.scored].double().mean(), seen, "what is logged: masked, or at the cap of its weight")
    near = (shift - given["threshold"]).abs()
    assert near[mine.plan.scored].min() > 1e-6, "the quirk of 1e-8 could decide a mask"


@cases("dppo", "dppo_tv")
def test_dppo_surrogate(case):
    """UniRL's loss -adv ratio M without truncation, the paper's eq. 12: values per token, mean over kept ones, gradient.

    Its log ratio is clamped to 20, with gradient 0 beyond; minidrl's is not, so the clamp is laid around its input. One number
    in these files exceeds it (`extreme`: a token that went from 1e-10 to 0.97).
    """
    given, out = case["inputs"], case["outputs"]
    mine = Case("dppo-tv", given, clamp=20, delta=given["threshold"], aggregation="token_mean")
    mine.agrees(out["surrogate_loss_mean_over_kept"], out["surrogate_grad_logp_new"])
    mine.tokens(out["surrogate_per_token_loss"])


# -------------------------------------------------------------------------------------------------------------- DRPO: UniRL


@cases("drpo", "drpo")
def test_drpo(case):
    """Per token, as the mean over kept tokens, and as the official token mean, which divides by all tokens (fixed_length).

    The clamp as above. The release's delta is 12.5; the cases with others see the boundary.
    """
    given, out = case["inputs"], case["outputs"]
    mine = Case("drpo-released", given, clamp=20, delta=given["delta"])
    same(mine.loss(), out["loss_official_token_mean"], "official token mean")
    same(mine.loss(), out["loss_official_seq_sum_over_horizon_L"], "official sum over the horizon")
    mine = Case("drpo", given, clamp=20, delta=given["delta"], aggregation="token_mean")
    mine.agrees(out["loss_mean_over_kept"], out["grad_logp_new_of_loss_mean_over_kept"])
    mine.tokens(out["per_token_loss"], out["per_token_grad"])


@cases("drpo", "spo")
def test_spo(case):
    """UniRL's plain penalty; the cases carry no reduction."""
    given, out = case["inputs"], case["outputs"]
    Case("spo", given, epsilon=given["delta"]).tokens(out["per_token_loss"], out["per_token_grad"])


# -------------------------------------------------------------------------------- the mechanism: masks coast, lines hold


def settled(row, mu, adv, lr=0.05, steps=400, momentum=0.9, vocab=20):
    """Probability of one token after repeated ascent on it with momentum, under the objective of a row (None: no region)."""
    start = torch.full((vocab,), (1 - mu) / (vocab - 1), dtype=torch.float64)
    start[0] = mu
    z, velocity, anchor = start.log().requires_grad_(), torch.zeros(vocab, dtype=torch.float64), double(mu).log()
    for _ in range(steps):
        ll = z.log_softmax(-1)[0]
        loss = row.objective(ll, anchor, double(adv), 1).loss if row else -(ll - anchor).exp() * adv
        (gradient,) = torch.autograd.grad(loss, z)
        velocity = momentum * velocity - gradient
        z = (z.detach() + lr * velocity).requires_grad_()
    return z.softmax(-1)[0].item()


@pytest.mark.parametrize(("mu", "adv"), [(0.02, 1.0), (0.5, 1.0), (0.5, -1.0), (0.95, -1.0)])
def test_a_line_settles_where_a_mask_coasts(mu, adv):
    """DRPO ends within 0.002 of mu +- delta, DPPO-tv at least 0.1 beyond it, DRPO at the published delta with no region."""
    target = mu + adv * 0.15
    assert abs(settled(methods.METHODS["drpo"], mu, adv) - target) < 2e-3
    assert (settled(methods.METHODS["dppo-tv"], mu, adv) - target) * adv > 0.1
    assert abs(settled(methods.METHODS["drpo-released"], mu, adv) - settled(None, mu, adv)) < 2e-3
    assert abs(settled(methods.METHODS["spo"], mu, adv) - mu * (1 + 0.2 * adv)) < 2e-3, "SPO settles on a ratio"
