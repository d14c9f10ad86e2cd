"""Laws of the table of methods: the loss of each (10.1), what it declares, and what is told about its ratios."""

import dataclasses
import functools
import itertools
import math
import statistics
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laws.features import kl_by_hand
from laws.formulas import CLIPS, FORMULAS, REACH, Formula
from laws.registry import for_each_method, judges, rejects
from laws.tools import (
    close,
    double,
    experience,
    features_of,
    graph_logp,
    loose_plan,
    models,
    normal,
    refuses,
    rollout_of,
    seeded,
    token_logps,
)
from minidrl import methods, oracle
from minidrl.sampler import ORDERS


def sized(method: Any) -> Any:
    """The method with no more chosen steps than the laws' rollout has (2), blocks of 2 positions, and a clip that acts."""
    smaller = {"block_length": 2}
    if method.plan.func.__name__ in ("replay_plan", "entropy_plan"):  # which choose steps
        smaller["num_states"] = 2 if method.plan.keywords["num_states"] else None
    known = {f"plan.{name}": value for name, value in smaller.items() if name in method.plan.keywords}
    return methods.with_options(method, known | REACH.get(method.name, {}))


def judged_gradient(alg: Any, method: Any, plan: Any, rollout: Any, reward: Tensor, rows: Any = slice(None)) -> tuple:
    """The gradient of the loss in the new model's table, and the new ll; ``rows`` says which of the eight responses."""
    old, new, ref = models()
    settle = lambda model: alg.reduced(method, plan, rollout, features_of(alg, method, model, rollout, plan))  # noqa: E731
    behaviour = method.anchor == "behaviour"
    anchor = alg.behaviour_anchor(method, plan, rollout) if behaviour else settle(old) if method.anchor == "old" else None
    feature = features_of(alg, method, new, rollout, plan, graph=True)
    whole = (plan.valid.shape[0], 8)
    adv = alg.advantages(method, plan, rollout, reward, normal(*whole, seed=48).abs()[:, rows])
    theirs = features_of(alg, method, ref, rollout, plan)
    target = alg.kl_target(method, plan, rollout, theirs) if method.kl else None
    loss = alg.method_loss(method, plan, rollout, feature, adv, anchor, target)
    return oracle.table_gradient(new, loss), settle(new)


@judges("10.1", "3.1", "2.1", "2.3", "5.1", "6.1", "6.2", "7.1", "7.2", "8.1", "8.2", "8.3", "8.4", "9.1")
@rejects("10.1", ("surrogate + beta * penalty", "surrogate + penalty"))
@rejects("10.1", ("kl_term(ll, target", "kl_term(ll.detach(), target"), where="penalty")
@rejects("10.1", ('"how": method.aggregation', '"how": "sequence_mean"'), where="method_loss")
@rejects("10.1", ("rollout.logp.expand", "0 * rollout.logp.expand"), where="behaviour_anchor")
# A mistake in each kind of field that a method has.
@rejects("10.1", ('KL("k3", 0.04)', 'KL("k2", 0.04)'), where="row.diffu-grpo")
@rejects("10.1", ('normalizer="kept_length"', 'normalizer="padded_length"'), where="row.gspo")
@rejects("10.1", ("alg.block_elbo_plan,", "alg.elbo_count_plan,"), where="row.stabledrl-block")
@rejects("10.1", ('counts="bernoulli"', 'counts="rounded"'), where="row.gdpo-sequence")
@rejects("10.1", ('temperature="sampling"', 'temperature="one"'), where="row.reinforce")
@rejects("10.1", ('of="per_token"', 'of="log_likelihood"'), ("leave_one_out", "group_mean"), where="row.espo")
@rejects("10.1", ('reduction="position"', 'reduction="token"'), where="row.coupled-grpo")
@rejects("10.1", ('aggregation="entry_mean"', 'aggregation="token_mean"'), where="row.unigrpo-igpo")
@rejects("10.1", ('features=("logp", "position_logp")', 'features=("logp",)'), where="row.mask-aware")
@rejects("10.1", ("logp, feature[", "logp + feature["), where="reduced")
@rejects("10.1", ("eubo_beta=1.5", "eubo_beta=1.0"), where="row.stabledrl")
@rejects("10.1", ('topk_divergence, form="tv"', 'topk_divergence, form="kl"'), where="row.dppo-topk")
@for_each_method
def law_methods(alg: Any, name: str, row: Any) -> None:
    """The gradient of a method's loss is that of the published formula, written out as loops (tests/laws/formulas.py).

    On the rollout of `experience`, with masks for which the method's clip, if it has one, acts on both sides.
    """
    method = sized(row)
    drawn, _, new, _, reward = experience(name)
    rollout = alg.Rollout(**vars(drawn))
    assert name in FORMULAS, f"{name}: a method without a formula: write one under @formula({name!r}) in tests/laws/formulas.py"
    for seed in range(44, 54):
        plan = method.plan(rollout, seeded(seed))
        published = Formula(rollout, plan, reward)
        loss = FORMULAS[name](published)
        if clip_acts(method, published.ratios):
            break
    else:
        raise AssertionError(f"{name}: no ratio beyond both sides of the clip: narrow it by @formula({name!r}, reach={{..}})")
    truth = oracle.table_gradient(new, loss)
    assert float(truth.abs().max()) > 1e-3, f"{name}: the fixture has no gradient"
    behind = int((plan.scored & ~rollout.keep).sum())
    hint = f" ({behind} of the plan's scored tokens lie behind an EOS, where f.length does not count them)" if behind else ""
    close(
        judged_gradient(alg, method, plan, rollout, reward)[0], truth, f"{name}: gradient of the loss and of the formula{hint}"
    )


