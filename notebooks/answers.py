"""The answers to the exercises at the end of the notebooks, for `nbtools.exercises`. Solve first, then read.

Each value is a short expression with its derivation, and needs nothing but arithmetic: `tests/test_answers.py` computes the
same numbers from the module, from the exact judge or by enumeration. Beside the right value stand wrong ones that people
arrive at, each with the hint that helps there, and a hint for all others. Numbers in brackets are tags of equations.
"""

from dataclasses import dataclass
from math import exp, log, prod, sqrt

ANSWERS: dict[str, dict[str, "Answer"]] = {}  # {"01": {"2, fraction": Answer(..)}}


@dataclass(frozen=True)
class Answer:
    """A right value, the hint for wrong ones, and wrong ones with hints of their own: (value, hint).

    within: how far a given number may be from a value here and still count as it. Three digits are always enough, and mostly
            two decimals.
    """

    right: float
    hint: str
    wrong: tuple[tuple[float, str], ...]
    within: float

    def said(self, number: float) -> str:
        """What a reader is told about a number; never how far off it is, nor on which side."""
        if abs(number - self.right) <= self.within:
            return "right"
        near = (hint for value, hint in self.wrong if abs(number - value) <= self.within)
        return f"not yet. {next(near, self.hint)}"


def answer(notebook: str, exercise: str, right: float, hint: str, *wrong: tuple[float, str], within: float = 0.006) -> None:
    """Register the answer to an exercise."""
    ANSWERS.setdefault(notebook, {})[exercise] = Answer(right, hint, wrong, within)


def mean(values) -> float:
    """Of a list or a range."""
    values = list(values)
    return sum(values) / len(values)


def variance(values) -> float:
    """Mean squared distance from the mean."""
    values = list(values)
    return mean(x * x for x in values) - mean(values) ** 2


# ---------------------------------------------------------------------------------------------- 00a: a model

# `hide` draws l uniformly from 1..L, L = 8.
answer(
    "00a", "1", mean(range(1, 9)),
    "`hide` draws the number of hidden tokens uniformly: which is the smallest that it can draw, which the largest?",
    (mean(range(9)), "That is the mean over 0..8: `hide` adds 1, so that it never hides nothing."),
    (mean(range(8)), "That is the mean over 0..7: look at the + 1 in `hide`."),
)
# S(M) = -l, and of L coins with bias t, E[l | t] = L t; the mean over t is L/2.
answer(
    "00a", "2", -8 * mean((0, 1)),
    "Each hidden token adds -1 to S(M): how many does a coin of bias t hide, and what is the mean over t?",
    (-8.0, "That is the ELBO, which the weight 1/t would give: here it was forgotten."),
    (8 * mean((0, 1)), "The size is right; S(M) sums log-probabilities: which sign have they?"),
    (-mean(range(1, 9)), "That is minus the mean of 1..8, what `hide` draws; coins can also leave everything visible."),
)
# Drawn independently, each one of the four texts has 1/2 * 1/2; two of them are 00 or 11.
answer(
    "00a", "3", 2 * 0.5 * 0.5,
    "Write down what one call knows of each position by itself, and draw both from that.",
    (1.0, "So it would be if the second token were drawn after the first had become visible; here both are drawn in one call."),
    (0.5 * 0.5, "That is the probability of one of the two texts; either of them counts."),
)

# ---------------------------------------------------------------------------------- 00b: its policy gradient

R = (1.0, 0.1, 0.1, 0.0)
spread = sqrt(variance(R))
# minus_mean: R_b minus the mean of all four.
answer(
    "00b", "1", R[0] - mean(R),
    "What does `minus_mean` subtract, and does it divide by anything?",
    (R[0] - mean(R[1:]), "That subtracts the mean of the other three (leave-one-out); `minus_mean` takes the mean of all four."),
    ((R[0] - mean(R)) / spread, "That is divided by the standard deviation; `minus_mean` only subtracts."),
    ((R[0] - mean(R)) / spread * sqrt(3 / 4), "That is divided by the standard deviation; `minus_mean` only subtracts."),
    (R[0], "That is the reward; the advantage is what it has more than its group."),
)
# -min(r A, clip(r) A) with A = -2, r = 1.5: r A = -3 is below clip(r) A = -2.4, so the loss is -r A, its derivative -A.
answer(
    "00b", "2", 2.0,
    "Compute both arguments of the minimum, keep the smaller one, put the minus before it, and differentiate.",
    (0.0, "So it would be for a positive advantage. Of two negative numbers, which one does the minimum take?"),
    (-2.0, "The branch is right; the loss has a minus before the minimum."),
    (1.5 * 2, "That is the value of the loss; its derivative is asked."),
    (1.5 * -2, "That is r A; the loss has a minus before it, and its derivative by r is asked."),
    (1.2 * 2, "That is the value of the clipped branch: a minimum takes the other one here, and its derivative is asked."),
)
# d/d logp of ratio * A is ratio * A, that of logp * A is A: the factor is 1 / ratio = 0.5 / 0.05.
answer(
    "00b", "3", 0.5 / 0.05,
    "Differentiate A logp and A ratio by logp: the second has a factor that the first has not.",
    (0.05 / 0.5, "That is the ratio itself: which of the two gradients has it as a factor?"),
    (1 / 0.05, "That is the slope of log p; both gradients have it. They differ by the ratio."),
    (log(0.5 / 0.05), "That is the size of the log-ratio; the gradient has the ratio as a factor, not its logarithm."),
    (1.0, "They agree where the ratio is 1; here it is not."),
)

