"""Wrong versions of the equations of laws_block.py: block states, staircase plans, and their one forward for all blocks."""

from mutant import Mutant

INSIDE = "own, later = inside & (block == number)"
STRATA = "return (part + u) / len(u)"
COUNT = "count = torch.minimum((u * n).floor().long() + 1, n)\n    noise = _uniform((num_states, *own.shape)"
WEIGHT = "weight = n.double() / (num_states * count.clamp(min=1))"
LATER = "block > number"
REPEATED = "later = later.repeat(num_states, 1, 1).expand_as(masked)"
NUMBERS = "torch.arange(rollout.response.shape[1], device=rollout.response.device) // rollout.sampler.block_length"
NEEDED = "return (self.valid & self.scored.any(-1)).unflatten(0, (-1, self.blocks)).any(1)"
CHUNKS = "states = forward[:, None] * plan.blocks + torch.arange(plan.blocks, device=row.device)"
READ = "h[where.unflatten(0, (-1, plan.blocks)).any(1)]"
OWN_STATE = "own = alg.block_numbers(rollout).expand(len(by_block), 1, -1)\n    hidden = by_block.gather(1, own)[:, 0]"
CALL = "encode_staircase(prompt, prompt_mask, clean, noisy, **how)"
CURRENT = "current = (block * scored).amax(-1, keepdim=True)"
CANDIDATES = "return hidden & (block == current) & scored.any(-1, keepdim=True)"
STAIRCASE = "law_staircase_mask"