def clip_acts(method: Any, ratios: list[tuple[float, float]]) -> bool:
    """A good answer is above the clip and a bad one below; True for a row without such a clip."""
    if "epsilon_low" not in method.objective.keywords:
        return True
    low, high = (method.objective.keywords[f"epsilon_{side}"] for side in ("low", "high"))
    return any(a > 0 and r > 1 + high for r, a in ratios) and any(a < 0 and r < 1 - low for r, a in ratios)


@judges("10.1")
@rejects("10.1", ('"how": method.aggregation', '"how": "token_mean"'), where="method_loss")
@rejects("10.1", ("rollout.num_generations", "adv.shape[1]"), where="surrogate")
@for_each_method
def law_methods_treat_prompts_apart(alg: Any, name: str, row: Any) -> None:
    """The loss of two prompts is the mean of the losses of each, and the order of the responses to a prompt does not matter."""
    method = sized(row)
    drawn, _, _, _, reward = experience(name)
    rollout = alg.Rollout(**vars(drawn))
    plan = method.plan(rollout, seeded(45))

    def part(rows: Tensor, method=method, plan=plan, drawn=drawn, reward=reward) -> Tensor:
        fields = {key: value[rows] if torch.is_tensor(value) else value for key, value in vars(drawn).items()}
        fields["records"] = {key: value[rows] for key, value in drawn.records.items()}
        states = {key: value[:, rows] for key, value in vars(plan).items() if torch.is_tensor(value)}
        cut = dataclasses.replace(plan, **states)
        return judged_gradient(alg, method, cut, alg.Rollout(**fields), reward[rows], rows)[0]

    whole = judged_gradient(alg, method, plan, rollout, reward)[0]
    kept = [int(drawn.keep[:4].sum()), int(drawn.keep[4:].sum())]
    by_tokens = method.aggregation in ("token_mean", "length_weighted")
    if method.aggregation == "entry_mean":
        present = alg.entries(plan, method.reduction)[0]
        kept, by_tokens = [int(present[:, :4].sum()), int(present[:, 4:].sum())], True
    share = [n / sum(kept) for n in kept] if by_tokens else [0.5, 0.5]
    close(share[0] * part(torch.arange(4)) + share[1] * part(torch.arange(4, 8)), whole, f"{name}: prompts")
    close(part(torch.tensor([2, 0, 3, 1, 5, 4, 7, 6])), whole, f"{name}: order")