# ------------------------------------------------------------------------------------- 01: masked diffusion

# All hidden, each token is a coin: 3 ln 1/2. The text has probability 1/2.
answer(
    "01", "1", 3 * log(1 / 2) - log(1 / 2),
    "The one-step value hides everything: what does the model say of each token then? Subtract ln P(000).",
    (3 * log(1 / 2), "That is the mean-field value alone; its difference from ln P(000) is asked."),
    (log(1 / 2), "That is ln P(000) alone: with all three hidden, how much does the model give to each token?"),
    (log(1 / 2) - 3 * log(1 / 2), "The two numbers are right; their difference is asked in the other order."),
    (-2.0, "That is in bits; all numbers here are in nats."),
    (0.0, "So it is for the ELBO of a consistent model; the one-step value looks at one state only, in which nothing is visible."),
)
# g(0) = L a(1) (1.13), and the last hidden token of an even text is determined by the others: a(1) = ln 1.
answer(
    "01", "2, g(0)", 3 * log(1),
    "g(0) = L a(1) (1.13): one token is hidden, the other two are visible. What does the model know then?",
    (3 * log(1 / 2), "That is g(1), with everything hidden. Near t = 0 at most one token is."),
    (2 * log(1 / 2), "That is the ELBO, ln P(000), the area under g. Its value at the left end is asked."),
    (log(1 / 2), "That is what a token costs with another one hidden. How sure is the model when it sees the other two?"),
)
# a = (0, -ln 2, -ln 2) for l = 1, 2, 3: with two or three hidden each token alone is a coin. the ELBO is their sum (1.9).
answer(
    "01", "2, fraction", log(2) / (0 + log(2) + log(2)),
    "The ELBO is a(1) + a(2) + a(3) (1.9): find the three, then divide.",
    (1 / 3, "So it would be if all three a(l) were equal. Is the last hidden token still uncertain?"),
    (2 / 5, "That counts each a(l) l times; a(l) is a mean over the hidden tokens already, and (1.9) adds each once."),
    (2 / 3, "That counts a(2) twice; by (1.9) each a(l) counts once."),
    (-log(2), "That is a(2) itself; which part of the ELBO is it?"),
)
# floor(4t) = k on [k/4, (k+1)/4): -sum_k k times the integral of 1/t there, which is ln((k+1)/k).
answer(
    "01", "3", -sum(k * log((k + 1) / k) for k in (1, 2, 3)),
    "On each quarter of [0, 1] the number of hidden tokens is constant: integrate 1/t over that quarter, and add up.",
    (-4.0, "That is the ELBO, which t and the mask would give if each token had its own coin of bias t."),
    (-3.0, "That weighs with L/l instead of 1/t: with k hidden tokens t may be anywhere in its quarter."),
    (-mean(range(4)), "That is the mean without a weight."),
    (sum(k * log((k + 1) / k) for k in (1, 2, 3)), "The size is right; the tokens have log-probability -1."),
)

# ------------------------------------------------------------------------------------------ 02: estimators

