"""Bugs of the scripts and of what keeps them safe: see catalogue.py, whose list these join."""

from catalogue import Mutant

SCRIPTS, STATE = "test_scripts.py::test_", "test_state.py::test_"
WATCH = "test_watch.py::test_"
TEXT, REPORT, REFUSALS = "test_text.py::test_", "test_report.py::test_", "test_refusals.py::test_"
GOES_ON = SCRIPTS + "a_run_stopped_in_any_step_ends_as_if_it_had_not_been"
PPO_IS, FIT_IS = (
    SCRIPTS + "ppo_trains_as_the_plain_code_says",
    SCRIPTS + "sft_and_reward_model_are_trained_as_the_plain_code_says",
)

SCRIPT_MUTANTS = [
    # Text
    Mutant(
        "no end token on the demonstrations",
        [("tokenizer.encode(completion) + [tokenizer.eos]", "tokenizer.encode(completion)")],
        "trl #1623: SFT data whose completions lack the end token",
        "the SFT model never stops, and PPO samples nothing but cut-off text",
        TEXT + "prompt_and_completion_are_encoded_apart_and_the_completion_gets_its_end_token",
        "plumbing/rows.py",
    ),
    Mutant(
        "text of a user ends the document",
        [("encode_ordinary(text)", 'encode(text, allowed_special="all")')],
        "any use of a tokenizer that parses special tokens in user text",
        "whoever types the end token closes the prompt; scores and masks are read at the wrong place",
        TEXT + "any_text_survives_encoding_and_decoding_and_none_gives_the_end_token",
        "plumbing/tokenizer.py",
    ),
    Mutant(
        "ties of the merges by chance",
        [("key=lambda pair: (pairs[pair], pair)", "key=lambda pair: pairs[pair]")],
        "dictionaries whose order is that of the texts",
        "the same data in another order gives another vocabulary",
        TEXT + "the_most_frequent_pair_is_merged_first_with_ties_the_same_everywhere",
        "plumbing/tokenizer.py",
    ),
    Mutant(
        "merges counted once per word",
        [("pairs[a + b] += sign * words[word]", "pairs[a + b] += sign")],
        "common in small tokenizers that forget how often a word occurs",
        "rare words fill the vocabulary",
        TEXT + "the_most_frequent_pair_is_merged_first_with_ties_the_same_everywhere",
        "plumbing/tokenizer.py",
    ),
    Mutant(
        "prompts longer than the context kept",
        [("if not 0 < len(prompt) < context:", "if not prompt:")],
        "common",
        "an index error in the middle of a run, or a row without any response token",
        TEXT + "rows_that_do_not_fit_are_skipped_or_cut_and_counted",
        "plumbing/rows.py",
    ),
    Mutant(
        "validation rows that were trained on",
        [('if (row[0] in aside) == (split == "val")', 'if split == "train" or row[0] in aside')],
        "a hold-out that nobody takes out of the training rows",
        "the validation loss falls on and on, and never ends a run",
        TEXT + "without_a_val_file_some_prompts_are_held_out_with_all_their_rows",
        "plumbing/rows.py",
    ),
    # Stages 1 and 2
    Mutant(
        "gradients of all steps add up",
        [("        optimizer.zero_grad()\n", "")],
        "common",
        "every step repeats all steps before it",
        FIT_IS,
        "train_sft.py",
    ),
    Mutant(
        "the learning rate is never set",
        [("lr = set_lr(optimizer, schedule.share(step))", "lr = schedule.share(step) * config.lr")],
        "a scheduler that is made, logged and not applied",
        "no warm-up, and the last steps are as long as the first",
        FIT_IS,
        "train_rm.py",
    ),
    Mutant(
        "the variance for the standard deviation",
        [("scores.std().clamp(", "scores.var().clamp(")],
        "common",
        "beta means something else for every reward model",
        SCRIPTS + "the_scores_of_answers_to_prompts_spread_over_all_get_mean_0_and_spread_1",
        "train_rm.py",
    ),
    Mutant(
        "the loss of a piece as the loss of the batch",
        [('"count": int(mask.sum())}', '"count": 1}')],
        "transformers #34191: gradient accumulation averages means",
        "short pieces weigh more than long ones",
        SCRIPTS + "options_that_save_memory_change_rounding_alone",
        "train_sft.py",
    ),
    Mutant(
        "the last model kept instead of the best",
        [('    load_weights(best, "sft", model)\n', "")],
        "checkpoints saved after every validation",
        "what is kept has learned its training rows by heart",
        SCRIPTS + "the_model_of_the_lowest_validation_loss_is_saved",
        "train_sft.py",
    ),
    # Stage 3
    Mutant(
        "dropout in PPO",
        [("policy.eval()  # no dropout", "policy.train()  # no dropout")],
        "trl #4 and #454, trlx #107: ratio != 1 before the first step",
        "old and new log-probabilities are of two random networks; the clip acts on noise",
        PPO_IS,
        "train_ppo.py",
    ),
    Mutant(
        "beta stays, whatever is asked for",
        [("        kl_coef = adapt_kl_coef(\n", "        adapt_kl_coef(\n")],
        "flags that nothing reads",
        "the KL target is never reached",
        PPO_IS,
        "train_ppo.py",
    ),
    Mutant(
        "a critic at the learning rate of the policy",
        [("critic_lr=stage.critic_lr, ", "")],
        "accepted by the settings, passed to nothing",
        "a separate critic that learns too slowly to be of use",
        SCRIPTS + "a_separate_critic_starts_as_the_reward_model_and_has_a_learning_rate",
        "train_ppo.py",
    ),
    Mutant(
        "groups of mixed prompts",
        [
            (
                "[prompt for prompt in step_prompts for _ in range(stage.group_size)]",
                "step_prompts * stage.group_size",
            )
        ],
        "GRPO code that repeats the batch and then views it as groups",
        "answers to one prompt are compared with answers to another",
        SCRIPTS + "ppo_asks_each_prompt_group_size_times_in_the_order_of_the_seed",
        "train_ppo.py",
    ),
    Mutant(
        "the start judged by its mean",
        [('off.max() if dtype == "float32" else off.mean()', "off.mean()")],
        "tolerances made for bfloat16",
        "one response in a hundred sampled by another model goes unnoticed",
        WATCH + "a_single_response_whose_sampler_or_reference_is_off_is_refused",
        "plumbing/watch.py",
    ),
    Mutant(
        "a start that is no number passes",
        [("if not off <= tolerance:", "if off > tolerance:")],
        "comparisons with NaN",
        "a run of NaN for hours",
        WATCH + "a_single_response_whose_sampler_or_reference_is_off_is_refused",
        "plumbing/watch.py",
    ),
    Mutant(
        "room for one token less",
        [("len(prompt) + longest > context", "len(prompt) + longest >= context")],
        "off by one",
        "prompts that fit are complained of",
        WATCH + "prompts_without_room_and_another_length_of_answers_are_warned_of",
        "plumbing/watch.py",
    ),
    Mutant(
        "a reward model of another vocabulary",
        [("rm_tokenizer.tokens == tokenizer.tokens and reward_model", "reward_model")],
        "folders that keep the files of several runs",
        "the reward model reads other words than the policy wrote",
        REFUSALS + "a_mistake_is_one_clear_line_and_loses_nothing",
        "plumbing/models.py",
    ),
    Mutant(
        "a reward model of another SFT model",
        [('facts["rm"].pop("sft", sft_facts) != sft_facts', 'facts["rm"].pop("sft", {}) is None')],
        "SFT made again, with another seed or learning rate, and the reward model kept",
        "scores are normalised on the answers of a model that is not there any more",
        REFUSALS + "a_mistake_is_one_clear_line_and_loses_nothing",
        "plumbing/models.py",
    ),
    Mutant(
        "scores that are no number",
        [("        if wrong.any():", "        if False:")],
        "rewards that fail now and then",
        "one NaN, and all weights are NaN",
        REFUSALS + "a_mistake_is_one_clear_line_and_loses_nothing",
        "plumbing/models.py",
    ),
    Mutant(
        "a user's file in place of the standard library's",
        [('sys.path.append("")', 'sys.path.insert(0, "")')],
        "programs that look for modules in the current folder first",
        "a json.py beside the reward breaks whatever is imported after it",
        REFUSALS + "a_reward_is_looked_for_in_the_current_folder_last",
        "plumbing/models.py",
    ),
    Mutant(
        "a message that steers the terminal",
        [('"".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)', "message")],
        "errors that quote names from downloaded files",
        "whoever sends a file can clear the screen or write over what is on it",
        REFUSALS + "an_error_is_explained_in_one_line",
        "plumbing/errors.py",
    ),
    # How long a run is
    Mutant(
        "learning rate that never ends",
        [("share * (self.steps - step) /", "share * (self.steps - step + 50) /")],
        "schedules made for another number of steps",
        "the last steps are as long as those before; the end is noise",
        STATE + "the_learning_rate_climbs_to_its_peak_and_falls_to_0_in_equal_steps",
        "plumbing/state.py",
    ),
    Mutant(
        "no warm-up",
        [("climb = (step + 1) / (self.warmup + 1)", "climb = 1.0")],
        "a scheduler that is stepped before the first step",
        "Adam's first steps are the longest of all",
        STATE + "the_learning_rate_climbs_to_its_peak_and_falls_to_0_in_equal_steps",
        "plumbing/state.py",
    ),
    Mutant(
        "a rise of the loss taken for a gain",
        [("loss > (1 - self.LEAST_GAIN) * best", "loss > 9 * best")],
        "patience that compares with the wrong number",
        "small data is learned by heart, and no run ends by itself",
        STATE + "where_a_run_ends_and_which_model_is_the_best",
        "plumbing/state.py",
    ),
    Mutant(
        "the latest model taken for the best",
        [("return loss <= best", "return True")],
        "checkpoints saved after every validation",
        "what is kept has learned its training rows by heart",
        STATE + "where_a_run_ends_and_which_model_is_the_best",
        "plumbing/state.py",
    ),
    Mutant(
        "a stop that is forgotten",
        [('("steps", "fall", "checks", "stopped")', '("steps", "checks")')],
        "schedulers saved by the number of their step",
        "after an interruption the learning rate is high again",
        STATE + "an_interrupted_schedule_goes_on",
        "plumbing/state.py",
    ),
    # Going on after an interruption
    Mutant(
        "random numbers begin again",
        [('            set_random_state(contents["random"])\n', "")],
        "common: everything is saved but the generators",
        "a resumed run samples and drops other things than the uninterrupted one",
        STATE + "a_run_goes_on_from_its_last_save",
        "plumbing/state.py",
    ),
    Mutant(
        "lost steps stay in the log",
        [('if row["step"] <= self.step]', "]")],
        "logs that are only ever appended to",
        "curves that go back in time",
        STATE + "a_run_goes_on_from_its_last_save",
        "plumbing/state.py",
    ),
    Mutant(
        "an interrupted run deleted",
        [
            (
                "        if self.path.exists():\n            hint",
                "        if False:\n            hint",
            )
        ],
        "scripts that clear their folder when they start",
        "a forgotten flag costs hours",
        STATE + "a_run_or_a_model_that_is_there_is_overwritten_on_request_alone",
        "plumbing/state.py",
    ),
    Mutant(
        "a finished model replaced",
        [("if self.model_path.exists():\n            raise", "if False:\n            raise")],
        "scripts that protect what is unfinished, and nothing else",
        "a command repeated with other flags costs the model that was there",
        STATE + "a_run_or_a_model_that_is_there_is_overwritten_on_request_alone",
        "plumbing/state.py",
    ),
    Mutant(
        "settings that are compared in part",
        [
            (
                "for name, x in self.settings.items() if old[name] != x]",
                "for name, x in list(self.settings.items())[1:] if old[name] != x]",
            )
        ],
        "lists of what matters, kept by hand",
        "half of a run with one setting, half with another",
        STATE + "a_run_goes_on_with_the_same_settings_data_and_models_alone",
        "plumbing/state.py",
    ),
    Mutant(
        "data that only counts",
        [('number = zlib.crc32(repr(row).encode(errors="replace"), number)', "pass")],
        "resuming by the name of a folder, or by the number of rows",
        "half of a run on one data set, half on another",
        STATE + "a_fingerprint_tells_all_data_apart_and_knows_odd_text",
        "plumbing/state.py",
    ),
    Mutant(
        "a second Ctrl-C held up",
        [("        signal.signal(number, signal.SIG_DFL)\n", "")],
        "handlers that wait for a step which hangs",
        "nothing but kill -9 ends the run",
        STATE + "a_signal_ends_the_step_and_saves_and_a_second_one_is_not_held_up",
        "plumbing/state.py",
    ),
    Mutant(
        "an adaptive beta begins again",
        [('state.values.get("kl_coef", config.kl_coef)', "config.kl_coef")],
        "controllers whose state is in no checkpoint",
        "the price of the KL jumps at every interruption",
        GOES_ON,
        "train_ppo.py",
    ),
    Mutant(
        "the reference is not saved",
        [('parts["ref"] = ref if stage.ref_update_every else None', 'parts["ref"] = None')],
        "references that are loaded anew, although they have moved",
        "after an interruption the KL is measured against the SFT model again",
        GOES_ON,
        "train_ppo.py",
    ),
    # What is reported
    Mutant(
        "the report compares with a reference that has moved",
        [
            (
                "        ref = frozen_copy(ref)  # models.reference",
                "        pass  # models.reference",
            )
        ],
        "one copy for two purposes",
        "PPO seems to have won nothing",
        SCRIPTS + "the_reference_of_the_report_does_not_move",
        "train_ppo.py",
    ),
    Mutant(
        "ties count as victories",
        [("0.5 * (ours == theirs).float()", "(ours == theirs).float()")],
        "win rates that count a tie for one side",
        "a policy that has learned nothing wins",
        REPORT + "a_tie_is_half_a_win",
        "plumbing/report.py",
    ),
    Mutant(
        "the best of one more",
        [("math.comb(k - 1, n - 1)", "math.comb(k, n)")],
        "off by one in the ranks",
        "best of n looks better than it is",
        REPORT + "best_of_n_is_the_mean_over_all_subsets_of_n",
        "plumbing/report.py",
    ),
    Mutant(
        "an error that shrinks with every sample",
        [
            (
                "mean(1)\n    weights = torch.ones_like(x) if",
                "flatten()\n    weights = torch.ones_like(x) if",
            )
        ],
        "samples of one prompt taken for independent ones",
        "error bars too small by the square root of the samples per prompt",
        REPORT + "an_estimate_is_a_weighted_mean_over_prompts_with_its_error",
        "plumbing/report.py",
    ),
    Mutant(
        "optimality of the objective, not of the gain",
        [("gained, possible = J - J_sft, J_best - J_sft", "gained, possible = J, J_best")],
        "common when scores are near 0 anyway",
        "a model that has not been trained has an optimality",
        REPORT + "the_error_of_optimality_is_that_of_repeated_measurements",
        "plumbing/report.py",
    ),
    Mutant(
        "seen prompts among the unseen",
        [
            (
                "tuple(prompt) not in seen for prompt in prompts",
                "tuple(prompt) in seen for prompt in prompts",
            )
        ],
        "a test set that was trained on",
        "generalisation is not measured at all",
        REPORT + "up_to_half_of_the_prompts_looked_at_closely_are_unseen_and_the_weights_make_up",
        "plumbing/report.py",
    ),
    # Flags and errors
    Mutant(
        "numbers without limits",
        [("not low <= values[field.name] <= high", "values[field.name] < low")],
        "argparse checks a type and nothing more",
        "a share of 1.5, or a learning rate of NaN, fails hours later or not at all",
        REFUSALS + "a_mistake_is_one_clear_line_and_loses_nothing",
        "plumbing/settings.py",
    ),
    Mutant(
        "a flag that does nothing",
        [("if name in given and other not in given:", "if False:")],
        "flags that are read only together with another",
        "a run believed to have an adaptive beta has none",
        REFUSALS + "a_mistake_is_one_clear_line_and_loses_nothing",
        "plumbing/settings.py",
    ),
    Mutant(
        "two runs in one folder",
        [("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB")],
        "a shell command repeated by mistake",
        "two logs and two models, mixed",
        SCRIPTS + "a_process_that_is_killed_unlocks_its_folder_and_can_be_resumed",
        "plumbing/settings.py",
    ),
]