@judges("10.1")
@rejects("10.1", ("surrogate + beta * penalty", "surrogate - beta * penalty"))
def law_method_loss_adds_the_penalty(alg: Any) -> None:
    """With a KL term the loss is larger by beta times the aggregated penalty, for each form, and beta = 0 removes it."""
    drawn, old, new, ref, reward = experience()
    rollout = alg.Rollout(**vars(drawn))
    base = alg.METHODS["diffu-grpo-paper"]
    plan = base.plan(rollout, seeded(46))
    feature = {"logp": graph_logp(alg, new, rollout, plan)}
    anchor, target = (alg.features(model, rollout, plan, temperature=1.0)["logp"] for model in (old, ref))
    adv = base.credit(reward, 4)
    free = alg.method_loss(methods.with_options(base, {"kl.beta": 0.0}), plan, rollout, feature, adv, anchor, None)
    for form, beta in (("k1", 0.5), ("k2", 0.25), ("k3", 2.0)):
        method = methods.with_options(base, {"kl.form": form, "kl.beta": beta})
        got = alg.method_loss(method, plan, rollout, feature, adv, anchor, target) - free
        expected = 0.0
        for b in range(8):
            mine, theirs = (token_logps(model, rollout, plan, 0, b, 1.0) for model in (new, ref))
            for i in mine:
                u = (mine[i] - theirs[i]).item()
                expected += {"k1": u, "k2": u * u / 2, "k3": math.exp(-u) - 1 + u}[form] / int(rollout.keep[b].sum())
        close(got, beta * expected / 8, form)


@judges("10.1")
@rejects("10.1", ("dtype)[..., None]", "dtype)[..., None].square()"), where="penalty")
@rejects(
    "10.1",
    ('.of == "ratio"', '.of != "log_likelihood"'),
    ('method if method.kl.of == "ratio" else plain', "method"),
    where="kl_target",
)
def law_penalty_of_whole_likelihoods(alg: Any) -> None:
    """The penalty of whole log-likelihoods: divided by the normaliser before the square, after it (per_token), or never."""
    drawn, old, new, ref, reward = experience()
    rollout, base = alg.Rollout(**vars(drawn)), alg.METHODS["grpo"]
    plan = base.plan(rollout, seeded(46))
    logp, old_logp, ref_logp = (alg.features(model, rollout, plan, temperature=1.0)["logp"] for model in (new, old, ref))
    whole = ((logp - ref_logp) * plan.scored).sum(-1) * plan.weight
    adv = base.credit(reward, 4)
    for normalizer, divisor in (("kept_length", rollout.lengths), ("padded_length", 4), ("none", 1)):
        row = methods.with_options(base, {"normalizer": normalizer})
        anchor = alg.reduced(row, plan, rollout, {"logp": old_logp})
        free = alg.method_loss(row, plan, rollout, {"logp": logp}, adv, anchor, None)
        for of, once in (("ratio", divisor**2), ("per_token", divisor), ("log_likelihood", 1)):
            method = methods.with_options(row, {"kl.form": "k2", "kl.beta": 0.25, "kl.of": of})
            target = alg.kl_target(method, plan, rollout, {"logp": ref_logp})
            got = alg.method_loss(method, plan, rollout, {"logp": logp}, adv, anchor, target) - free
            close(got, 0.25 * (whole.sum(0).square() / 2 / once).mean(), f"{of}, {normalizer}")


@judges("10.1")
@rejects(
    "10.1",
    ("update / max(1, updates - 1)", "update / max(1, updates)"),
    ("schedule=schedule)", "schedule=generator)"),
    where="draw",
)
def law_draw(alg: Any) -> None:
    """A scheduled plan is told which share of the updates is done, 0 to 1, and given their common generator; others are not."""
    told, base, noise, schedule = [], alg.METHODS["grpo"], seeded(1), seeded(2)
    rollout = alg.Rollout(**vars(experience()[0]))

    def plan(*given: Any, **words: Any) -> str:
        told.append((given, words))
        return "the plan"

    for refresh in methods.CHOICES["refresh"]:
        row = dataclasses.replace(base, refresh=refresh, plan=functools.partial(plan, merge=2))
        for updates, shares in ((1, [0.0]), (2, [0.0, 1.0]), (4, [0.0, 1 / 3, 2 / 3, 1.0])):
            told.clear()
            for update in range(updates):
                made = alg.draw(row, rollout, noise, update=update, updates=updates, schedule=schedule)
                assert made == "the plan", f"{refresh}: what the plan returns is handed on"
            for (given, words), share in zip(told, shares, strict=True):
                assert given[0] is rollout and given[1] is noise and words.pop("merge") == 2, refresh
                if refresh != "scheduled":
                    assert not words, f"{refresh}: told {words}"
                    continue
                assert set(words) == {"progress", "schedule"} and words["schedule"] is schedule, "the common generator"
                close(words["progress"], share, f"update of {updates}")
    told.clear()
    alg.draw(dataclasses.replace(base, refresh="scheduled", plan=functools.partial(plan)), rollout, noise)
    assert told[0][1] == {"progress": 0.0, "schedule": None}, "one update, no schedule"