# Z = L/l S(M) = L/l (-l) = -6 for every l.
answer(
    "02", "1, count", variance(6 / l * -l for l in range(1, 7)),
    "Write one call out: the weight L/l times S(M), which is -l here. Which values can it take?",
    (variance(range(1, 7)), "That is the variance of S(M) = -l; the call is weighted by L/l."),
    (-6.0, "That is the mean, the ELBO."),
    (6.0, "That is the size of the mean; the variance is asked."),
)
# l uniform on 0..6, both masks have the weight (L+1)/l: (7 [l > 0] + 7 [l < 6]) / -2, so -7, or -3.5 at both ends.
pair = [-(7 * (l > 0) + 7 * (l < 6)) / 2 for l in range(7)]
single = [-7 * (l > 0) for l in range(7)]
answer(
    "02", "1, pair", variance(pair),
    "l is uniform on 0..6, and each mask of the pair has the weight (L+1)/l: what is the mean of both, for each l?",
    (0.0, "So it is where both masks score something. What happens at l = 0 and at l = L?"),
    (variance(single), "That is the variance of one mask of the pair; the two are averaged, and they are not independent."),
    (variance(single) / 2, "That takes the two masks as independent; where one is empty, the other is full."),
    (sqrt(variance(pair)), "That is the standard deviation; the variance is asked."),
)
# Both divide by 4 calls. Independent ones have the variance of -l/100 over all l, strata the mean one within a quarter.
whole, quarter = variance(range(1, 101)), variance(range(1, 26))
answer(
    "02", "2", sqrt(whole / quarter),
    "Compare the spread of a(l) over all counts with its spread within a quarter of them.",
    (4.0**2, "That is the factor of the variance; the standard deviation is asked."),
    (2.0, "That is what 4 independent calls make of one, by sqrt(k). With no noise between masks strata do more."),
    (8.0, "That compares with a single call; 4 strata are compared with 4 independent calls."),
    (sqrt(quarter / whole), "That is the other way round."),
    within=0.02,
)
# Without V_count what is left is V_mask / k, which strata do not touch: half the deviation is a quarter of the variance.
answer(
    "02", "3", 4 * 2.0**2,
    "With V_count = 0 strata save nothing (20.3), and V_mask / k is left: by which factor must k grow to halve its square root?",
    (4 * 2.0, "So it is where the deviation falls like 1/k: strata do that to the part of the counts, which is 0 here."),
    (4 * sqrt(2), "That makes the deviation smaller by the fourth root of 2; its square falls like 1/k."),
    (2.0**2, "That is the factor; how many calls is it?"),
    (12.0, "That is how many calls come on top of the four; all of them are asked."),
    (4 * 2.0**4, "That takes the factor of the calls for a deviation: it gives a quarter of the deviation, and half is asked."),
)

# ------------------------------------------------------------------------------------ 03: policy gradients

N = 8
# R_b - mean of all = (N-1)/N (R_b - mean of the others), for every answer.
answer(
    "03", "1", (N - 1) / N,
    "The mean of all N is R_b / N and the rest of the sum, over N: put that into R_b less the mean, and compare with R_b less the others' mean.",
    (N / (N - 1), "That is the other way round: which of the two subtracts a part of the answer's own reward?"),
    (1 / N, "That is the part which is lost."),
    (N - 1.0, "That is what a sum over the others is of their mean; here both baselines are means."),
    (sqrt((N - 1) / N), "That is a ratio of standard deviations, with N and N - 1; neither rule divides by one."),
    (1.0, "Their directions agree; their lengths do not."),
)
# gamma / A is the ratio, or 0 where (8.2) cuts. Ratios 8 and 1/8; cut beyond 1 + 5 for A > 0, below 1 - 5 for A < 0.
answer(
    "03", "2, good", (0 + 1 / 8) / 2,
    "gamma/A is the ratio where the clip does not cut, else 0: is 8 cut for a good answer now, is 1/8?",
    ((8 + 1 / 8) / 2, "That cuts neither ratio: this clip begins at 1 + 5, and 8 lies beyond it."),
    (8 / 2, "That cuts the ratio 1/8; a good answer is cut on the side of the large ratios only."),
    (0.0, "That cuts both ratios; a good answer is cut on one side only."),
    (1.0, "Noise with mean 0 in the logarithm has no mean of 1 in the ratio."),
    (0 + 1 / 8, "That is the sum, or the mean for noise of log 4; here it is log 8, and each sign has probability 1/2."),
)
answer(
    "03", "2, bad", (8 + 1 / 8) / 2,
    "gamma/A is the ratio where the clip does not cut, else 0: can a ratio lie below the lower end of this clip?",
    ((8 + 0) / 2, "That cuts the ratio 1/8: where does this clip end, at its lower side?"),
    ((0 + 1 / 8) / 2, "That cuts the ratio 8; on that side a bad answer is never cut."),
    ((4 + 1 / 4) / 2, "That is the value for noise of log 4; here it is log 8."),
    (-(8 + 1 / 8) / 2, "The size is right; gamma is divided by A, sign included."),
    (8 + 1 / 8, "That is the sum; each sign of the noise has probability 1/2."),
)
# E exp(X - X') = E exp(X) E exp(-X) (20.10) with X = 0 or ln 3.
answer(
    "03", "3", mean((1, 3)) * mean((1, 1 / 3)),
    "By (20.10) of lesson 2 the mean of the ratio is a product of two means; or list the four pairs of values.",
    (1.0, "That is right for the mean of the log-ratio; the exponential comes before the mean."),
    (mean((1, 3)), "That is the noise of one side only; the old estimate has noise of its own, in the denominator."),
    (mean((3, 1 / 3)), "The two pairs with equal values count, too: their ratio is 1."),
    (exp((log(3) / 2) ** 2), "That is the formula for Gaussian noise; two values can be enumerated."),
)

# ------------------------------------------------------------------------------------------- 04: diffu-GRPO