MUTANTS: list[Mutant] = [
    # ---------------------------------------------------------------------------------------------- 2.8 ELBO of every block
    Mutant("2.8", INSIDE, INSIDE.replace("inside & ", ""), "law_block_elbo_states"),
    Mutant("2.8", INSIDE, INSIDE.replace("==", ">="), "law_block_elbo_states"),
    Mutant("2.8", INSIDE, INSIDE.replace("==", "<="), "law_block_elbo_noise"),
    Mutant("", STRATA, STRATA.replace(" + u)", " + 0 * u)"), "law_block_elbo_noise", where="_in_strata"),
    Mutant("", STRATA, STRATA.replace(" + u)", " + u[:1])"), "law_block_elbo_noise", where="_in_strata"),
    Mutant("", STRATA, STRATA.replace("len(u)", "(len(u) + 1)"), "law_block_elbo_expectation", where="_in_strata"),
    Mutant(
        "2.8",
        "*n.shape), generator, n.device)\n    if strata:",
        "*n.shape), generator, n.device)\n    if False:",
        "law_block_elbo_frequencies",
    ),
    Mutant(
        "2.8",
        "u = _uniform((num_states, *n.shape), generator, n.device)",
        "u = _uniform((num_states, 1, n.shape[1]), generator, n.device)",
        "law_block_elbo_frequencies",
    ),
    Mutant("2.8", COUNT, COUNT.replace(" + 1, n)", ".clamp(min=1), n)"), "law_block_elbo_expectation"),
    Mutant("2.8", COUNT, COUNT.replace("u * n", "u * own.shape[-1]"), "law_block_elbo_noise"),
    Mutant("2.8", COUNT, COUNT.replace("+ 1, n)", "+ 1, 0 * n + 99)"), "law_block_elbo_noise"),
    Mutant("2.8", COUNT, COUNT.replace("*own.shape)", "*own.shape[:2], 1)"), "law_block_elbo_frequencies"),
    Mutant("2.8", WEIGHT, WEIGHT.replace("n.double()", "n.double().mean(0)"), "law_blocks_of_one_token_are_exact"),
    Mutant("2.8", COUNT, COUNT.replace("(num_states, *own.shape)", "(1, *own.shape)"), "law_block_elbo_frequencies"),
    Mutant("2.8", WEIGHT, WEIGHT.replace("n.double()", "inside.sum(-1).double()"), "law_block_elbo_is_a_bound"),
    Mutant("2.8", WEIGHT, WEIGHT.replace("num_states * ", ""), "law_block_elbo_expectation"),
    Mutant("2.8", WEIGHT, WEIGHT.replace("count.clamp(min=1)", "n.clamp(min=1)"), "law_one_long_block_is_the_elbo"),
    Mutant("2.8", WEIGHT, WEIGHT.replace("n.double()", "n.float()"), "law_block_elbo_states"),  # a third in single precision
    Mutant("2.8", LATER, LATER.replace("block > ", "block >= "), "law_block_elbo_states"),
    Mutant("2.8", LATER, LATER.replace("block > ", "block < "), "law_one_forward_is_all_forwards"),
    Mutant(
        "2.8",
        REPEATED,
        REPEATED.replace("repeat(num_states, 1, 1)", "repeat_interleave(num_states, 0)"),
        "law_block_elbo_states",
    ),
    Mutant(
        "2.8",
        "hidden = plan.hidden | _after_visible_prompt(rollout, later)",
        "hidden = plan.hidden",
        "law_one_forward_is_all_forwards",
    ),
    Mutant(
        "2.8",
        "replace(plan, hidden=hidden, block_length",
        "replace(plan, valid=plan.valid | True, hidden=hidden, block_length",
        "law_block_elbo_states",
    ),
    Mutant(
        "2.8",
        '"block ELBO": partial(alg.block_elbo_plan',
        '"block ELBO": partial(alg.elbo_count_plan',
        "law_block_estimator",
        where="ESTIMATORS",
    ),
    Mutant("2.8", '_check_count("plan.num_states", num_states)\n    inside, block', "inside, block", "law_block_elbo_refusals"),
    # ------------------------------------------------------------------------------------------- 3.5 trajectory as a staircase
    Mutant("3.5", "* len(depth)", "", "law_block_replay_states"),
    Mutant("3.5", "by_block.amin(1), by_block", "by_block.amax(1), by_block", "law_block_replay_reproduces_the_sampler"),
    Mutant("3.5", "(first + depth[:, None, None])", "(first + depth.flip(0)[:, None, None])", "law_block_replay_states"),
    Mutant("3.5", "unflatten(0, (-1, width))", "unflatten(0, (width, -1))", "law_block_replay_states"),
    Mutant(
        "3.5",
        "steps <= final.minimum(last)",
        "steps < final.minimum(last)",
        "law_block_replay_gradient_is_the_policy_gradient",
    ),
    Mutant("3.5", "steps <= final.minimum(last)", "steps <= final", "law_block_replay_costs_the_steps_of_a_block"),
    Mutant("3.5", "first.where(first >= 0, at_most)", "first.clamp(min=0)", "law_block_replay_states"),
    Mutant(
        "3.5",
        "one = torch.ones_like(last",
        "one = 2 * torch.ones_like(last",
        "law_block_replay_gradient_is_the_policy_gradient",
    ),
    Mutant("3.5", "replace(plan, block_length=", "replace(plan, step=None, block_length=", "law_block_replay_states"),
    # ---------------------------------------------------------------------------------------------- one forward for all blocks
    Mutant("", "return place // rollout", "return place % rollout", "law_block_elbo_states", where="block_numbers"),
    Mutant(
        "",
        "return place // rollout",
        "return place // 2 // rollout",
        "law_block_replay_reproduces_the_sampler",
        where="block_numbers",
    ),
    Mutant(
        "", "return place // rollout", "return (place + 1) // rollout", "law_one_forward_is_all_forwards", where="block_numbers"
    ),
    Mutant("", NEEDED, NEEDED.replace(".any(1)", ".all(1)"), "law_state_chunks_are_whole_forwards", where="Plan.needed"),
    Mutant("", NEEDED, NEEDED.replace(".any(1)", "[:, 0]"), "law_second_pass_skips_whole_forwards", where="Plan.needed"),
    Mutant("", NEEDED, NEEDED.replace("self.valid & ", ""), "law_second_pass_skips_whole_forwards", where="Plan.needed"),
    Mutant(
        "",
        NEEDED,
        NEEDED.replace("(-1, self.blocks)).any(1)", "(self.blocks, -1)).any(0)"),
        "law_state_chunks_are_whole_forwards",
        where="Plan.needed",
    ),
    Mutant(
        "",
        "return int(self.needed.sum())",
        "return int((self.valid & self.scored.any(-1)).sum())",
        "law_block_replay_costs_the_steps_of_a_block",
        where="Plan.network_calls",
    ),
    Mutant(
        "",
        "return int(self.needed.sum())",
        "return int((self.valid & self.scored.any(-1)).sum())",
        "law_staircase_inputs",
        where="Plan.network_calls",
    ),
    Mutant(
        "",
        CHUNKS,
        CHUNKS.replace("forward[:, None] * plan.blocks", "forward[:, None]"),
        "law_state_chunks_are_whole_forwards",
        where="state_chunks",
    ),
    Mutant(
        "",
        CHUNKS,
        CHUNKS.replace("+ torch.arange", "- torch.arange"),
        "law_state_chunks_are_whole_forwards",
        where="state_chunks",
    ),
    Mutant(
        "",
        CHUNKS,
        CHUNKS.replace("torch.arange(plan.blocks, device=row.device)", "torch.zeros(plan.blocks, dtype=torch.long)"),
        "law_state_chunks_are_whole_forwards",
        where="state_chunks",
    ),
    Mutant(
        "",
        "+ row[:, None]).split(size)",
        "+ row[:, None]).split(max(1, size // plan.blocks))",
        "law_state_chunks_are_whole_forwards",
        where="state_chunks",
    ),
    Mutant(
        "",
        "+ row[:, None]).split(size)",
        "+ row[:, None] * 0).split(size)",
        "law_two_passes_of_a_staircase_are_the_joint_graph",
        where="state_chunks",
    ),
    Mutant(
        "",
        "        yield part.flatten()",
        "        yield part.T.flatten()",
        "law_state_chunks_are_whole_forwards",
        where="state_chunks",
    ),
    Mutant("4.1", READ, READ.replace(".any(1)", ".all(1)"), "law_staircase_inputs", where="_at"),
    Mutant(
        "4.1",
        READ,
        READ.replace(
            "where.unflatten(0, (-1, plan.blocks)).any(1)", "torch.ones_like(where.unflatten(0, (-1, plan.blocks))[:, 0])"
        ),
        "law_staircase_inputs",
        where="_at",
    ),
    Mutant(
        "4.1",
        "    if plan.block_length is not None:\n        return",
        "    if False:\n        return",
        "law_staircase_inputs",
        where="_encode",
    ),
    Mutant("4.1", OWN_STATE, "hidden = by_block[:, 0]", "law_one_forward_is_all_forwards", where="_staircase"),
    Mutant("4.1", OWN_STATE, "hidden = by_block.any(1)", "law_staircase_inputs", where="_staircase"),
    Mutant(
        "4.1",
        OWN_STATE,
        OWN_STATE.replace("block_numbers(rollout)", "block_numbers(rollout).flip(0)"),
        "law_staircase_features_are_those_of_the_model",
        where="_staircase",
    ),
    Mutant(
        "4.1",
        "[states][:, rollout.prompt.shape[1] :]",
        "[states][:, : rollout.response.shape[1]]",
        "law_one_forward_is_all_forwards",
        where="_staircase",
    ),
    Mutant(
        "4.1",
        "row = states[:: plan.blocks] % len(rollout.response)",
        "row = states[:: plan.blocks] // plan.blocks % len(rollout.response)",
        "law_staircase_inputs",
        where="_staircase",
    ),
    Mutant(
        "4.1",
        "row = states[:: plan.blocks] % len(rollout.response)",
        "row = states[: len(hidden)] % len(rollout.response)",
        "law_one_forward_is_all_forwards",
        where="_staircase",
    ),
    Mutant("4.1", CALL, CALL.replace("clean, noisy", "noisy, noisy"), "law_one_forward_is_all_forwards", where="_staircase"),
    Mutant("4.1", CALL, CALL.replace("clean, noisy", "clean, clean"), "law_one_forward_is_all_forwards", where="_staircase"),
    Mutant(
        "4.1", CALL, CALL.replace("prompt_mask,", "prompt_mask | True,"), "law_one_forward_is_all_forwards", where="_staircase"
    ),
    Mutant(
        "4.1",
        CALL,
        CALL.replace("clean, noisy", "clean, noisy.detach().flip(0)"),
        "law_two_passes_of_a_staircase_are_the_joint_graph",
        where="_staircase",
    ),
    Mutant("4.1", '"clean_stream": "block"', '"clean_stream": "causal"', "law_staircase_inputs", where="_staircase"),
    # -------------------------------------------------------------------------------------------------- 4.3 staircase mask
    Mutant("4.3", "rank[None, :] <= rank[:, None]", "rank[None, :] < rank[:, None]", STAIRCASE),
    Mutant("4.3", "rank[None, :] <= rank[:, None]", "rank[None, :] >= rank[:, None]", STAIRCASE),
    Mutant("4.3", "block[None, :] < noisy[:, None]", "block[None, :] <= noisy[:, None]", STAIRCASE),
    Mutant("4.3", "block[None, :] < noisy[:, None]", "block[None, :] > noisy[:, None]", STAIRCASE),
    Mutant("4.3", "noisy[None, :] == noisy[:, None]", "noisy[None, :] <= noisy[:, None]", STAIRCASE),
    Mutant("4.3", "noisy[None, :] == noisy[:, None]", "torch.eye(length, dtype=torch.bool)", STAIRCASE),
    Mutant("4.3", 'block if clean == "block" else place', 'place if clean == "block" else block', STAIRCASE),
    Mutant("4.3", "pad(prompt_mask, (0, 2 * length)", "pad(prompt_mask | True, (0, 2 * length)", STAIRCASE),
    Mutant("4.3", ".clamp(min=-1)", "", STAIRCASE),
    Mutant("4.3", "block[prompt_length:]", "place[prompt_length:]", STAIRCASE),
    Mutant("4.3", "context.new_zeros(", "context.new_ones(", STAIRCASE),
    Mutant("4.3", "block_length < 1 or length % block_length", "block_length < 1", STAIRCASE),
    Mutant("4.3", 'if clean not in ("block", "causal"):', "if False:", STAIRCASE),
    Mutant("", "prompt_mask.sum(-1, keepdim=True)", "prompt_mask.shape[1]", STAIRCASE, where="staircase_positions"),
    Mutant("", "[prompt, response, response]", "[prompt, response, response + length]", STAIRCASE, where="staircase_positions"),
    Mutant("", ".cumsum(-1) - 1)", ".cumsum(-1))", STAIRCASE, where="staircase_positions"),
    Mutant("", "block[:, None, :] <= block", "block[:, None, :] < block", STAIRCASE, where="block_causal"),
    Mutant("", "visible & attention_mask", "visible | attention_mask", STAIRCASE, where="block_causal"),
    # -------------------------------------------------------------------------------------------------- the head in parts
    Mutant("4.1", "if count > 1 and torch.is_grad_enabled():", "if False:", "law_head_in_parts", where="_in_parts"),
    Mutant("4.1", "max(1, count)", "min(1, count)", "law_head_in_parts", where="_in_parts"),
    Mutant(
        "4.1",
        "head_parts(most, model.vocab_size)",
        "head_parts(len(rows['h']), model.vocab_size)",
        "law_head_in_parts",
        where="state_features",
    ),
    Mutant(
        "4.1",
        "torch.cat([value[name] for value in values])",
        "torch.cat([value[name] for value in values[::-1]])",
        "law_head_in_parts",
        where="_in_parts",
    ),
    Mutant(
        "4.1", "len(states) * int(plan.scored.sum(-1).amax())", "len(plan.scored)", "law_head_in_parts", where="state_features"
    ),
    Mutant("4.2", "len(states) * rollout.sampler.block_length", "int(passed.sum())", "law_head_in_parts", where="_order_logp"),
    # ------------------------------------------------------------------------------------------------- order in blocks, rows
    Mutant("4.2", CANDIDATES, CANDIDATES.replace(" & scored.any(-1, keepdim=True)", ""), "law_candidates", where="_candidates"),
    Mutant("4.2", CURRENT, CURRENT.replace(".amax(", ".amin("), "law_candidates", where="_candidates"),
    Mutant(
        "4.2",
        CANDIDATES,
        CANDIDATES.replace("hidden & (block", "scored & (block"),
        "law_exact_kernel_of_a_block",
        where="_candidates",
    ),
    Mutant("4.2", CANDIDATES, CANDIDATES.replace("hidden & (block ==", "(block =="), "law_candidates", where="_candidates"),
    Mutant("4.2", 'if rollout.sampler.order != "low_confidence":', "if False:", "law_candidates", where="_candidates"),
    Mutant(
        "10.1",
        "plan=P(alg.block_elbo_plan, num_states=2",
        "plan=P(alg.elbo_count_plan, num_states=2",
        "law_methods",
        where="row.stabledrl-block",
    ),
    Mutant(
        "10.1",
        "strata=True))",
        'strata=True), normalizer="kept_length", extra=None)',
        "law_methods",
        where="row.stabledrl-block",
    ),
    Mutant(
        "10.1",
        "P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.2)",
        "P(alg.reinforce)",
        "law_methods",
        where="row.replay-grpo",
    ),
    Mutant("10.1", "P(alg.group_z_score, ddof=1, eps=0.0001)", "P(alg.group_mean)", "law_methods", where="row.replay-grpo"),
]