@judges("10.1")
@rejects("10.1", ("if value not in allowed:", "if False:"), where="Method.__post_init__")
@rejects("10.1", ('"right_to_left", "entropy"', '"entropy"'), where="CHOICES")
@rejects("10.1", ('order: str = "any"', 'order: str = "random"'), where="Method.order")
def law_order_of_a_row(alg: Any) -> None:
    """A method is about any order or about one of the sampler's, and another word is refused."""
    base = alg.METHODS["grpo"]
    assert base.order == "any" and set(alg.CHOICES["order"]) == {"any", *ORDERS}
    for order in ("any", *ORDERS):
        assert dataclasses.replace(base, order=order).order == order
    refuses(lambda: dataclasses.replace(base, order="sideways"), "order", "'sideways'", "left_to_right")


@judges("10.1")
@rejects("10.1", ("not plan.replay or", ""), where="behaviour_anchor")
@rejects("10.1", ("torch.full_like(rollout.lengths, rollout.keep.shape[1])", "rollout.lengths"), where="normalizer")
def law_normalizers(alg: Any) -> None:
    """none, kept_length and padded_length divide ll by 1, n and L. Behaviour anchors need replay and its temperature."""
    drawn, _, new, _, _ = experience()
    rollout = alg.Rollout(**vars(drawn))
    base = alg.METHODS["grpo"]
    plan = base.plan(rollout, seeded(46))
    logp = alg.features(new, rollout, plan, temperature=1.0)["logp"]
    logp = {"logp": logp}
    plain = alg.reduced(methods.with_options(base, {"normalizer": "none"}), plan, rollout, logp)
    close(plain, [[[float((logp["logp"][:, b].sum(-1) * plan.weight[:, b]).sum())] for b in range(8)]], "none")
    kept = alg.reduced(methods.with_options(base, {"normalizer": "kept_length"}), plan, rollout, logp)
    close(kept, [[[plain[0, b, 0] / int(rollout.keep[b].sum())] for b in range(8)]], "kept_length")
    close(
        alg.reduced(methods.with_options(base, {"normalizer": "padded_length"}), plan, rollout, logp),
        plain / 4,
        "padded_length",
    )
    refuses(lambda: methods.with_options(base, {"normalizer": "words"}), "normalizer", "'words'", "kept_length")
    refuses(lambda: alg.behaviour_anchor(base, plan, rollout), "anchor", "grpo", "replay")
    replay = alg.METHODS["replay-grpo"]
    refuses(lambda: alg.behaviour_anchor(replay, plan, rollout), "anchor", "replay-grpo")


@judges("10.1")
@rejects("10.1", ("adv.to(ll.dtype)[..., None]", "adv[..., None]"), where="surrogate")
@for_each_method
def law_single_precision_stays_single(alg: Any, name: str, row: Any) -> None:
    """A float32 rollout gives float32 weights and, from float32 features and float64 advantages, a float32 loss."""
    method, (drawn, _, new, _, reward) = sized(row), experience(name)
    single = {key: value.float() if value.is_floating_point() else value for key, value in drawn.records.items()}
    rollout = alg.Rollout(**{**vars(drawn), "logp": drawn.logp.float(), "records": single})
    plan = method.plan(rollout, seeded(44))
    feature = {key: value.float() for key, value in features_of(alg, method, new, rollout, plan).items()}
    anchor = alg.reduced(method, plan, rollout, feature)
    assert plan.weight.dtype == torch.float32, f"{name}: weight"
    adv = alg.advantages(method, plan, rollout, reward, torch.ones_like(plan.weight, dtype=torch.float64))
    loss = alg.method_loss(method, plan, rollout, feature, adv, anchor, anchor)
    assert loss.dtype == torch.float32, f"{name}: {loss.dtype}"
    some = alg.replay_plan(rollout, seeded(), num_states=1, min_entropy=0.0)
    assert some.weight.dtype == torch.float32, "replay of some steps"