# A perfect model gives 1/10 to each of 16 tokens when all are hidden; the text has probability 1/10.
answer(
    "04", "1", 16 * log(10) - log(10),
    "What does the mean field give to each of the 16 tokens, and what is the probability of the text?",
    (16 * log(10), "That is the mean field itself; the log-likelihood of the text is not 0."),
    (log(10), "That is the log-likelihood of the text, up to its sign; compare it with the mean field."),
    (15.0, "That counts in digits; in nats a digit is ln 10."),
    (log(10) - 16 * log(10), "The size is right; it is asked by how much the mean field falls short."),
    within=0.05,
)
# The paper: 1/n_b for a token of answer b, n = 10 and 30. Released: every token 1/(n_1 + n_2).
answer(
    "04", "2, paper", (1 / 10) / (1 / 30),
    "In the paper's mean (9.1) a token of an answer with n tokens has the factor 1/(N n).",
    ((1 / 30) / (1 / 10), "That is the weight of a token of the long one over that of the short one."),
    (1.0, "So it is in the released mean; the paper's divides by the length of each answer first."),
)
answer(
    "04", "2, released", (1 / 40) / (1 / 40),
    "The released mean (9.1) divides one sum by the number of all tokens: is there any factor of the answer's own left?",
    ((1 / 10) / (1 / 30), "So it is in the paper's mean; the released one divides by the number of all tokens."),
    ((1 / 30) / (1 / 10), "That is a ratio of whole answers; how much does one token weigh?"),
)
# Each of the 6 ratios may reach 1 + epsilon; the answer's is their product (40.7).
answer(
    "04", "3", (1 + 1 / 2) ** 6,
    "How far may each token's ratio rise, and what is the ratio of the whole answer made of?",
    (1 + 1 / 2, "That is the limit of one token; the answer's ratio is a product over six."),
    (6 * (1 + 1 / 2), "Ratios multiply; logarithms would add."),
    (1 + 6 / 2, "Ratios multiply; adding the shifts is right for small ones only."),
    (2.0**6, "That lets each token double: where does the clip with epsilon 1/2 begin?"),
    ((1 / 2) ** 6, "That is the product of the lower ends; with A > 0 the clip acts above."),
    within=0.05,
)

# ------------------------------------------------------------------------------------------------- 05: GDPO

# Q nodes are exact up to degree 2Q - 1 (2.5), g has degree L - 1 = 11 (50.3): Q >= L/2.
answer(
    "05", "1", 12 / 2,
    "g is a polynomial: of which degree for 12 tokens, and up to which degree are Q nodes exact?",
    (12.0, "That is one node a token. Q nodes and Q weights are 2Q numbers to choose: up to which degree is that enough?"),
    (7.0, "That would be for degree 12: g is divided by t, which takes one off."),
    (11.0, "That is the degree of g. Up to which degree are Q nodes exact?"),
    (11 / 2, "The number of nodes is whole, and Q nodes reach degree 2Q - 1."),
)
# g(t) = t at t = 0.1 in place of 0, then 1/2 and 1, with Simpson's weights.
answer(
    "05", "2", 1 / 6 * 0.1 + 4 / 6 * 0.5 + 1 / 6 * 1,
    "The weights stay Simpson's, one of the nodes has moved: put the three values of g(t) = t in.",
    (1 / 2, "That is the integral, which the rule returns with its first node at 0: where is g read now?"),
    (mean((0.1, 0.5, 1)), "That weighs the three nodes alike; the middle one has 4/6."),
    (1 / 6 * 0.1, "That is the error; what does the rule return?"),
    (1 / 6 * 0.1 + 4 / 6 * 0.5, "That leaves out the node at t = 1: it stays, with g = 1 and the weight 1/6."),
    (4 / 6 * 0.5 + 1 / 6 * 1 + 0.1, "The moved node has a weight, too."),
)
# (50.1) with 98 % and 2 %: 0.98/3 + 0.02/12 with 3 times, 1/12 with 12 times.
answer(
    "05", "3", (0.98 / 3 + 0.02 / 12) / (1 / 12),
    "Put V_time = 0.98 and V_Bern = 0.02 into (50.1), once with Q = 3, m = 4, once with Q = 12, m = 1.",
    (4.0, "That treats all of the variance as that of the time; masks are drawn 12 times in both."),
    (0.98 * 4, "That leaves out the masks' 2 %."),
    (0.98 + 0.02 * 4, "There time and masks have changed places: which of the two do 4 masks at one time not average?"),
    ((1 / 12) / (0.98 / 3 + 0.02 / 12), "That is the other way round."),
    (sqrt(0.98 * 4 + 0.02), "That is the factor of the standard deviation; the variance is asked."),
)

# -------------------------------------------------------------------------------------------- 06: StableDRL

