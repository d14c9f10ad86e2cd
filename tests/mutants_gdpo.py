"""Wrong versions of the equations of laws_gdpo.py: quadrature and mean field."""

from mutant import Mutant

RULE = "x, w = numpy.polynomial.legendre.leggauss(num_nodes)"
MIDPOINTS = "x, w = (numpy.arange(num_nodes) + 0.5) * 2 / num_nodes - 1, numpy.full(num_nodes, 2 / num_nodes)"
FEWER = "x, w = numpy.polynomial.legendre.leggauss(max(1, num_nodes - 1))"
WANTED = "(1 + t * (n - 1) + up).floor()"
GDPO = 'aggregation="sequence_mean_token_mean"'

MUTANTS: list[Mutant] = [
    # --------------------------------------------------------------------------------------------------------- 2.5 the rule
    Mutant("2.5", "torch.from_numpy(w / 2)", "torch.from_numpy(w)", "law_gauss_legendre"),
    Mutant("2.5", "torch.from_numpy((x + 1) / 2)", "torch.from_numpy((1 - x) / 2)", "law_gauss_legendre"),
    Mutant("2.5", "torch.from_numpy((x + 1) / 2)", "torch.from_numpy(x)", "law_gauss_legendre"),
    Mutant("2.5", RULE, MIDPOINTS, "law_gauss_legendre_moments"),
    Mutant("2.5", RULE, FEWER, "law_gauss_legendre_moments"),
    Mutant("2.5", RULE, RULE.replace("legendre.leg", "chebyshev.cheb"), "law_gauss_legendre_moments"),
    Mutant("2.5", RULE, MIDPOINTS, "law_quadrature_is_exact_from_half_the_length"),
    Mutant("2.5", RULE, MIDPOINTS, "law_quadrature_is_exact_for_smooth_models"),
    Mutant("2.5", RULE, RULE + "\n    x, w = 0.9 * x, w", "law_quadrature_error_bound_and_sign"),
    Mutant("2.5", '_check_count("plan.num_nodes", num_nodes)', "", "law_quadrature_refusals"),
    # --------------------------------------------------------------------------------------------------------- 2.6 the plan
    Mutant("2.6", "(noise < t[..., None]) & inside", "(noise > t[..., None]) & inside", "law_quadrature_expectation"),
    Mutant("2.6", "w = w / masks_per_node", "w = w", "law_quadrature_expectation"),
    Mutant("2.6", WANTED, "(t * n + up).floor()", "law_quadrature_expectation", where="_count_at"),
    Mutant("2.6", "(1 / t).expand(", "(1 / (1 - t)).expand(", "law_quadrature_is_exact_from_half_the_length"),
    Mutant("2.6", "(1 / t).expand(", "t.expand(", "law_quadrature_is_exact_for_smooth_models"),
    Mutant("2.6", "noise < t[..., None]", "noise < 1.1 * t[..., None]", "law_quadrature_error_bound_and_sign"),
    Mutant("2.6", WANTED, "(t * (n - 1) + up).floor()", "law_stochastic_counts_are_exact_for_linear_models", where="_count_at"),
    Mutant("2.6", WANTED, "(1 + t * n + up).floor()", "law_stochastic_counts_are_exact_for_linear_models", where="_count_at"),
    Mutant(
        "2.6", 'if counts == "stochastic":', "if False:", "law_stochastic_counts_are_exact_for_linear_models", where="_count_at"
    ),
    Mutant("2.6", "up = 0.5", "up = 0.0", "law_quadrature_states", where="_count_at"),
    Mutant("2.6", "up = 0.5", "up = 0.4", "law_rounded_counts_are_the_nearest", where="_count_at"),
    Mutant("2.6", "up = 0.5", "up = 0.6", "law_rounded_counts_are_the_nearest", where="_count_at"),
    Mutant("2.6", "up = 0.5", "up = 0.0", "law_rounded_counts_are_the_nearest", where="_count_at"),
    Mutant(
        "2.6",
        "(t * n).floor(), (1 / t).expand(-1, len(n))",
        "(t * n).floor(), n / (t * n).floor()",
        "law_constant_models_show_the_scale",
        where="_count_at",
    ),
    Mutant(
        "2.6",
        "return count, n / count",
        "return count, (1 / t).expand(-1, len(n))",
        "law_constant_models_show_the_scale",
        where="_count_at",
    ),
    Mutant("2.6", "return (t * n).floor()", "return (t * n).round()", "law_constant_models_show_the_scale", where="_count_at"),
    Mutant(
        "2.6",
        "return (t * n).floor()",
        "return (t * n).floor().clamp(min=1)",
        "law_constant_models_show_the_scale",
        where="_count_at",
    ),
    Mutant(
        "2.6",
        "(noise < t[..., None]) & inside",
        "(noise < t[..., None]).all(-1, keepdim=True) & inside",
        "law_quadrature_fails_where_the_doubt_is_at_one_end",
    ),
    Mutant("2.6", RULE, FEWER, "law_quadrature_fails_where_the_doubt_is_at_one_end", where="gauss_legendre"),
    Mutant("2.6", "w = w / masks_per_node", "w = w**2 / masks_per_node", "law_quadrature_variance"),
    Mutant("2.6", "w = w / masks_per_node", "w = w / masks_per_node**0.5", "law_quadrature_variance"),
    Mutant("2.6", "x.repeat_interleave(masks_per_node)", "x.repeat(masks_per_node)", "law_quadrature_states"),
    Mutant(
        "2.6", "return count, n / count", "return count, (1 / t).expand(-1, len(n))", "law_quadrature_states", where="_count_at"
    ),
    Mutant("2.6", "_uniform((len(t), *inside.shape)", "_uniform((1, *inside.shape)", "law_quadrature_frequencies"),
    Mutant("2.6", "_uniform((len(t), *inside.shape)", "_uniform((len(t), *inside.shape[:1], 1)", "law_quadrature_frequencies"),
    Mutant("2.6", "_uniform((len(t), len(n))", "_uniform((1, len(n))", "law_quadrature_frequencies", where="_count_at"),
    Mutant("2.6", "_uniform((len(t), len(n))", "_uniform((len(t), 1)", "law_quadrature_frequencies", where="_count_at"),
    Mutant("2.6", "n = inside.sum(-1)", "n = inside.sum(-1).amax().expand(len(inside))", "law_quadrature_rows_are_their_own"),
    Mutant("2.6", "n = inside.sum(-1)", "n = inside.sum(-1).flip(0)", "law_quadrature_rows_are_their_own"),
    Mutant("2.6", '_check_count("plan.masks_per_node", masks_per_node)', "", "law_quadrature_refusals"),
    Mutant("2.6", "if counts not in COUNTS:", "if False:", "law_quadrature_refusals"),
    # ------------------------------------------------------------------------------------------------ variance and mean field
    Mutant("2.3", "/ (num_states * count)", "/ num_states + 0 * count", "law_total_variance_and_its_allocation"),
    Mutant("2.3", "/ (num_states * count)", "/ count", "law_total_variance_and_its_allocation"),
    Mutant("2.3", "/ (num_states * count)", "/ num_states + 0 * count", "law_two_models_with_known_variances"),
    Mutant(
        "2.3",
        "masked = _random_subset(noise, inside, count)",
        "masked = _random_subset(noise, inside, torch.minimum(count + 1, n))",
        "law_two_models_with_known_variances",
    ),
    Mutant("2.6", "w = w / masks_per_node", "w = 1.1 * w / masks_per_node", "law_two_models_with_known_variances"),
    Mutant(
        "2.6",
        "return count, n / count",
        "return count, 1 / t + 0 * count",
        "law_two_models_with_known_variances",
        where="_count_at",
    ),
    Mutant(
        "2.1",
        "torch.ones_like(scored[..., 0], dtype=rollout.logp.dtype)",
        "1 / scored.sum(-1).to(rollout.logp.dtype)",
        "law_mean_field_bounds",
    ),
    Mutant(
        "2.1",
        "torch.cat([prompt, torch.ones_like(rollout.keep)], -1)",
        "torch.cat([prompt, (noise < p_mask_prompt)[:, :1] | (torch.arange(rollout.keep.shape[1]) % 2 > 0)], -1)",
        "law_mean_field_bounds",
    ),
    # ------------------------------------------------------------------------------------------------------- ratios and rows
    Mutant("7.1", "    return ll - anchor", "    return anchor - ll", "law_shared_masks_make_the_first_update_on_policy"),
    Mutant("10.1", GDPO, GDPO.replace("_token_mean", ""), "law_shared_masks_make_the_first_update_on_policy", where="row.gdpo"),
    Mutant("10.1", 'normalizer="none"', 'normalizer="kept_length"', "law_methods", where="row.gdpo"),
    Mutant(
        "10.1",
        'method if method.kl.of == "ratio" else plain',
        "method",
        "law_kl_of_the_whole_log_likelihood",
        where="kl_target",
    ),
    Mutant("10.1", 'if method.kl.of == "ratio" else', "if False else", "law_kl_of_the_whole_log_likelihood", where="kl_target"),
    Mutant(
        "10.1",
        'num_nodes=3, masks_per_node=1, counts="bernoulli"',
        'num_nodes=3, masks_per_node=1, counts="rounded"',
        "law_methods",
        where="row.gdpo",
    ),
    Mutant(
        "10.1",
        'counts="floor", domain="all")',
        'counts="floor", domain="keep")',
        "law_methods",
        where="row.gdpo-released",
    ),
    Mutant(
        "10.1",
        'normalizer="padded_length"',
        'normalizer="kept_length"',
        "law_methods",
        where="row.gdpo-released",
    ),
    Mutant(
        "10.1",
        'aggregation="token_mean"',
        'aggregation="fixed_length"',
        "law_methods",
        where="row.diffu-grpo-released",
    ),
    Mutant(
        "2.6",
        'partial(_sdmc, counts="rounded")',
        'partial(_sdmc, counts="floor")',
        "law_quadrature_estimators",
        where="ESTIMATORS",
    ),
    Mutant(
        "2.6",
        'partial(_sdmc, counts="floor")',
        'partial(_sdmc, counts="stochastic")',
        "law_quadrature_estimators",
        where="ESTIMATORS",
    ),
]