def at_ratios(alg: Any, method: Any, values: list[float], adv: float) -> Tensor:
    """Which of these ratios the method's objective cuts, all with one advantage, each of a token that had probability 0.001."""
    rollout = rollout_of(alg, [[0]] * len(values), logp=torch.full((len(values), 1), math.log(1e-3)).double())
    likeliest = torch.full((len(values), 1, 1), math.log(0.9), dtype=torch.float64)  # another token, whose probability stays
    rollout.records.update(topk_ids=torch.ones_like(likeliest).long(), topk_logp=likeliest)
    scored, anchor = torch.ones(1, len(values), 1, dtype=torch.bool), rollout.logp[None]
    plan = alg.Plan(scored, scored, torch.ones(1, len(values)).double(), scored[..., 0])
    ll, scale = anchor + double(values).log()[None, :, None], torch.ones(len(values)).double()
    given = (ll, torch.full_like(ll, adv), {"logp": ll, "topk_logp": likeliest[None]}, plan, rollout, scale)
    more = method.extra(*given) if method.extra else {}
    return method.objective(ll, anchor, given[1], len(values), **more).cut.flatten()


@judges("10.1", "8.2", "8.4", "8.5", "8.6", "8.11", "8.14", "8.15")
@rejects("10.1", ("epsilon_high=0.5", "epsilon_high=0.2"), where="row.diffu-grpo")
@rejects("8.2", ("above, below = ratio > 1 + epsilon_high", "above, below = ratio > 1 + epsilon_low"))
@rejects("8.11", ("~inside | (u.exp() > cap)", "~inside"))
@rejects("8.14", ("* loss, cut, bypass)", "* loss, bypass, cut)"))
@rejects("10.1", ("epsilon_low=3e-4", "epsilon_low=4e-4"), where="row.mask-aware")
@for_each_method
def law_clips_of_the_rows(alg: Any, name: str, method: Any) -> None:
    """A method's clip is the published one, as its formula states it: a ratio beyond it is cut, one within it is not."""
    assert method.name == name
    if method.objective.func is alg.tangent:  # whose ratio has two forms: law_tangent
        return
    clip, weights = CLIPS.get(name, (None, None))
    low, high = clip or weights or (0.0, 10.0)  # a divergence has nothing to say of a rare token
    inside = [high * (1 - 1e-6), max(low * (1 + 1e-6), 1e-3)]
    outside = ([high * (1 + 1e-6)] if clip or weights else []) + ([low * (1 - 1e-6)] if low else [])
    told = f"{name}: @formula({name!r}, clip={clip}, weights={weights}) in tests/laws/formulas.py is not what the method does:"
    for sign in (1.0, -1.0):
        assert not at_ratios(alg, method, inside, sign).any(), f"{told} at adv {sign} it cuts one of the ratios {inside}"
        got = at_ratios(alg, method, outside, sign).tolist() if outside else []
        acts = [(sign > 0) == (r > 1) or weights is not None for r in outside]
        assert got == acts, f"{told} at adv {sign} it cuts {got} of the ratios {outside}"