s = 0.5
# (60.2): the log-ratio is Gaussian with mean 0 and variance 2 s^2, so E = exp(s^2).
answer(
    "06", "1", exp(s**2),
    "The difference of two independent errors has which variance, and what is the mean of exp of a Gaussian? See (60.2).",
    (exp(s**2 / 2), "That has the noise of one side; the ratio has two estimates."),
    (exp(2 * s**2), "That is exp(2 s^2), or exp(s): the mean of exp of a Gaussian has half of its variance in the exponent."),
    (1.0, "The mean of the log-ratio is 0; that of its exponential is not 1."),
)
ratios = (1 / 2, 1, 3, 12)
capped = [min(x, 6) for x in ratios]
# (8.3): cap each ratio, then divide by the group's sum.
answer(
    "06", "2, cap 6", max(capped) / sum(capped),
    "Cap first, then divide by the sum (8.3): of which four numbers?",
    (max(ratios) / sum(ratios), "That is the weight without a cap."),
    (max(capped) / sum(ratios), "The sum is that of the capped ratios."),
    (max(capped), "That is the capped ratio; divide it by the sum of the group."),
    (4 * max(capped) / sum(capped), "That is N times the weight; the weights of a group sum to 1."),
    (max(capped) / (sum(capped) - max(capped)), "The sum contains the answer itself."),
    (6 / 12, "That is the cap over the ratio that it cut; divide by the sum of the capped group."),
    (max(capped) / (1 + 3 + 6), "That sum leaves out the smallest ratio."),
    (max(ratios) / sum(capped), "The weights of a group sum to 1, so that none is above 1: cap the numerator, too."),
)
answer(
    "06", "2, no cap", max(ratios) / sum(ratios),
    "The weights of a group sum to 1: the largest ratio over the sum of all four, as they are (8.3).",
    (max(capped) / sum(capped), "That is the weight with the cap 6."),
    (max(ratios), "That is the ratio; divide it by the sum of the group."),
    (4 * max(ratios) / sum(ratios), "That is N times the weight; the weights of a group sum to 1."),
    (max(ratios) / (sum(ratios) - max(ratios)), "The sum contains the answer itself."),
    (12 / (1 + 3 + 12), "That sum leaves out the smallest ratio."),
    (max(ratios) / sum(capped), "The weights of a group sum to 1, so that none is above 1: this sum still has the cap."),
)
# 4 f C / (f + C)^2 = 1/2: f^2 - 6 C f + C^2 = 0, and a floor lies below the cap. It is 1.03: above 1, so that it would lift even
# an answer that has not changed.
answer(
    "06", "3", 6 * (3 - sqrt(8)),
    "Set the factor of N in the bound to 1/2, and solve for f.",
    (6 * (3 + sqrt(8)), "That solves the equation; a floor lies below the cap, so take the other root."),
    (35.0, "That is, rounded, a root of the equation; a floor lies below the cap, so take the other root."),
    (1 / 2, "That is the share that the bound is to guarantee; with this floor it guarantees 0.28 of the group."),
    (3 - sqrt(8), "That is the floor as a share of the cap."),
    (6 * (7 - sqrt(48)), "That guarantees a quarter of the group: look at the 4 in the bound."),
    (6 / 2, "Half the cap guarantees more than half the group: the bound is not linear in f."),
    (1.0, "With the floor 1 the factor of N in the bound is 24/49, not 1/2: solve the quadratic equation."),
)
# Before, both coefficients are 1. After, the good answer is beyond the clip, 0, and the bad one has its whole ratio, 2.
answer(
    "06", "4", 2 / sqrt(1**2 + 1**2),
    "Which coefficient has each answer before, which after? With a right angle the squares of their lengths add up.",
    (2.0, "So it would be without a clip, (60.6). What does the clip do to the good answer?"),
    (1.0, "So it would be with StableDRL's weights, which do not see a common factor; GRPO divides by nothing that follows it."),
    (sqrt((1.2**2 + 2**2) / 2), "The good answer's clipped ratio is a constant: which gradient has a constant?"),
    (1.2, "The ratios are cut at 1.2 for the good answer only, and a ratio that is cut has no gradient."),
    (1 / sqrt(2), "The good answer is dropped, yes; with which ratio does the bad one pass?"),
    (0.0, "The minimum takes the smaller of two values: of a bad answer, is that the clipped one?"),
)

# ------------------------------------------------------------------------------------ 07: staircase attention

