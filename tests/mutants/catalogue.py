"""Bugs that RLHF code really has, each as a change of one or two lines of the shipped source, and the test that catches it.

`where` says where the bug has been seen (issue and pull-request numbers are those of GitHub); "common" means in more small
implementations than one would want to list; some wait in any code that works as this does. `effect` is what it does to training.
"""

from dataclasses import dataclass


@dataclass
class Mutant:
    name: str
    changes: list  # of (text in the source, what stands there instead); each text occurs once
    where: str
    effect: str
    killer: str  # file::test below tests/
    file: str = "minippo.py"


UNIT, EXACT = "test_minippo.py::test_", "test_exact.py::test_"
TRAINING, FAST = "test_training.py::test_", "test_fast.py::test_"

MUTANTS = [
    # What counts as the response
    Mutant(
        "first response token untrained",
        [("action >= prompt_lengths[:, None]", "action > prompt_lengths[:, None]")],
        "common, from slicing logits[:, len(prompt):] without the shift",
        "the model never learns how to begin",
        UNIT + "the_mask_marks_the_actions_from_the_first_response_token_to_the_end_token",
    ),
    Mutant(
        "end token outside the mask",
        [("(action < lengths[:, None])", "(action < lengths[:, None] - 1)")],
        "transformers #23530, trl #976: pad = eos, and the collator hides every pad from the loss",
        "nothing learns to stop; responses run on to the limit",
        UNIT + "the_mask_marks_the_actions_from_the_first_response_token_to_the_end_token",
    ),
    Mutant(
        "prompt inside the mask",
        [("(action >= prompt_lengths[:, None]) & (action < lengths[:, None])", "action < lengths[:, None]")],
        "common in SFT loops that know no completion mask",
        "SFT spends itself on questions; in PPO the policy is rewarded for words that it did not write",
        UNIT + "the_mask_marks_the_actions_from_the_first_response_token_to_the_end_token",
    ),
    Mutant(
        "every batch drawn from all rows",
        [("shuffled(count, seed, place // count)", "shuffled(count, seed, step)")],
        "common: random.sample() in every step",
        "of the rows of one pass a third is never seen",
        TRAINING + "batches_are_full_and_every_row_comes_once_in_a_pass",
        "plumbing/training.py",
    ),
    # The networks
    Mutant(
        "attention looks ahead",
        [("is_causal=True", "is_causal=False")],
        "common when is_causal and attn_mask are mixed up",
        "the loss falls to nothing in training, and samples are noise",
        UNIT + "the_network_is_a_gpt_2_with_a_value_head",
    ),
    Mutant(
        "score read at the last column",
        [("tokens.device) == lengths[:, None] - 1", "tokens.device) == 0 * lengths[:, None] + tokens.shape[1] - 1")],
        "trl #2778: padding on one side, the reward read on the other; gpt-neox #1285",
        "the reward model judges the padding, and a score depends on the longest neighbour",
        UNIT + "a_score_is_read_at_the_last_token_and_sees_all_before_it",
    ),
    Mutant(
        "reward model shares the policy's trunk",
        [("copy.deepcopy(gpt.trunk)", "gpt.trunk")],
        "common when heads are swapped on one loaded model",
        "training the reward model wrecks the policy, then PPO moves the reward under its own feet",
        UNIT + "a_reward_model_starts_with_a_copy_of_the_policy_and_shares_nothing",
    ),
    Mutant(
        "scores not normalised",
        [("squeeze(-1) - self.mean) / self.std", "squeeze(-1) - self.mean)")],
        "a detail of the first RLHF code that copies leave out (arXiv:2403.17031)",
        "beta means something else for every reward model",
        UNIT + "a_score_is_shifted_and_scaled_by_mean_and_std",
    ),
    Mutant(
        "dropout in the frozen copies",
        [("copy.deepcopy(model).eval().requires_grad_(False)", "copy.deepcopy(model).train().requires_grad_(False)")],
        "trl #4, #744: dropout left on, in the policy or the reference",
        "the KL of a model to itself is not 0, and every reward is noisy",
        UNIT + "a_frozen_copy_is_a_copy_without_gradients_or_dropout",
    ),
    Mutant(
        "the reference is the policy",
        [("return copy.deepcopy(model).eval()", "return model.eval()")],
        "common: ref = policy without a copy",
        "the KL is 0 for ever and holds nothing back",
        UNIT + "a_frozen_copy_is_a_copy_without_gradients_or_dropout",
    ),
    Mutant(
        "the reference is trained",
        [("copy.deepcopy(model).eval().requires_grad_(False)", "copy.deepcopy(model).eval()")],
        "common",
        "gradients flow into reference and reward model: memory for nothing, and with one optimizer over all, a moving target",
        UNIT + "a_frozen_copy_is_a_copy_without_gradients_or_dropout",
    ),
    Mutant(
        "rows that share a word share its hidden state",
        [("(rows[1:] == rows[:-1]).cumprod(1) == 0", "rows[1:] != rows[:-1]")],
        "a bug waiting in every cache of common beginnings that looks at tokens and not at all that came before them",
        "answers to different questions are read as if to the same",
        FAST + "packing_changes_no_number_and_no_gradient",
        "plumbing/fast.py",
    ),
    Mutant(
        "a row shares what the row above has not worked out",
        [("torch.where(used, tokens, -1)", "tokens.clone()"), ("new = rows >= 0", "new = used.clone()[: len(rows)]")],
        "the other half of the same bug: a place matches, but nothing was computed there",
        "the state of another token altogether stands in its place",
        FAST + "packing_changes_no_number_and_no_gradient",
        "plumbing/fast.py",
    ),
    # Log-probabilities
    Mutant(
        "temperature in sampling only",
        [("gather_logprobs(logits, actions[mask], temperature)", "gather_logprobs(logits, actions[mask])")],
        "OpenRLHF #853, trl #3029",
        "ratio and KL belong to a distribution that nobody sampled from",
        UNIT + "the_scored_distribution_is_the_softmax_of_the_logits_over_the_temperature",
    ),
    Mutant(
        "a token forbidden in sampling only",
        [("ends = logits.softmax(-1)", "ends = logits.index_fill(1, torch.tensor([0]), -1e9).softmax(-1)")],
        "trl #235, #736: top-k, min_length and suppressed tokens in generate(), full softmax in scoring",
        "mass moves onto the forbidden token for free: the KL estimate goes negative, then the text falls apart",
        FAST + "tokens_are_drawn_as_often_as_their_probabilities_say",
        "plumbing/fast.py",
    ),
    Mutant(
        "actions scored one state late",
        [("states, actions = tokens[:, :-1], tokens[:, 1:]", "states, actions = tokens[:, 1:], tokens[:, 1:]")],
        "common: logits and labels not shifted against each other",
        "the model is trained to repeat the word it has just read",
        UNIT + "index_t_is_the_choice_of_token_t_plus_1_in_the_state_of_having_read_tokens_0_to_t",
    ),
    Mutant(
        "mean over padding",
        [("return x[mask].mean()", "return x.mean()")],
        "rlhf-book #216: approx_kl as a mean over all tokens, padding included",
        "every statistic shrinks as the padding grows",
        UNIT + "the_masked_mean_sees_the_mask_only",
    ),
    Mutant(
        "whitening over padding",
        [("(x - x[mask].mean()) / x[mask].std(correction=0)", "(x - x.mean()) / x.std(correction=0)")],
        "common: a whiten() without a mask",
        "the advantage's zero depends on how much padding there is: short rows are all good, or all bad",
        UNIT + "whitening_by_hand",
    ),
    Mutant(
        "whitening keeps the mean",
        [("(x - x[mask].mean()) / x[mask]", "x / x[mask]")],
        "whiten(shift_mean=False), meant for rewards, used for advantages",
        "whatever was sampled becomes likelier, good or bad",
        UNIT + "whitening_by_hand",
    ),
    # Sampling
    Mutant(
        "first token drawn after the padding",
        [("longest, device=device) == lengths[:, None] - 1", "longest, device=device) == 0 * lengths[:, None] + longest - 1")],
        "trl #469: padded prompts in batched generation",
        "short prompts in a batch are answered as if they ended in padding",
        FAST + "sampling_with_a_cache_gives_what_the_plain_sampler_gives",
        "plumbing/fast.py",
    ),
    Mutant(
        "values of the rollout one action early",
        [("values[at] = policy", "values[rows, at[1] - 1] = policy")],
        "common, where each script shifts the values by hand",
        "the advantage of a token is measured against what was expected one token later",
        FAST + "sampling_with_a_cache_gives_what_the_plain_sampler_gives",
        "plumbing/fast.py",
    ),
    Mutant(
        "positions counted from the longest prompt",
        [("decode(policy.trunk, token, column,", "decode(policy.trunk, token, torch.full_like(column, longest + step),")],
        "trl #262, #469: positions that ignore the padding",
        "a row's text depends on its neighbours; sampled and scored log-probabilities disagree",
        FAST + "sampling_with_a_cache_gives_what_the_plain_sampler_gives",
        "plumbing/fast.py",
    ),
    Mutant(
        "the cache hides the newest token",
        [("device=token.device) <= column[:, None]", "device=token.device) < column[:, None]")],
        "common off-by-one of hand-written caches",
        "text is sampled by a model that cannot see its last word",
        FAST + "sampling_with_a_cache_gives_what_the_plain_sampler_gives",
        "plumbing/fast.py",
    ),
    Mutant(
        "sampling goes on after the end",
        [("(token != policy.config.eos) & (lengths", "(lengths")],
        "trl FAQ and #235: eos ignored in generate()",
        "the score is read after text that nobody meant to be part of the answer",
        UNIT + "a_row_is_a_prompt_and_a_response_with_the_numbers_that_scoring_gives",
    ),
    # The reward model's loss
    Mutant(
        "chosen and rejected swapped",
        [("margin = chosen_scores - rejected_scores", "margin = rejected_scores - chosen_scores")],
        "arXiv:1909.08593, section 4.4: a flipped sign made the model as bad as it could be, overnight",
        "PPO makes what people like least",
        UNIT + "the_loss_is_minus_the_log_probability_of_the_choices_under_bradley_terry",
    ),
    Mutant(
        "log of a sigmoid",
        [("torch.nn.functional.logsigmoid(margin)", "torch.sigmoid(margin).log()")],
        "common",
        "the first pair that the model gets badly wrong gives an infinite loss",
        UNIT + "the_loss_stays_finite_however_wrong_the_scores",
    ),
    # Rewards
    Mutant(
        "score one slot late",
        [("row_lengths(mask) - 2] += scores", "(row_lengths(mask) - 1).clamp(max=mask.shape[1] - 1)] += scores")],
        "trl #1893, #3750: the score lands on the first pad after the end token",
        "the score is masked away, or reaches the policy only through the value function",
        UNIT + "the_score_is_paid_at_the_last_action_of_the_response",
    ),
    Mutant(
        "score at every token",
        [("rewards[torch.arange(len(mask), device=mask.device), row_lengths(mask) - 2] += scores",
          "rewards += torch.where(mask, scores[:, None], 0.0)")],  # fmt: skip
        "common",
        "long answers earn the score many times over",
        UNIT + "the_score_is_paid_at_the_last_action_of_the_response",
    ),
    Mutant(
        "KL sign flipped",
        [("-kl_coef * (logprobs - ref_logprobs)", "kl_coef * (logprobs - ref_logprobs)")],
        "arXiv:1909.08593, section 4.4, and common in small ones",
        "the policy is paid for leaving the reference",
        EXACT + "the_expected_update_is_the_gradient_of_score_minus_beta_kl",
    ),
    Mutant(
        "k3 upside down",
        [("(log_q.exp() - 1 - log_q).sum(1)", "((-log_q).exp() - 1 + log_q).sum(1)")],
        "common: the ratio is ref / pi for samples of pi, and gets written pi / ref",
        "the log shows a number that is not the KL and explodes with it",
        UNIT + "both_kl_estimates_are_right_on_average_and_k3_is_never_negative",
    ),
    Mutant(
        "penalty for ending",
        [("missing_eos_penalty * ~ended", "missing_eos_penalty * ended")],
        "trl #3750: the check for the end token misses or inverts",
        "the policy learns never to stop",
        UNIT + "penalties_are_taken_off_for_each_token_and_for_a_response_that_was_cut_off",
    ),
    Mutant(
        "adaptive beta runs away",
        [("(1 + error * min", "(1 - error * min")],
        "common",
        "the further the policy strays, the cheaper it gets",
        UNIT + "beta_rises_with_a_kl_above_its_target_falls_below_and_stays_at_an_infinite_horizon",
    ),
    # Advantages
    Mutant(
        "value after the end bootstrapped",
        [("torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)", "torch.where(mask, rewards, 0.0), values")],
        "DeepSpeedExamples #672, stable-baselines3 #185: the last step sees a value that does not exist",
        "the value of padding is added to every response",
        UNIT + "there_is_no_value_after_the_last_action",
    ),
    Mutant(
        "padding inside the returns",
        [("rewards, values = torch.where(mask, rewards, 0.0), torch", "rewards, values = rewards, torch")],
        "rlhf-book #216: KL penalties on padding leak into the returns of real tokens",
        "the longer the padding, the larger the return",
        UNIT + "advantages_are_sums_of_deltas_and_returns_are_advantages_plus_values",
    ),
    Mutant(
        "gamma missing in the sum",
        [("delta + gamma * lam * advantage", "delta + lam * advantage")],
        "common; invisible as long as gamma is 1",
        "the discount holds for one step only",
        UNIT + "advantages_are_sums_of_deltas_and_returns_are_advantages_plus_values",
    ),
    Mutant(
        "rewards instead of returns",
        [("delta = rewards[:, t] + gamma * next_value - values[:, t]", "delta = rewards[:, t] - values[:, t]")],
        "rlhf-book #216: A = r - V",
        "a token is blamed for all that had been hoped for at its place",
        UNIT + "advantages_are_sums_of_deltas_and_returns_are_advantages_plus_values",
    ),
    Mutant(
        "returns from whitened advantages",
        [("whitened = whiten(advantages, mask)", "whitened = advantages = whiten(advantages, mask)"), ('"returns": returns}', '"returns": advantages + batch["old_values"]}')],
        "common: whiten first, then returns = advantages + values",
        "the values chase a target of mean V and spread 1, whatever the reward",
        UNIT + "credit_is_kl_adjusted_rewards_gae_and_whitening",
    ),
    # Losses
    Mutant(
        "the optimist's clip",
        [("-torch.min(unclipped", "-torch.max(unclipped")],
        "common: the sign of the loss and min / max changed only once",
        "ratios outside the range are pushed on, and never brought back",
        UNIT + "a_token_has_a_gradient_unless_it_has_moved_far_enough",
    ),
    Mutant(
        "clip that never acts",
        [("clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages", "clipped = unclipped")],
        "common in variants with one update per rollout, where nobody notices",
        "several epochs on one batch tear the policy apart",
        UNIT + "a_token_has_a_gradient_unless_it_has_moved_far_enough",
    ),
    Mutant(
        "padding in the policy loss",
        [
            ("(logprobs - old_logprobs)[mask], advantages[mask]  # (N,)",
             "(x.masked_fill(~mask, 0.0).flatten() for x in (logprobs - old_logprobs, advantages))"),
        ],
        "common: loss * mask, then .mean()",
        "the step shrinks as the padding grows",
        UNIT + "the_policy_loss_and_its_stats_by_hand",
    ),
    Mutant(
        "value clip around the targets",
        [("clipped = old_values + (values - old_values).clamp", "clipped = returns + (values - returns).clamp")],
        "wrong old values in the clip: of the step before, or of the target",
        "the clip no longer limits how far the values move",
        UNIT + "the_value_loss_clips_around_the_old_value",
    ),
    Mutant(
        "the reference in the ratio",
        [('policy_loss(logprobs, old_logprobs, batch["wh', 'policy_loss(logprobs, batch["ref_logprobs"], batch["wh')],
        "some texts and courses define the ratio as pi / ref",
        "the clip ties the policy to the reference, and the gradient is weighted wrongly from the first step on",
        EXACT + "the_expected_update_is_the_gradient_of_score_minus_beta_kl",
    ),
    Mutant(
        "k1 as a loss",
        [('0.5 * (logprobs - batch["ref_logprobs"]) ** 2', '(logprobs - batch["ref_logprobs"])')],
        "common in loss-side KL: the estimate is right, and its gradient is 0 on average",
        "a KL penalty that does nothing but add noise",
        EXACT + "the_expected_step_of_the_kl_loss_is_the_gradient_of_the_kl_in_the_states_visited",
    ),
    Mutant(
        "entropy punished",
        [("config.kl_loss_coef * k2 - bonus", "config.kl_loss_coef * k2 + bonus")],
        "common sign slip",
        "the policy collapses onto one answer",
        EXACT + "the_expected_step_of_the_entropy_bonus_is_the_gradient_of_the_entropy",
    ),
    # The update
    Mutant(
        "one pass whatever is asked for",
        [("for _ in range(config.epochs):", "for _ in range(1):")],
        "flags that nothing reads",
        "the ratio hardly leaves 1 and the clip never acts",
        UNIT + "an_update_takes_epochs_times_minibatches_steps_and_sees_each_row_once_in_a_pass",
    ),
    Mutant(
        "one step too many",
        [("config.minibatches", "config.minibatches + 1")],
        "chunk() and range(0, n, size) give one more or one fewer minibatch than asked for",
        "steps smaller and more numerous than the settings say",
        UNIT + "an_update_takes_epochs_times_minibatches_steps_and_sees_each_row_once_in_a_pass",
    ),
    Mutant(
        "max_grad_norm unused",
        [("clip_grad_norm_(parameters, max_grad_norm)", "clip_grad_norm_(parameters, math.inf)")],
        "accepted by the settings, passed to nothing",
        "one odd batch can end a run",
        UNIT + "one_norm_is_taken_over_all_parameters_and_scaled_down_to_max_grad_norm",
    ),
    Mutant(
        "gradients never cleared",
        [("            optimizer.zero_grad()\n", "")],
        "common",
        "every step repeats all steps before it",
        UNIT + "an_update_takes_epochs_times_minibatches_steps_and_sees_each_row_once_in_a_pass",
    ),
    Mutant(
        "statistics of pieces weighed alike",
        [('sum(s[name] * s["count"] for s in stats) / count', "sum(s[name] for s in stats) / len(stats)")],
        "mlx-lm #1413, transformers #35203: means of means, over pieces with different numbers of tokens",
        "the log depends on how the batch happened to be cut",
        TRAINING + "the_loss_its_gradient_and_its_stats_are_the_same_in_pieces",
        "plumbing/training.py",
    ),
    Mutant(
        "gradients of pieces weighed alike",
        [('(loss * piece_stats["count"]).backward()', "loss.backward()"), ("grad /= count", "grad /= len(stats)")],
        "transformers #34191: gradient accumulation averages means",
        "short pieces weigh more than long ones, and a small --micro_batch takes other steps",
        TRAINING + "the_loss_its_gradient_and_its_stats_are_the_same_in_pieces",
        "plumbing/training.py",
    ),
    Mutant(
        "padding of a joined batch on the left",
        [("F.pad(x, (0, width - x.shape[1]))", "F.pad(x, (width - x.shape[1], 0))")],
        "padding sides that differ between functions",
        "rows of narrow pieces no longer start at column 0, and their positions are wrong",
        TRAINING + "a_batch_is_split_and_joined_without_loss",
        "plumbing/training.py",
    ),
    Mutant(
        "advantages in the loss before whitening",
        [('batch["whitened"], mask, config.clip_eps', 'batch["advantages"], mask, config.clip_eps')],
        "common: whitened under one name, read under another",
        "the step depends on the scale of the scores",
        UNIT + "the_loss_of_ppo_is_the_sum_of_its_weighted_terms",
    ),
    Mutant(
        "values clipped around themselves",
        [('values, batch["old_values"], batch["returns"]', 'values, values.detach(), batch["returns"]')],
        "old values computed anew in every step",
        "the value clip never acts",
        UNIT + "the_loss_of_ppo_is_the_sum_of_its_weighted_terms",
    ),
    Mutant(
        "advantages overwritten with the whitened ones",
        [('"advantages": advantages, "whitened"', '"advantages": whitened, "whitened"')],
        "common: advantages = whiten(advantages)",
        "what is shown as advantage is no longer return less value",
        UNIT + "credit_is_kl_adjusted_rewards_gae_and_whitening",
    ),
    Mutant(
        "the credit of PPO whatever is given",
        [("batch |= credit(batch, config, kl_coef)", 'batch |= globals()["credit"](batch, config, kl_coef)')],
        "an argument that nothing reads",
        "every neighbour of PPO is PPO",
        UNIT + "an_iteration_is_rollout_credit_and_update_as_they_are_given",
    ),
    Mutant(
        "hooks left behind",
        [("        for hook in hooks:\n            hook.remove()\n", "")],
        "any code that registers hooks for a while",
        "the MLP of the last block leaves out rows in calls that know nothing of it",
        FAST + "a_block_is_as_before_after_a_call_that_failed_too",
        "plumbing/fast.py",
    ),
    Mutant(
        "hidden states of the mask before",
        [("if index is not self.mask:", "if self.states is None:")],
        "a cache without its key",
        "two heads that read different tokens get those of the first",
        FAST + "hidden_states_can_be_read_with_several_masks_and_with_any_index",
        "plumbing/fast.py",
    ),
    Mutant(
        "queries in the cache",
        [("= qkv[..., x.shape[1] :]", "= qkv[..., : 2 * x.shape[1]]")],
        "a slice of query, key and value side by side that is off by one part",
        "new tokens read another prompt than the one that stands there",
        FAST + "sampling_with_a_cache_gives_what_the_plain_sampler_gives",
        "plumbing/fast.py",
    ),
    Mutant(
        "a new token overwrites the one before",
        [("kept[rows, column] = qkv", "kept[rows, column - 1] = qkv")],
        "common off-by-one of hand-written caches",
        "text is sampled by a model that has forgotten every second word",
        FAST + "sampling_with_a_cache_gives_what_the_plain_sampler_gives",
        "plumbing/fast.py",
    ),
    # The learning rate, and how long a run is
    Mutant(
        'one learning rate for all groups',
        [('share * group["peak"]', 'share * optimizer.param_groups[0]["peak"]')],
        'schedulers that write one number into every group',
        'the critic learns at the rate of the policy, whatever its flag says',
        TRAINING + "value_head_and_critic_have_learning_rates_of_their_own",
        'plumbing/training.py',
    ),
    Mutant(
        "norms and biases decay",
        [("weight_decay if parameter.dim() > 1 else 0.0", "weight_decay")],
        "common: one parameter group for everything",
        "the scale of every layer is pulled to 0",
        TRAINING + "value_head_and_critic_have_learning_rates_of_their_own",
        "plumbing/training.py",
    ),
    Mutant(
        "the same order in every pass",
        [("default_rng([seed, epoch])", "default_rng(seed)")],
        "a generator that is made anew for each pass",
        "neighbours stay neighbours, and batches never mix",
        TRAINING + "batches_are_full_and_every_row_comes_once_in_a_pass",
        "plumbing/training.py",
    ),
    # What is reported
    Mutant(
        "values that miss by a constant explain all",
        [("unforeseen = (returns - values)[mask].var(correction=0)", "unforeseen = (returns - values)[mask].pow(2).mean()")],
        "explained variance computed as a mean squared error",
        "the metric disagrees with every other implementation",
        UNIT + "explained_variance_is_1_for_perfect_values_and_0_for_constant_ones",
        "minippo.py",
    ),
    Mutant(
        "the clip counted on one side",
        [("((ratio - 1).abs() > clip_eps)", "(ratio > 1 + clip_eps)")],
        "common",
        "half of what the clip does is not in the log",
        UNIT + "the_policy_loss_and_its_stats_by_hand",
        "minippo.py",
    ),
]  # fmt: skip