@judges("10.1")
@rejects("10.1", ("objective.func.linear and self.", ""), ("and self.kl is None and extra", "and extra"), where="Method.linear")
@rejects("5.3", ("@declares()", "@declares(linear=True)"))
@rejects("", ("@declares(linear=True)", "@declares()"), where="response_length")
@rejects(
    "10.1",
    ("and not self.has_reference and extra", "and extra"),
    ("and not self.has_reference", "and self.has_reference"),
    where="Method.linear_on_policy",
)
@for_each_method
def law_rows_are_what_their_parts_declare(alg: Any, name: str, row: Any) -> None:
    """linear says that no gradient in a feature depends on the features; linear_on_policy, that none does where ll is its own
    anchor.

    Both follow from what the objective and the extra declare (@declares). An extra that depends on the features, and so is not
    declared linear, may be harmless on policy all the same, as a divergence is that is 0 there.
    """
    drawn, old, new, ref, reward = experience(name)
    rollout, variants = alg.Rollout(**vars(drawn)), [sized(row)]
    if name == "reinforce":
        variants.append(methods.with_options(row, {"kl.form": "k2", "kl.beta": 0.5}))
    for method in variants:
        plan = method.plan(rollout, seeded(44))
        adv = alg.advantages(method, plan, rollout, reward, normal(plan.valid.shape[0], 8, seed=48).abs())
        slopes, told = {True: [], False: []}, []
        for model in (old, new):
            feature = features_of(alg, method, model, rollout, plan)
            theirs = features_of(alg, method, ref, rollout, plan)
            mine, other = (alg.reduced(method, plan, rollout, x) for x in (feature, theirs))
            if method.extra:
                given = (mine, adv[..., None].expand_as(mine), feature, plan, rollout, alg.normalizer(method, rollout))
                told.append(torch.cat([double(value).flatten() for value in method.extra(*given).values()]))
            for own in (True, False):
                anchor, leaf = mine if own else other, {key: value.clone().requires_grad_() for key, value in feature.items()}
                target = other if method.kl and method.kl.target == "reference" else None
                loss = alg.method_loss(method, plan, rollout, leaf, adv, anchor, target)
                grads = torch.autograd.grad(loss, list(leaf.values()), allow_unused=True)
                slopes[own].append(torch.cat([g.flatten() for g in grads if g is not None]))
        same = {own: bool((a - b).abs().max() <= 1e-12) for own, (a, b) in slopes.items()}
        mend = f"{name}: mend @declares of {method.objective.func.__name__}, or of the extra: the loss is"
        assert method.linear == (same[False] and same[True]), f"{mend} {'not ' * method.linear}linear in the features"
        harmless = bool(told) and not method.extra.func.linear and not torch.equal(*told) and same[True]
        on_policy = method.linear_on_policy
        assert on_policy == same[True] or harmless, f"{mend} {'not ' * on_policy}linear in them on policy"


@judges("10.1")
@rejects(
    "10.1",
    ("(self.step_value, *self.features, self.plan.func.__name__)", "self.features"),
    ("*self.features, self.plan.func.__name__", ""),
    where="Method.needs",
)
@rejects("10.1", ('"sampled": ("one_step_sampled",)', '"sampled": ("one_step",)'), where="RECORDS")
def law_needs_of_the_rows(alg: Any) -> None:
    """What a method asks the sampler to record: completions for values of states, likeliest tokens for their divergence."""
    asked = dict.fromkeys(("egspo-sa-accounts", "egspo-sa"), ("one_step",)) | {"dppo-topk": ("topk",)}
    asked |= {"mdpo": ("one_step_proposed",), "stabledrl-cv": ("seen_logp",)}
    for name, method in alg.METHODS.items():
        assert method.needs == asked.get(name, ()), f"{name} needs {method.needs}: write it into `asked` of tests/laws/table.py"
    drawn = methods.with_options(alg.METHODS["egspo-sa-accounts"], {"step_value": "sampled"})
    assert drawn.needs == ("one_step_sampled",), drawn.needs