P, L, W, blocks = 100, 400, 40, 10
slow = sum(P + m * W for m in range(1, blocks + 1))  # a forward a block: prompt, clean past, noisy block
answer(
    "07", "1", slow / (P + 2 * L),
    "Forward m of the slow path holds the prompt, the clean blocks before m and block m: add up, and divide by |x| + 2L.",
    (blocks * (P + L) / (P + 2 * L), "That sends the whole response each time; block m needs the blocks up to m."),
    ((slow - L) / (P + 2 * L), "There the noisy block itself is missing from each forward."),
    (slow / (P + L), "The staircase holds the response twice, clean and noisy."),
    (float(slow), "That is how many tokens the slow path sends; how many for one of the staircase?"),
    ((P + 2 * L) / slow, "That is the other way round."),
)
# Seen pairs (70.9): a clean or noisy row of block m sees the prompt and, together, m + m blocks; a prompt row the prompt.
seen = P * P + 2 * L * P + sum(W * W * (m + m) for m in range(1, blocks + 1))
every = (P + 2 * L) ** 2
answer(
    "07", "2", 1 - seen / every,
    "Count what each row sees (4.3): prompt rows the prompt, clean rows the blocks up to their own, noisy rows which?",
    (seen / every, "That is the share which is used."),
    (1 - (seen - L * W) / every, "There noisy tokens do not see their own noisy block."),
    (1 - (seen + L * W) / every, "There noisy tokens see their own clean block, the answer: strictly earlier ones only (4.3)."),
    (1 / 2, "That would be a causal mask; count what the staircase (4.3) sees."),
)
# Noisy block m reads clean blocks before m only, and clean block m those up to m: blocks 5 to 10 can change, and 4 itself not.
answer(
    "07", "3", float(blocks - 4),
    "A noisy block reads strictly earlier clean blocks (4.3), and what a clean block knows comes from blocks up to its own.",
    (float(blocks - 3), "There the noisy block 4 reads its own clean version: the leak of (70.6)."),
    (3.0, "Those are the blocks before it; which blocks have clean block 4 in their past?"),
    (1.0, "Every later noisy block reads clean block 4, not the next one alone."),
    (float(blocks), "So it would be if all saw all; the blocks before block 4 never see it."),
    (float(blocks - 1), "That leaves out one block; do those before block 4 see it?"),
    (0.0, "Clean tokens see no noisy ones; the other way round there are the stairs."),
)

# ------------------------------------------------------------------------------------------------ 08: EGSPO

# Tails (1/2): step 0 is kept, its entropy ln 2 is above 0; its score by the logit of heads is 0 - 1/2. Heads: step 1 is kept,
# with 2 ln 2 above ln 2, and its distribution is another state's: no derivative by this logit. (80.6) holds for fixed steps.
answer(
    "08", "1", 1 / 2 * (0 - 1 / 2) + 1 / 2 * 0,
    "Which step is kept after heads, which after tails, and which score e_a - p does it have for this logit? Then average.",
    (0.0, "So it is for a fixed step (80.6). Here the choice of the step looks at what step 0 drew."),
    (-1 / 2, "That is the score after tails; how often does it come, and what comes otherwise?"),
    (1 / 4, "Which step is kept after heads, ln 2 or ln 4 nats? And which sign has the derivative of log p(tails) by the logit of heads?"),
    (1 / 2, "That is the score of heads; after heads step 0 is not the most uncertain step."),
)
reward, r_hat, lam = (1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), 0.5


def second(eta: float) -> float:
    """(6.4) of the second answer: R_b - eta r_hat_b, less its mean over the group."""
    at_step = [R - eta * value for R, value in zip(reward, r_hat, strict=True)]
    return at_step[1] - mean(at_step)


eta = lam / (1 + lam)
answer(
    "08", "2", second(eta),
    "R_bk = R_b - eta r_hat_bk with eta = lambda/(1 + lambda), for all four; then subtract the mean of the four (6.4).",
    (second(0), "That is the advantage without stepwise values, lambda = 0."),
    (second(eta) * (1 + lam), "That leaves out the division by 1 + lambda, as a later script of the released code does."),
    (second(lam), "That takes off lambda r_hat; after the division by 1 + lambda it is eta r_hat."),
    (second(-eta), "There the one-step value is added; a baseline is taken off."),
    (-eta, "That is R_bk of the answer; the mean of the group at this step is still to be taken off."),
    (-eta - mean(reward), "The mean is that of R_bk over the four answers, one-step values included."),
)
revealed, second_position, third_position = 0.5, (0.6, 0.3, 0.1), (0.7, 0.2, 0.1)
F = [sum(p for p in row if p < revealed) for row in (second_position, third_position)]
# (4.2): the token's probability, times the chance that each other candidate proposes something less confident.
answer(
    "08", "3", revealed * prod(F),
    "By (4.2): position 1 proposes its token, and each of the others proposes something less confident than that.",
    (revealed, "That is the score of the released code, the token alone: the others might have proposed something more confident."),
    (prod(F), "That is the factor of the order; position 1 had to propose its token, too."),
    (revealed * (1 - F[0]) * (1 - F[1]), "That is the chance that both others are more confident; F_j is the chance of less."),
    (revealed * F[0], "One candidate is missing: the product is over all other hidden positions."),
    (revealed * F[1], "One candidate is missing: the product is over all other hidden positions."),
    (revealed * sum(F), "Both others have to be less confident: their chances multiply."),
    (revealed / 3, "That is random order; here the most confident proposal stays."),
    (0.0, "The others' likeliest tokens are more confident, but proposals are drawn, and need not be the likeliest."),
    within=0.002,
)

