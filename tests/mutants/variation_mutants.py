"""Bugs of PPO's neighbours, each as a change of one or two lines of variations/. See catalogue.py."""

from functools import partial

from catalogue import Mutant

RUNS = "test_variations.py::test_"
EXACT = RUNS + "the_expected_step_is_the_gradient_of_score_minus_beta_kl"
MEAN = RUNS + "the_loss_of_a_minibatch_is_the_mean_of_the_paper_however_it_is_cut"
PROGRAM = RUNS + "they_run_as_train_ppo_does_up_to_the_report"
GROUP = RUNS + "the_responses_to_a_prompt_are_compared_with_each_other"


def mutant(file, name, right, wrong, where, effect, killer):
    return Mutant(name, [(right, wrong)], where, effect, killer, f"variations/{file}.py")


rloo, grpo, dpo = partial(mutant, "rloo"), partial(mutant, "grpo"), partial(mutant, "dpo")
penalty, sequence = partial(mutant, "ppo_penalty"), partial(mutant, "sequence_ppo")
best, reinforce = partial(mutant, "best_of_n"), partial(mutant, "reinforce")

VARIATION_MUTANTS = [
    mutant(
        "iterate",
        "half of a round's pairs",
        'half_written = out / "half_written"',
        'half_written = out / "data"',
        "common: a folder that is there is taken for whole",
        "a round that was interrupted goes on with the pairs that it had by then",
        RUNS + "iterated_rounds_add_labelled_pairs_and_train_the_reward_model_on_all",
    ),
    rloo(
        "a baseline that is added",
        "(rewards - others).flatten()",
        "(rewards + others).flatten()",
        "common",
        "on average the gradient is the same; its variance is several times as large",
        GROUP,
    ),
    rloo(
        "the mean of the others holds the response",
        "(rewards.sum(1, keepdim=True) - rewards) / (k - 1)",
        "rewards.mean(1, keepdim=True)",
        "RLOO written as GRPO without std",
        "the step is (k - 1) / k of the gradient",
        GROUP,
    ),
    rloo(
        "others divided by k",
        "- rewards) / (k - 1)",
        "- rewards) / k",
        "common",
        "part of the score is left in the advantage; variance",
        GROUP,
    ),
    rloo(
        "RLOO trains values that nobody reads",
        "replace(config, vf_coef=0.0)",
        "config",
        "common where PPO's loss is used again",
        "the trunk is pulled towards predicting returns",
        MEAN,
    ),
    rloo(
        "groups that are not groups",
        '    sys.argv += ["--group_size", str(flags.k)]\n',
        "",
        "common: k sampled, but not in a row, or of other prompts",
        "responses to different prompts are compared with each other",
        PROGRAM,
    ),
    grpo(
        "std over the whole batch",
        "scores.std(1, correction=0, keepdim=True)",
        "scores.std(correction=0)",
        "reshape forgotten",
        "advantages of easy and hard prompts are scaled alike",
        GROUP,
    ),
    grpo(
        "k3 upside down in the loss",
        'log_q = (batch["ref_logprobs"] - logprobs) * mask',
        'log_q = (logprobs - batch["ref_logprobs"]) * mask',
        "common: q and 1 / q confused",
        "the loss has the gradient of no KL",
        RUNS + "the_loss_of_k3_has_the_gradient_of_the_kl_from_the_reference",
    ),
    grpo(
        "beta missing from the loss",
        "loss + config.kl_coef * masked_mean",
        "loss + masked_mean",
        "common: the coefficient is read and not used",
        "the KL costs the same whatever --kl_coef says",
        RUNS + "the_loss_of_k3_has_the_gradient_of_the_kl_from_the_reference",
    ),
    grpo(
        "long responses count more",
        "lengths.mean() / lengths)",
        "1.0)",
        "two losses of one name: GRPO's paper, and what most code computes",
        "a mean over tokens where the paper has one over responses",
        MEAN,
    ),
    grpo(
        "the count of tokens for a mean over responses",
        "count = int(mask.sum()) if no_length else len(mask)",
        "count = int(mask.sum())",
        "common in gradient accumulation: every piece weighted alike, or by its tokens",
        "pieces with long responses count too much",
        MEAN,
    ),
    sequence(
        "a ratio that is not clipped",
        "advantages, one, config.clip_eps)",
        'advantages, one, float("inf"))',
        "a clip that cannot act",
        "nothing keeps the policy near the one that sampled",
        MEAN,
    ),
    sequence(
        "the value of the last token",
        "mask.int().argmax(1, keepdim=True)",
        "mask.shape[1] - 1 - mask.int().flip(1).argmax(1, keepdim=True)",
        "common: -1 for the value of a prompt",
        "the baseline has read the response that it is to judge",
        RUNS + "one_action_has_one_value_and_is_whitened_over_the_responses",
    ),
    sequence(
        "the mean of the ratios' logs without the length",
        "log_ratio / mask.sum(1, keepdim=True) if mean",
        "log_ratio / mask.shape[1] if mean",
        "padding in the divisor",
        "the ratio depends on the longest neighbour",
        MEAN,
    ),
    penalty(
        "a penalty that rewards",
        "loss + self.c * kl",
        "loss - self.c * kl",
        "sign of the objective and of the loss mixed up",
        "the policy runs away from the one that sampled",
        MEAN,
    ),
    penalty(
        "the penalty is halved where the KL is too large",
        "factor = 0.5 if d < target / 1.5 else 2.0",
        "factor = 2.0 if d < target / 1.5 else 0.5",
        "common",
        "c runs to its bounds",
        RUNS + "the_penalty_is_doubled_or_halved_beyond_one_and_a_half_times_its_target",
    ),
    penalty(
        "d of the last piece",
        "if policy.lm_head.weight.grad is None:",
        "if True:",
        "waits wherever a loss remembers something",
        "c depends on --micro_batch",
        RUNS + "the_penalty_follows_the_last_minibatch_in_pieces_too",
    ),
    penalty(
        "c is forgotten on resume",
        'self.c, self.kl_sum, self.tokens = state["c"], state["kl_sum"], state["tokens"]',
        'self.kl_sum, self.tokens = state["kl_sum"], state["tokens"]',
        "common: adaptive coefficients that no checkpoint holds",
        "a resumed run begins with another penalty",
        RUNS + "an_interrupted_run_goes_on_where_it_stopped",
    ),
    best(
        "the best of the batch, not of the group",
        "rewards.view(-1, n).argmax(1, keepdim=True)",
        "rewards.view(-1, n).argmax().expand(len(rewards) // n, 1) % n",
        "argmax without a dimension",
        "of most prompts any response is imitated",
        GROUP,
    ),
    best(
        "the best without its KL",
        'best_rows(batch["scores"] - kl_coef * kl, n)',
        'best_rows(batch["scores"], n)',
        "common: rejection sampling on the score alone",
        "nothing holds the policy near the reference",
        RUNS + "imitating_the_best_of_n_moves_towards_its_distribution",
    ),
    best(
        "a piece without a chosen response counts",
        "count = int((mask & chosen).sum())",
        "count = max(1, int((mask & chosen).sum()))",
        "an earlier version of this file",
        "the step depends on --micro_batch",
        MEAN,
    ),
    dpo(
        "DPO: chosen and rejected swapped",
        "h = chosen - rejected",
        "h = rejected - chosen",
        "common: the columns of a data set in another order",
        "the policy learns what people reject",
        RUNS + "the_loss_of_dpo_works_when_pasted_and_is_a_mean_over_pairs",
    ),
    dpo(
        "chosen and rejected swapped in the batch",
        "for prompt, *pair in some_pairs for answer in pair]",
        "for prompt, *pair in some_pairs for answer in pair[::-1]]",
        "common: the columns of a data set in another order",
        "the log looks right, and the policy learns what people reject",
        RUNS + "dpo_prefers_what_is_chosen_in_the_data",
    ),
    dpo(
        "gradients through the reference",
        "    with torch.no_grad():\n        ref_logprobs",
        "    if True:\n        ref_logprobs",
        "common",
        "memory for nothing; with a shared model, h has no gradient",
        RUNS + "the_loss_of_pairs_is_the_mean_over_pairs_and_leaves_the_reference_alone",
    ),
    dpo(
        "beta missing from DPO",
        "logsigmoid(beta * h)",
        "logsigmoid(h)",
        "common",
        "the policy goes as far as with beta 1, whatever is asked for",
        RUNS + "the_loss_of_dpo_works_when_pasted_and_is_a_mean_over_pairs",
    ),
    dpo(
        "IPO without the half",
        "(h - 1 / (2 * beta)) ** 2",
        "(h - 1 / beta) ** 2",
        "common: the target read off the wrong line of the paper",
        "the target is twice as far",
        RUNS + "the_loss_of_dpo_works_when_pasted_and_is_a_mean_over_pairs",
    ),
    reinforce(
        "the baseline of a token is that of the next",
        'values = batch["old_values"] * baseline',
        'values = batch["old_values"].roll(-1, 1) * baseline',
        "off by one",
        "the baseline has seen the action: the gradient is biased",
        EXACT,
    ),
    reinforce(
        "the total return without the KL",
        "rewards.sum(1, keepdim=True) - values",
        'batch["scores"][:, None] - values',
        "common",
        "beta does nothing",
        EXACT,
    ),
    reinforce(
        "another credit on resume",
        "credit = partial(reinforce_credit, credit=flags.credit, baseline=baseline)",
        "credit = lambda *x: reinforce_credit(*x, credit=flags.credit, baseline=baseline)",
        "settings that a checkpoint does not hold",
        "half of a run by one algorithm, half by another",
        PROGRAM,
    ),
]