@judges()
@rejects(
    "",
    ("alg.entries(plan, method.reduction)[0].expand_as(ll", "torch.ones_like(ll, dtype=torch.bool"),
    where="ratio_diagnostics",
)
def law_diagnostics(alg: Any) -> None:
    """Mean, spread, shares and effective sample size are as by plain arithmetic over the entries that exist."""
    rollout, plan, _ = loose_plan(alg)
    anchor, adv = normal(3, 4, 5, seed=51), double([1.0, -1.0, 0.0, -2.0])
    ll = anchor + normal(3, 4, 5, seed=52)
    for name in ("diffu-grpo-paper", "stabledrl-elbo"):
        method = methods.with_options(alg.METHODS[name], {"reduction": "token", "normalizer": "none"})
        key, low, high = ("objective.epsilon_high", 0.5, 1.4) if name == "diffu-grpo-paper" else ("objective.cap", 0.0, 1.7)
        method = methods.with_options(method, {key: high - (name == "diffu-grpo-paper")})
        seen = [(float((ll - anchor)[k, b, i]), float(adv[b])) for k, b, i in plan.scored.nonzero().tolist()]
        r, n = [math.exp(u) for u, _ in seen], len(seen)
        sides = [(a > 0 and x > high) or (a < 0 and x < low) for x, (_, a) in zip(r, seen, strict=True)]
        mean, mean_log = sum(r) / n, sum(u for u, _ in seen) / n
        expected = {
            "ratio_mean": mean,
            "ratio_max": max(r),
            "ratio_std": math.sqrt(sum((x - mean) ** 2 for x in r) / n),
            "log_ratio_std": math.sqrt(sum((u - mean_log) ** 2 for u, _ in seen) / n),
            "clip_fraction": sum(sides) / n if name == "diffu-grpo-paper" else sum(x > high for x in r) / n,
            "bypass_fraction": sum(a < 0 and x > high for x, (_, a) in zip(r, seen, strict=True))
            / n
            * (name == "diffu-grpo-paper"),
            "effective_sample_size": sum(r) ** 2 / (n * sum(x * x for x in r)),
        }
        got = alg.ratio_diagnostics(method, plan, rollout, {"logp": ll}, anchor, adv)
        assert any(a < 0 and x < 0.5 for x, (_, a) in zip(r, seen, strict=True)), "no ratio below the clip"
        assert any(a == 0 and x > high for x, (_, a) in zip(r, seen, strict=True)), "no ratio above it with adv = 0"
        assert set(got) == set(expected) and 0 < expected["clip_fraction"] < 1
        assert (0 < expected["bypass_fraction"] < 1) == (name == "diffu-grpo-paper")
        for key, value in expected.items():
            close(got[key], value, f"{name}: {key}")
        calm = alg.ratio_diagnostics(method, plan, rollout, {"logp": ll}, ll, adv)
        close([calm["ratio_mean"], calm["effective_sample_size"], calm["clip_fraction"]], [1.0, 1.0, 0.0], "on policy")
        nothing = alg.Plan(plan.hidden, torch.zeros_like(plan.scored), plan.weight, plan.valid)
        assert alg.ratio_diagnostics(method, nothing, rollout, {"logp": ll}, anchor, adv) == {}, "no entries"


@judges("10.1", "4.4")
@rejects("10.1", ('("sequence",)', "alg.LEVELS"), where="Method.__post_init__")
def law_mask_aware_options(alg: Any) -> None:
    """Its two ratios are those of a sequence, and no other word is allowed. An exact KL is added once, to the tokens."""
    row = alg.METHODS["mask-aware"]
    for word in ("token", "step", "pair"):
        refuses(lambda word=word: methods.dataclasses.replace(row, reduction=word), "reduction", repr(word), "sequence")
    drawn, old, new, _, reward = experience("mask-aware")
    rollout, method = alg.Rollout(**vars(drawn)), methods.with_options(row, {"kl.form": "exact", "kl.beta": 0.5})
    plan = row.plan(rollout, seeded())
    feature = alg.features(new, rollout, plan, temperature=1.0, names=method.features, reference=old)
    anchor = alg.reduced(row, plan, rollout, features_of(alg, row, old, rollout, plan))
    adv = alg.advantages(row, plan, rollout, reward)
    loss = [alg.method_loss(m, plan, rollout, feature, adv, anchor, None) for m in (method, row)]
    close(loss[0] - loss[1], 0.5 * (feature["kl_ref"].sum((0, 2)) / rollout.lengths).mean(), "exact KL")