# ---------------------------------------------------------------------------------------- 09: trust regions

mu = 0.01
# PPO lets the ratio reach 1 + epsilon, DPPO-TV the probability mu + delta.
answer(
    "09", "1, PPO", mu * (1 + 0.2),
    "PPO limits the ratio: which probability has the ratio 1 + epsilon?",
    (mu + 0.2, "That adds epsilon to the probability; PPO's limit is one of the ratio."),
    (mu * 0.2, "That is the shift; up to which probability does it lead?"),
    (mu + 0.15, "That is DPPO's limit."),
    (mu * (1 - 0.2), "That is the limit of a token that falls."),
    within=1e-4,
)
answer(
    "09", "1, DPPO", mu + 0.15,
    "DPPO-TV limits the shift of the probability itself, the same for every token.",
    (mu * (1 + 0.15), "That takes delta as a limit of the ratio; it is one of the probability."),
    (0.15, "That is the shift; up to which probability does it lead?"),
    (mu * (1 + 0.2), "That is PPO's limit."),
    within=1e-4,
)
# (8.13): w = 1 - s (pi - mu) / delta with s = sign(A) = -1.
answer(
    "09", "2", 1 - (-1) * (0.3 - 0.6) / 0.15,
    "w = 1 - s (pi - mu)/delta (8.13): which sign has s, and which one pi - mu?",
    (1 - (0.3 - 0.6) / 0.15, "That has s = 1; the token fell with A < 0, the way in which this update pushes."),
    (0.0, "That would be a mask's, or a shift of just delta; DRPO's line goes on beyond its boundary."),
    (1 - (-1) * (0.3 / 0.6 - 1) / 0.15, "That has the shift of the ratio; DRPO's line is in the probability."),
    ((0.3 - 0.6) / 0.15, "The 1 of (8.13) is missing: on policy w is 1."),
)
# (90.12): mu < 1 - delta for A > 0, and mu > delta for A < 0.
answer(
    "09", "3", (1 - 0.3) - 0.3,
    "The boundary mu + s delta has to be a probability (90.12): for which mu is it one with s = 1, and for which with s = -1?",
    (1 - 0.3, "That is the range of one sign."),
    (0.3, "That is delta, where the range begins."),
    (1.0, "A token at 0.9 of a good answer would have to rise to 1.2."),
)

# ------------------------------------------------------------------------------------------------ 10: the map

# On the first update all ratios are 1: no clip acts; leave-one-out is N/(N-1) times the group mean, which leaves the direction.
answer(
    "10", "1", 1.0,
    "On the first update every ratio is 1: what does the clip do then? And what does another multiple of the credit change?",
    (0.0, "That would be a right angle: the ratio is 1 at first, so that no clip acts."),
    (-1.0, "Both go up in reward; neither has its sign turned."),
    (8 / 7, "That is the ratio of the lengths; a cosine does not see it."),
    (7 / 8, "That is the ratio of the lengths; a cosine does not see it."),
)
# e1, ..., e4 the gradients: reinforce has e1 - e2 - e3 - e4, gspo e1 - (e2 + e3 + e4) / 3.
answer(
    "10", "2", (1 + 3 / 3) / sqrt(1 + 3) / sqrt(1 + 3 / 9),
    "Write both updates in the four orthonormal gradients: what does gspo do to those of the longer response?",
    (1.0, "That would be so with equal lengths: here the two responses are divided by different numbers."),
    (3 / 4, "That is the square of the cosine: divide by the lengths of the two vectors, not by their squares."),
    (4 / sqrt(20), "The sum of three orthonormal vectors has the length sqrt(3), neither 3 nor 1."),
    (0.0, "A has the same sign in both rows: no term of the product is negative."),
    (1 / sqrt(2), "That leaves one of the two responses out of the product."),
    (1 / 2, "That would be so if gspo left the longer response out, or both updates had the length 2: it divides three terms by 3."),
    (4 / 3 / sqrt(4) / sqrt(4 / 3), "The longer response has three tokens, and so three terms of the product, not one."),
)

# E[A grad p] in the logits: with w_v = p_v^2 A_v its entries are w_v - p_v sum(w); those of grad J are p_v A_v.
p3, A3 = (0.5, 0.3, 0.2), (-0.3, 0.7, -0.3)
squared = [p * p * a for p, a in zip(p3, A3, strict=True)]
exact = [p * a for p, a in zip(p3, A3, strict=True)]


def cosine(a, b) -> float:
    """Of two lists of numbers."""
    dot, *lengths = (sum(x * y for x, y in zip(u, v, strict=True)) for u, v in ((a, b), (a, a), (b, b)))
    return dot / sqrt(prod(lengths))


def of_weights(weights) -> float:
    """Cosine of sum_v w_v (e_v - p) with grad J."""
    return cosine([w - p * sum(weights) for w, p in zip(weights, p3, strict=True)], exact)


answer(
    "10", "3", of_weights(squared),
    "Both are sums over v of c_v (e_v - p): with c_v = p_v A_v, and with p_v^2 A_v. Write out the three entries of each.",
    (1.0, "That is the mean of A times the score, without the weight p: it is the gradient of J itself."),
    (cosine(squared, exact), "The gradient of a softmax has two parts: p_v (e_v - p); the second is missing."),
    (of_weights([p * w for p, w in zip(p3, squared, strict=True)]), "One p too many: grad p_v brings one, the draw another."),
    (cosine(A3, exact), "That compares A itself with grad J; both sides are gradients in the logits."),
    (0.0, "Tokens with p = 0.5 and 0.3 still go down and up; the weight p does not turn the sign of any A."),
    (0.98, "Two digits do not decide here: right and wrong derivations lie near each other. Give three."),
    within=0.001,
)

# ------------------------------------------------------------------------------------------- 11: LLaDA-8B

D, hidden, layers, V = 4096, 12288, 32, 126464


def adapters(rank: int) -> int:
    """N_ad of (110.8): A and B of rank r on four D x D matrices and three D x F ones, in every layer."""
    return layers * rank * (4 * (D + D) + 3 * (D + hidden))


# Four float32 numbers a trained weight: itself, its gradient, two moments (110.8).
answer(
    "11", "1", 4 * 4 * adapters(16) / 1e9,
    "(110.8) does it for rank 128: which part of it depends on the rank, and how?",
    (4 * 4 * adapters(128) / 1e9, "That is the recipe's rank, 128."),
    (4 * adapters(16) / 1e9, "That is the weights alone; gradients and two moments come on top."),
    (2 * 4 * adapters(16) / 1e9, "Count again: weight, gradient and two moments, all in float32."),
    (3 * 4 * adapters(16) / 1e9, "That is three numbers a weight: itself, its gradient, and how many moments?"),
    (adapters(16) / 1e9, "That counts weights; how many bytes has each, and what else is kept of it?"),
)
# Sequences of `sequences`: the rollout, the scoring, and three passes for each look that is updated on.
rollout, looks = 12 * 128, 12 * 3 * 12
answer(
    "11", "2", (rollout + looks + 3 * looks) / (rollout / 2 + looks + 3 * looks),
    "Write down the three columns of the recipe: which of them changes, and what do the others do to the factor?",
    (2.0, "So it would be if a step were nothing but its rollout: what do scoring and updates cost?"),
    (
        (rollout + looks + looks) / (rollout / 2 + looks + looks),
        "A look of an update goes through three times: forward, forward again, backward.",
    ),
    ((rollout + 3 * looks) / (rollout / 2 + 3 * looks), "The looks are scored, too, before the updates."),
    (
        (rollout + 4 * looks / 12) / (rollout / 2 + 4 * looks / 12),
        "A rollout serves twelve updates, each of which looks at its three states again.",
    ),
    (
        (rollout / 2 + 4 * looks) / (rollout + 4 * looks),
        "That is the share of the work which is left; the factor by which it falls is asked.",
    ),
    (rollout / 2 / (rollout + 4 * looks), "That is the share of the work which is saved."),
)

# What the four kinds of a one-bit learner add up to: all sums and differences, no product.
answer(
    "12", "1", 100 * ((194 + 163) - (100 + 82 + 8)) / 512,
    "Add up what is solved before and after; the difference is in percent of all 512.",
    (100 * (194 + 163) / 512, "That is the rate afterwards; how much was it before?"),
    (100 * ((194 + 163) - (100 + 82)) / 512, "The eight products that the base solved are lost."),
    (100 * ((194 + 163) / (100 + 82 + 8) - 1), "That is the relative gain; points of the solved rate are asked."),
    within=0.05,
)
# The answer begins at position 14; its third token stands at 16, and the state before it predicts it.
answer(
    "12", "2", 15,
    "At which position does the third token of the answer stand, and which state stands before it?",
    (16, "There the token itself stands: that is a prediction in place."),
    (17, "Count again: the answer begins at position 14."),
    (14, "That state predicts the second token of the answer."),
    (13, "That state predicts the first token of the answer."),
)
# Four float32 numbers a weight: itself, its gradient, two moments.
answer(
    "12", "3", 16 * 134.5e6 / 1e9,
    "How many float32 numbers does AdamW keep for a weight, the weight included?",
    (4 * 134.5e6 / 1e9, "That is the weights alone."),
    (8 * 134.5e6 / 1e9, "That is weights and gradients; AdamW keeps two moments of each."),
    (12 * 134.5e6 / 1e9, "AdamW keeps two moments of each weight."),
)