@judges()
@rejects("8.2", ("cut, (adv < 0) & above", "cut, (adv <= 0) & above"))
def law_bypass_rate_of_noise(alg: Any) -> None:
    """The share of bad answers beyond the clip is erfc(log(1 + epsilon) / 2 s) / 2; good answers bypass nothing.

    The noise of a ratio is given as its quantiles, so that shares are exact up to one over their number.
    """
    count = 20000
    normal_quantile = statistics.NormalDist().inv_cdf
    noise_of_ratio = double([normal_quantile((i + 0.5) / count) for i in range(count)])
    rollout = rollout_of(alg, [[1]] * count)
    one = torch.ones(1, count, 1, dtype=torch.bool)
    plan = alg.Plan(torch.zeros(1, count, 4).bool(), one, torch.ones(1, count, dtype=torch.float64), one[..., 0])
    anchor = torch.full((1, count, 1), -3.0, dtype=torch.float64)
    known = {(0.3, 0.2): 0.3337, (0.1, 0.2): 0.0987, (1.0, 0.2): 0.4487, (1.0, 4.0): 0.1275}
    for (s, epsilon), share in known.items():
        clip = functools.partial(alg.ppo_clip, epsilon_low=0.2, epsilon_high=epsilon)
        method = replace(alg.METHODS["grpo"], objective=clip)
        truth = math.erfc(math.log1p(epsilon) / (2 * s)) / 2
        close(truth, share, "the constant", 1e-4)
        ll = anchor + math.sqrt(2) * s * noise_of_ratio[None, :, None]
        for adv, expected in ((-1.0, truth), (1.0, 0.0), (0.0, 0.0)):
            signs = torch.full((count,), adv, dtype=torch.float64)
            seen = alg.ratio_diagnostics(method, plan, rollout, {"logp": ll}, anchor, signs)
            close(seen["bypass_fraction"], expected, f"deviation {s}, epsilon {epsilon}, adv {adv}", 1e-4)
        close(seen["log_ratio_std"], math.sqrt(2) * s, "spread", 1e-3)


def released(alg: Any, **parts: Any) -> Any:
    """egspo with two states a trajectory and some parts replaced."""
    return dataclasses.replace(methods.with_options(alg.METHODS["egspo"], {"plan.num_states": 2}), **parts)


@judges("10.1")
@rejects("10.1", ("reduced(method,", 'reduced(dataclasses.replace(method, normalizer="none"),'), where="penalty")
def law_exact_kl_in_the_loss(alg: Any) -> None:
    """The exact KL adds beta times kl_ref summed over the step, divided as ll is. The target old is the anchor."""
    drawn, old, new, ref, reward = experience()
    rollout = alg.Rollout(**vars(drawn))
    for normalizer in ("none", "kept_length"):
        exact = released(alg, kl=alg.KL("exact", 0.3), features=("logp", "kl_ref"), normalizer=normalizer)
        plan = exact.plan(rollout, seeded())
        feature = features_of(alg, exact, new, rollout, plan, graph=True, reference=ref)
        anchor = alg.reduced(exact, plan, rollout, alg.features(old, rollout, plan, temperature=1.0))
        adv = alg.advantages(exact, plan, rollout, reward)
        other = alg.reduced(exact, plan, rollout, alg.features(ref, rollout, plan, temperature=1.0))
        loss = lambda method: alg.method_loss(method, plan, rollout, feature, adv, anchor, other)  # noqa: E731, B023
        free, expected = loss(dataclasses.replace(exact, kl=None)), 0.0
        for k, b in itertools.product(range(2), range(8)):
            truth = kl_by_hand(new, ref, rollout, plan, k, b, 1.0)
            if truth:
                tokens = int(rollout.lengths[b]) if normalizer == "kept_length" else 1
                expected = expected + 0.3 * sum(truth.values()) / tokens / (2 * len(truth)) / 8
        penalty = loss(exact) - free
        close(penalty, expected, f"exact KL, {normalizer}")
        close(oracle.table_gradient(new, penalty), oracle.table_gradient(new, expected), "gradient")
        ll, by_old = alg.reduced(exact, plan, rollout, feature), 0.0
        for k, b in plan.valid.nonzero().tolist():
            gap = (ll[k, b, 0] - anchor[k, b, 0]).item()
            by_old += 0.3 * (math.exp(-gap) - 1 + gap) * float(plan.weight[k, b]) / 8
        close(loss(dataclasses.replace(exact, kl=alg.KL("k3", 0.3, target="old"))) - free, by_old, "target old")
