"""PPO's neighbours: what each does on average, exactly; and that they run as train_ppo.py does.

Run: python -m pytest tests/test_variations.py (the last tests need trl)

The first part enumerates, as tests/test_exact.py does: every group of responses to a prompt is handed to an iteration as if it had
been sampled, and what the iteration does to the weights is summed, times the probability of the group.
"""

import itertools
import json
import math
import random
import re
import shutil
import signal

import pytest
import torch

import train_ppo
import variations
from bench import trl_ppo
from bench.ladder import responses
from cli import metrics, run, same_weights, shell
from data import zoo
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, evaluate_actions, frozen_copy, ppo_loss, whiten
from plumbing import settings
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.hf import END, export
from plumbing.settings import UserError
from plumbing.text import Tokenizer, load_jsonl, pad, pad_completions
from test_exact import Task
from tiny import assert_equal, f64, inf, marks, stir, weights
from variations import best_of_n, dpo, ensemble, grpo, iterate, outgrow, ppo_penalty, reinforce, rloo, sequence_ppo

# What an iteration does on average

PROMPTS = [[1, 0, 1], [0, 1]]  # of different lengths
CONFIG = {"minibatches": 1, "max_grad_norm": inf, "vf_coef": 0.0, "kl_coef": 123.0}  # beta comes as an argument


class Groups(Task):
    """A task of three words and responses of two, and what an iteration makes of each group of k responses to a prompt."""

    def __init__(self, kl_coef=0.3, temperature=0.7):
        super().__init__(3, 2, temperature, kl_coef, PROMPTS)
        self.count = len(list(responses(3, 2)))

    def sampled(self, rows):
        """What rollout() would return."""
        with torch.no_grad():
            logprobs, values, _ = evaluate_actions(self.policy, self.tokens, self.mask, self.temperature)
            ref_logprobs, _, _ = evaluate_actions(self.ref, self.tokens, self.mask, self.temperature)
        batch = {"tokens": self.tokens, "mask": self.mask, "logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": values}
        batch |= {"scores": self.scores, "ended": torch.ones_like(self.scores, dtype=torch.bool)}
        return {name: x[rows] for name, x in batch.items()}

    def move(self, iteration, own, rows, prompts=None, micro_batch=0, old=0.0, lr=1.0, **changes):
        """What an iteration on these rows does to the weights, which is taken back; its batch; its stats. old: added to the
        log-probabilities at sampling."""
        prompts = [PROMPTS[row // self.count] for row in rows] if prompts is None else prompts
        batch, asked = self.sampled(rows), []
        batch["logprobs"] = batch["logprobs"] + old * batch["mask"]

        def rollout(policy, ref, score, prompts, config):
            asked.extend(prompts)
            return dict(batch)

        before, start = {name: x.clone() for name, x in self.policy.state_dict().items()}, weights(self.policy)
        config = PPOConfig(**{"batch_size": len(rows), "temperature": self.temperature, **CONFIG, **changes})
        optimizer = torch.optim.SGD(self.policy.parameters(), lr)
        arguments = self.policy, self.ref, None, prompts, optimizer, config, self.kl_coef, rollout, micro_batch
        out, stats = iteration(*arguments, own)
        assert asked == prompts[: len(rows)]
        moved = weights(self.policy) - start
        self.policy.load_state_dict(before)
        return moved, out, stats

    def expected(self, iteration, own, k=1, times=lambda batch: batch["mask"].sum() / len(batch["mask"])):
        """E of the step, times what the loss was divided by: by default the tokens of a response."""
        chances, total = self.logprobs().detach().sum(1).exp(), torch.zeros_like(weights(self.policy))
        for number in range(len(PROMPTS)):
            rows = range(number * self.count, (number + 1) * self.count)
            for group in itertools.product(rows, repeat=k):
                moved, batch, _ = self.move(iteration, own, list(group))
                total += chances[list(group)].prod() * times(batch) * moved
        return total

    def by_prompt(self, x):
        """(B,) -> (prompts, responses): the rows list every response to each prompt."""
        return x.view(len(PROMPTS), self.count)


@pytest.fixture
def unwhitened(monkeypatch):
    for module in (sequence_ppo, ppo_penalty):
        monkeypatch.setattr(module, "whiten", lambda x, mask: torch.where(mask, x, 0.0))


EXACT = {
    "reinforce, total": (reinforce.reinforce_iteration, reinforce.ReinforceConfig("total"), 1),
    "reinforce, total, baseline": (reinforce.reinforce_iteration, reinforce.ReinforceConfig("total", True), 1),
    "reinforce": (reinforce.reinforce_iteration, reinforce.ReinforceConfig(), 1),
    "reinforce, baseline": (reinforce.reinforce_iteration, reinforce.ReinforceConfig(baseline=True), 1),
    "rloo": (rloo.rloo_iteration, rloo.RLOOConfig(2), 2),
    "one action": (sequence_ppo.sequence_iteration, sequence_ppo.SequenceConfig(), 1),
    "penalty": (ppo_penalty.penalty_iteration, ppo_penalty.PenaltyConfig(), 1),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_expected_step_is_the_gradient_of_score_minus_beta_kl(name, unwhitened):
    task = Groups()
    exact = task.gradient(task.objective())
    assert_equal(task.expected(*EXACT[name]), exact, 1e-9)
    assert exact.norm() > 1e-2


def test_the_rungs_of_reinforce_differ_in_every_single_step():
    task = Groups()
    rows = [int(task.mask.sum(1).argmax())]
    moves = [task.move(*EXACT[name][:2], rows)[0] for name in list(EXACT)[:4]]
    for one, other in itertools.combinations(moves, 2):
        assert (one - other).norm() > 1e-3


def test_grpo_without_std_and_length_shrinks_the_gradient_of_the_score_by_what_the_mean_holds_of_itself():
    task = Groups(kl_coef=0.0)
    own = grpo.GRPOConfig(2, no_std=True, no_length=True)
    exact = task.gradient(task.objective())
    assert_equal(task.expected(grpo.grpo_iteration, own, 2), exact / 2, 1e-9)  # (k - 1) / k
    assert exact.norm() > 1e-2


def test_grpo_with_std_follows_with_two_responses_the_chance_of_winning_and_not_the_score():
    task = Groups(kl_coef=0.0)
    chances, scores = task.by_prompt(task.logprobs().sum(1).exp()), task.by_prompt(task.scores)
    sign = (scores[:, :, None] - scores[:, None]).sign()
    wins = (chances[:, :, None] * chances.detach()[:, None] * sign).sum()  # P(win) - P(lose) against another sample
    exact, score = task.gradient(wins), task.gradient(task.objective())
    assert_equal(task.expected(grpo.grpo_iteration, grpo.GRPOConfig(2, no_length=True), 2), exact, 1e-9)
    cosine = (exact @ score / exact.norm() / score.norm()).item()
    assert exact.norm() > 1e-2 and 0 < cosine < 0.999  # another direction than that of E[score]


def test_grpo_divides_each_response_by_its_length():
    task = Groups(kl_coef=0.0)
    logprobs, scores = task.by_prompt(task.logprobs().sum(1)), task.by_prompt(task.scores)
    chances, lengths = logprobs.detach().exp(), task.by_prompt(task.mask.sum(1))
    advantages = (scores - (chances * scores).sum(1, keepdim=True)) / 2  # E[A | the response], k = 2
    exact = task.gradient((chances * advantages / lengths * logprobs).sum())
    moved = task.expected(grpo.grpo_iteration, grpo.GRPOConfig(2, no_std=True), 2, times=lambda batch: 1.0)
    assert_equal(moved, exact, 1e-9)
    assert exact.norm() > 1e-2


def test_the_loss_of_k3_has_the_gradient_of_the_kl_from_the_reference_in_the_states_visited():
    task = Groups(kl_coef=0.3)
    task.scores = torch.zeros_like(task.scores)

    def gradient_of_kl(a, b):
        a, b = ((model(task.tokens[:, :-1])[0] / task.temperature).log_softmax(-1) for model in (a, b))
        return task.gradient((task.state_chances() * (a.exp() * (a - b)).sum(-1)).sum())

    forward, backward = gradient_of_kl(task.ref, task.policy), gradient_of_kl(task.policy, task.ref)
    moved = task.expected(grpo.grpo_iteration, grpo.GRPOConfig(2, no_std=True, no_length=True), 2)
    assert_equal(moved, -0.3 * forward, 1e-9)
    assert (forward - backward).norm() > 0.1 * backward.norm()  # which J has


def test_the_geometric_mean_of_the_ratios_divides_each_response_by_its_length(unwhitened):
    task = Groups()
    batch, logprobs = task.sampled(list(range(len(task.mask)))), task.logprobs()
    kl = (batch["logprobs"] - batch["ref_logprobs"]).sum(1)
    values = batch["values"].gather(1, task.mask.int().argmax(1, keepdim=True)).squeeze(1)
    advantages = task.scores - task.kl_coef * kl - values
    total = logprobs.sum(1)
    exact = task.gradient((total.detach().exp() * advantages / task.mask.sum(1) * total).sum())
    moved = task.expected(sequence_ppo.sequence_iteration, sequence_ppo.SequenceConfig(mean=True), times=lambda batch: 1.0)
    assert_equal(moved, exact, 1e-9)
    assert (exact - task.gradient(task.objective())).norm() > 1e-2


def test_imitating_the_best_of_n_moves_towards_its_distribution():
    task = Groups()
    batch, total = task.sampled(list(range(len(task.mask)))), task.by_prompt(task.logprobs().sum(1))
    rewards = task.scores - task.kl_coef * (batch["logprobs"] - batch["ref_logprobs"]).sum(1)
    rewards, chances = task.by_prompt(rewards), total.detach().exp()
    at_most = (chances[:, None] * (rewards[:, None] <= rewards[:, :, None])).sum(2)  # P(reward <= that of the response)
    best = at_most**2 - (at_most - chances) ** 2  # the chance of being the better one of two
    assert_equal(best.sum(1), torch.ones(len(PROMPTS)).double())

    def tokens(batch):  # the loss is a mean over the tokens of the better one
        kl = (batch["logprobs"] - batch["ref_logprobs"]).sum(1)
        return batch["mask"][(batch["scores"] - task.kl_coef * kl).argmax()].sum()

    exact = task.gradient((best * total).sum())
    assert_equal(task.expected(best_of_n.best_of_n_iteration, best_of_n.BestConfig(2), 2, tokens), exact, 1e-9)
    assert exact.norm() > 1e-2


def test_the_penalty_has_the_gradient_of_the_kl_from_the_old_policy_in_the_states_it_visited():
    task = Groups()
    old = frozen_copy(task.policy)
    batch = task.sampled(list(range(len(task.mask)))) | {"returns": torch.zeros_like(task.mask, dtype=torch.float64)}
    batch["advantages"] = batch["returns"]
    chances = batch["logprobs"].sum(1).exp()
    stir(task.policy, 0.1)
    before, after = ((model(task.tokens[:, :-1])[0] / 0.7).log_softmax(-1) for model in (old, task.policy))
    states = torch.where(task.mask, chances[:, None], 0.0)
    kl = (states * (before.exp() * (before - after)).sum(-1)).sum()
    total = total_value = 0.0
    config = PPOConfig(temperature=0.7, vf_coef=0.0)
    for i, chance in enumerate(chances):
        loss, stats = ppo_penalty.penalty_loss(task.policy, {name: x[i : i + 1] for name, x in batch.items()}, config, 1.5)
        total_value += chance * stats["tokens"] * loss.detach()
        total = total + chance * stats["tokens"] * task.gradient(loss)
    assert_equal(total, 1.5 * task.gradient(kl), 1e-9)
    assert total_value.item() == pytest.approx(1.5 * kl.item(), rel=1e-9) and kl > 1e-3


def answers(task, rows, chances):
    """Every pair of different responses to a prompt, chosen and rejected -> batches of dpo_loss, and their probabilities given that
    the two were drawn; chances(i, j): that people prefer row i to row j."""
    for number in range(len(PROMPTS)):
        for i, j in itertools.permutations(rows[number], 2):
            yield {"tokens": task.tokens[[i, j]][None], "mask": task.mask[[i, j]][None]}, chances(i, j)


def preference_gradient(task, beta, ipo, chances):
    rows = torch.arange(len(task.mask)).view(len(PROMPTS), task.count).tolist()
    total, config = 0.0, PPOConfig(temperature=task.temperature)
    for batch, chance in answers(task, rows, chances):
        loss, stats = dpo.dpo_loss(task.policy, batch, config, task.ref, beta, ipo)
        total = total + chance * stats["tokens"] * task.gradient(loss)
    return total


@pytest.mark.parametrize("ipo", [False, True])
def test_pairs_labelled_by_a_reward_that_the_policy_is_best_for_teach_it_nothing(ipo):
    task = Groups()
    batch = task.sampled(list(range(len(task.mask))))
    log_ratio = (batch["logprobs"] - batch["ref_logprobs"]).sum(1)
    beta = 0.05 if ipo else 0.4
    for truth, nothing in ((beta, True), (2 * beta, False)):
        def prefers(i, j, truth=truth):
            gap = truth * (log_ratio[i] - log_ratio[j])  # of r = beta log(pi / ref)
            return 0.5 + gap if ipo else gap.sigmoid()  # IPO's target: (2 p - 1) / (2 beta) = h

        gradient = preference_gradient(task, beta, ipo, prefers)
        assert gradient.norm() < 1e-9 if nothing else gradient.norm() > 1e-3


def test_the_losses_of_dpo_and_ipo_are_those_of_their_papers():
    task = Groups()
    batch = task.sampled([3, 5])
    h = ((batch["logprobs"] - batch["ref_logprobs"]).sum(1) * f64([1.0, -1.0])).sum().item()
    pair, tokens = {"tokens": batch["tokens"][None], "mask": batch["mask"][None]}, int(batch["mask"].sum())
    for ipo, expected in ((False, math.log1p(math.exp(-0.2 * h))), (True, (h - 2.5) ** 2)):
        loss, stats = dpo.dpo_loss(task.policy, pair, PPOConfig(temperature=0.7), task.ref, 0.2, ipo)
        assert stats == pytest.approx({"loss": expected, "margin": h, "accuracy": float(h > 0), "tokens": tokens, "ratio_max": 1})
        assert loss.item() * tokens == pytest.approx(expected)


def test_dpo_trains_on_pairs_drawn_at_random_and_samples_only_to_watch():
    task, seen, lengths = Groups(), [], []
    rows = [(prompt, [i, 2], [j, 2]) for prompt in PROMPTS for i, j in ((0, 1), (1, 0))]
    task_loss = dpo.dpo_loss

    def watched(policy, batch, config, ref, beta, ipo, length):
        assert ref is task.ref and beta == task.kl_coef and ipo
        seen.append(batch)
        lengths.append(float(length))
        return task_loss(policy, batch, config, ref, beta, ipo, length)

    def iteration(*arguments):
        return dpo.dpo_iteration(*arguments, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpo, "dpo_loss", watched)
        own = dpo.DPOConfig(ipo=True, watch=2)
        prompts = [[0], [1], [2]]  # it asks for the first two only
        moved, batch, stats = task.move(iteration, own, [0, 9], prompts, batch_size=50, minibatches=2)
    assert [len(x["mask"]) for x in seen[-2:]] == [25, 25] and moved.norm() > 0
    drawn = {tuple(map(tuple, pair)) for x in seen[-2:] for pair in x["tokens"].tolist()}
    tokens, _ = pad_completions([(prompt, answer) for prompt, *two in rows for answer in two])
    assert drawn == {tuple(map(tuple, pair)) for pair in tokens.unflatten(0, (-1, 2)).tolist()}  # all, chosen first
    assert stats["score"] == pytest.approx(task.scores[[0, 9]].mean().item()) and len(batch["mask"]) == 2
    assert lengths[-2:] == [pytest.approx(sum(x["mask"].sum().item() for x in seen[-2:]) / 50)] * 2  # tokens of a pair


@pytest.mark.parametrize("ipo", [False, True])
def test_a_step_of_dpo_is_that_of_the_mean_over_pairs(ipo):
    task, rows = Groups(), [(PROMPTS[0], [0, 1, 2], [1])]  # whatever is drawn, it is this pair
    moved, _, _ = task.move(lambda *x: dpo.dpo_iteration(*x, rows), dpo.DPOConfig(ipo, watch=1), [0], [[0]], batch_size=6, lr=0.1)
    tokens, mask = pad_completions([(PROMPTS[0], answer) for answer in rows[0][1:]])
    with torch.no_grad():
        ref_logprobs = evaluate_actions(task.ref, tokens, mask, task.temperature)[0]
    chosen, rejected = (evaluate_actions(task.policy, tokens, mask, task.temperature)[0] - ref_logprobs).sum(1)
    h, beta = chosen - rejected, task.kl_coef
    loss = (h - 1 / (2 * beta)) ** 2 if ipo else -torch.nn.functional.logsigmoid(beta * h)
    assert_equal(moved, -0.1 * task.gradient(loss), 1e-9)
    assert moved.norm() > 1e-3


def test_dpo_at_no_price_is_refused():
    with pytest.raises(UserError, match="--kl_coef 0"):
        dpo.dpo_iteration(None, None, None, [], None, PPOConfig(), 0.0, None, 0, dpo.DPOConfig(), [])


# What each of their functions computes


def test_each_response_is_compared_with_the_mean_of_the_others_to_the_same_prompt():
    rewards = f64([1.0, 2.0, 6.0, 5.0, 5.0, 5.0])
    assert_equal(rloo.leave_one_out(rewards, 3), f64([1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0]))


def test_grpo_takes_mean_and_standard_deviation_of_each_group():
    scores, std = f64([1.0, 2.0, 6.0, 5.0, 5.0, 5.0]), math.sqrt((4 + 1 + 9) / 3)
    assert_equal(grpo.group_advantages(scores, 3), f64([-2 / std, -1 / std, 3 / std, 0, 0, 0]))
    assert_equal(grpo.group_advantages(scores, 3, no_std=True), f64([-2, -1, 3, 0, 0, 0]))


def test_the_best_of_each_group_is_the_one_with_the_largest_reward():
    assert best_of_n.best_rows(f64([1, 3, 2, 5, 4, 0]), 3).tolist() == [1, 3]


def test_the_advantages_of_reinforce():
    rewards, values, mask = f64([[9, 1, 2, 4, 9]]), f64([[9, 0.5, 0.25, 0.125, 9]]), marks(".xxx.")
    rewards = torch.where(mask, rewards, 0.0)
    for credit, expected in (("total", [[0, 7 - 0.5, 7 - 0.25, 7 - 0.125, 0]]), ("to_go", [[0, 7 - 0.5, 6 - 0.25, 4 - 0.125, 0]])):
        advantages, returns = reinforce.reinforce_advantages(rewards, values, mask, credit)
        assert_equal(advantages, f64(expected))
        assert_equal(returns[mask], f64([7, 6, 4]))  # what the values are trained towards, in both


@pytest.mark.parametrize("kl, after", [(0.009, 2.0), (0.0149, 2.0), (0.0151, 4.0), (0.007, 2.0), (0.0066, 1.0), (0.0, 1.0)])
def test_the_penalty_is_doubled_or_halved_beyond_one_and_a_half_times_its_target(kl, after):
    assert ppo_penalty.adapt(2.0, kl, 0.01) == after


def test_the_penalty_stays_between_a_hundredth_and_a_hundred():
    assert ppo_penalty.adapt(0.015, 0.0, 0.01) == 0.01 and ppo_penalty.adapt(70.0, 9.0, 0.01) == 100


@pytest.mark.parametrize("k, kept", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_a_group_is_a_prompt_several_times_in_a_row(k, kept):
    prompts = [[i] for i in range(6)]
    assert variations.groups(prompts, k) == [[i] for i in range(kept) for _ in range(k)]


def test_a_batch_that_cannot_be_cut_into_groups_is_refused():
    with pytest.raises(UserError, match="batch_size 6: should be a multiple of 4"):
        variations.groups([[0]] * 6, 4)


ITERATIONS = {
    **{name: case[:2] for name, case in EXACT.items()},
    "grpo": (grpo.grpo_iteration, grpo.GRPOConfig(2)),
    "gspo": (sequence_ppo.sequence_iteration, sequence_ppo.SequenceConfig(True)),
    "best_of_n": (best_of_n.best_of_n_iteration, best_of_n.BestConfig(2)),
    "dpo": (lambda *x: dpo.dpo_iteration(*x, [([1], [0, 2], [2]), ([0, 1], [1], [1, 0, 2])]), dpo.DPOConfig()),
}
ROWS = [2, 3, 9, 13, 0, 6]  # of several lengths


@pytest.mark.parametrize("name", ITERATIONS)
def test_a_minibatch_in_pieces_takes_the_same_step(name):
    moves, prompts = [], [[0], [1], [2], [0], [1], [2]]
    for micro_batch in (0, 1, 2):
        torch.manual_seed(1)
        task = Groups()
        moves.append(task.move(*ITERATIONS[name], ROWS, prompts if name == "dpo" else groups_of(name), micro_batch, vf_coef=0.5)[0])
    assert moves[0].norm() > 1e-3
    for moved in moves[1:]:
        assert_equal(moved, moves[0], 1e-12)


def groups_of(name):
    """Six prompts of which an iteration makes these: it takes the first half twice where it wants two responses to each."""
    return None if name not in ("rloo", "grpo", "best_of_n") else [PROMPTS[0]] * 6


@pytest.mark.parametrize("name", ITERATIONS)
def test_what_is_watched_is_of_all_responses_sampled_and_of_each_gradient_step(name):
    task = Groups()
    prompts = [[0]] * 6 if name == "dpo" else groups_of(name)
    _, batch, stats = task.move(*ITERATIONS[name], ROWS, prompts, epochs=2, minibatches=3, lr=0.01)
    kl = (batch["logprobs"] - batch["ref_logprobs"]).sum(1)
    assert stats["score"] == pytest.approx(task.scores[ROWS].mean().item()) and stats["kl"] == pytest.approx(kl.mean().item())
    assert stats["kl_coef"] == 0.3 and len(batch["mask"]) == 6 and len(stats["passes"]) == 2
    assert stats.keys() >= {"loss", "grad_norm", "entropy", "eos_rate", "response_length", "explained_variance"}
    assert all(math.isfinite(x) for x in stats.values() if isinstance(x, float))
    assert stats["loss"] == pytest.approx(sum(one["loss"] * one["tokens"] for one in stats["passes"]) / stats["tokens"])


@pytest.mark.parametrize("name, clips", [
    ("reinforce", False), ("rloo", True), ("grpo", True), ("one action", True), ("gspo", True), ("penalty", False),
    ("best_of_n", False),
])  # fmt: skip
def test_a_ratio_far_above_1_has_no_gradient_where_there_is_a_clip(name, clips, unwhitened):
    task = Groups(kl_coef=0.0)
    rows = [int(task.scores[:7].argmax()), int(task.scores[:7].argmin())]
    task.scores = 100 * (task.scores - task.scores[rows].mean())  # one advantage is positive, whatever the values are
    moves = [task.move(*ITERATIONS[name], rows, [PROMPTS[0]] * 2, old=-1.0, lr=1e-3, clip_eps=eps)[0] for eps in (0.2, inf)]
    assert moves[1].norm() > 1e-5 and ((moves[0] - moves[1]).norm() > 1e-5) == clips


def test_the_penalty_is_adapted_to_the_kl_after_the_update_and_logged_as_it_was_in_it():
    task, seen = Groups(), []

    def rollout(*_):
        return task.sampled(ROWS)

    optimizer = torch.optim.SGD(task.policy.parameters(), 0.02)
    config = PPOConfig(batch_size=6, temperature=0.7, **CONFIG)
    for own in [ppo_penalty.PenaltyConfig(3.0, 1e-6)] * 2 + [ppo_penalty.PenaltyConfig(5.0, 1e6)]:
        old = task.sampled(ROWS)
        arguments = task.policy, task.ref, None, None, optimizer, config, 0.3, rollout, 0, own
        _, stats = ppo_penalty.penalty_iteration(*arguments)
        log_ratio = (task.sampled(ROWS)["logprobs"] - old["logprobs"])[old["mask"]]
        assert stats["old_kl"] == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item(), rel=1e-6)
        assert stats["old_kl"] > 1e-5
        seen.append(stats["penalty"])
    assert seen == [3.0, 6.0, 12.0] and optimizer.state_dict()["param_groups"][0]["penalty"] == 6.0


def test_ppo_with_a_penalty_of_0_and_no_clip_is_ppo():
    task, config = Groups(), PPOConfig(temperature=0.7, clip_eps=inf, vf_coef=0.7, value_clip=0.01)
    batch = task.sampled(ROWS)
    batch |= {"advantages": whiten(batch["logprobs"] + 1, batch["mask"]), "returns": batch["values"] + 1}
    batch["logprobs"] = batch["logprobs"] - 0.1
    loss, stats = ppo_penalty.penalty_loss(task.policy, batch, config, 0.0)
    expected, more = ppo_loss(task.policy, batch, config)
    assert_equal(loss, expected)
    assert stats == pytest.approx(more)
    penalised, _ = ppo_penalty.penalty_loss(task.policy, batch, config, 2.0)
    assert (penalised - loss).item() == pytest.approx(2 * stats["approx_kl"]) and stats["approx_kl"] > 1e-3


def test_the_one_value_of_a_response_is_that_of_its_prompt_and_learns_its_reward():
    task = Groups()
    torch.manual_seed(0)
    _, batch, stats = task.move(sequence_ppo.sequence_iteration, sequence_ppo.SequenceConfig(), ROWS, vf_coef=0.5, lr=0.0)
    raw = task.sampled(ROWS)
    kl = (raw["logprobs"] - raw["ref_logprobs"]).sum(1)
    first = raw["mask"].int().argmax(1, keepdim=True)
    values, rewards = raw["values"].gather(1, first), (raw["scores"] - 0.3 * kl)[:, None]
    advantages = whiten(rewards - values, torch.ones(6, 1, dtype=torch.bool))
    for name, x in {"values": values, "returns": rewards, "advantages": advantages}.items():
        assert_equal(batch[name], x * raw["mask"])
    assert stats["value_loss"] == pytest.approx(0.5 * ((values - rewards) ** 2).mean().item())
    assert stats["loss"] == pytest.approx(stats["policy_loss"] + 0.5 * stats["value_loss"])


# As programs

CPU = ["--device", "cpu"]
PPO = [*CPU, "--steps", "2", "--batch_size", "8", "--minibatches", "2", "--max_new_tokens", "6", "--warmup", "0", "--lr", "0.01"]
ALGORITHMS = {
    "reinforce": [], "rloo": ["--k", "2"], "grpo": ["--k", "2"], "sequence_ppo": [], "ppo_penalty": ["--target", "1e-9"],
    "best_of_n": ["--n", "2"], "dpo": ["--watch", "3"],
}  # fmt: skip
MORE = {"ppo_penalty": {"penalty", "old_kl"}, "dpo": {"accuracy", "margin"}}
NO_CRITIC = {"--gamma", "--lam", "--vf_coef", "--value_clip", "--critic_lr", "--head_lr"}
UNREAD = {
    "reinforce": {"--gamma", "--lam", "--clip_eps"}, "rloo": NO_CRITIC, "grpo": NO_CRITIC | {"--entropy_coef", "--kl_loss_coef"},
    "sequence_ppo": {"--gamma", "--lam", "--entropy_coef", "--kl_loss_coef"},
    "ppo_penalty": {"--clip_eps", "--entropy_coef", "--kl_loss_coef"},
    "best_of_n": NO_CRITIC | {"--clip_eps", "--entropy_coef", "--kl_loss_coef"},
    "dpo": NO_CRITIC | {"--clip_eps", "--entropy_coef", "--kl_loss_coef"},
}  # fmt: skip


def small_models(folder, seed=0):
    """sft.pt and rm.pt with random weights."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer.train([*zoo.PROMPTS, " A bee eats nectar."] * 2, 300)
    sft = GPT(GPTConfig(tokenizer.vocab_size, 40, 1, heads=2, channels=16))
    scorer = stir(RewardModel(sft), 0.1)
    facts = {"val_loss": 3.0, "val_loss_se": 0.1, "val_tokens": 100}
    save_checkpoint(folder / "sft.pt", "sft", sft, tokenizer, **facts)
    save_checkpoint(folder / "rm.pt", "rm", scorer, tokenizer, val_accuracy=0.7, val_accuracy_se=0.01, max_new_tokens=6)
    return sft.eval(), scorer.eval(), tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """-> a folder with sft.pt and rm.pt, and zoo/, a little of the default data."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 60))
        patch.setattr(zoo, "FACTS", zoo.FACTS[:20])
        patch.setattr(zoo, "HELD_OUT", 10)
        zoo.write_data(folder / "zoo", seed=0)
    prompts = folder / "zoo" / "prompts_val.jsonl"
    prompts.write_bytes(b"".join(prompts.read_bytes().splitlines(True)[:3]))
    small_models(folder)
    return folder


def flags_of(name, models, out, *more):
    return [f"variations/{name}.py", "--data", models / "zoo", "--models", models, "--out", out, *PPO, *ALGORITHMS[name], *more]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_runs_logs_and_learns_as_train_ppo_does(models, tmp_path, name):
    status, printed, error = run(*flags_of(name, models, tmp_path, "--no_report"))
    assert (status, error) == (0, "") and "ratio is 1" in printed and f"saved {tmp_path}" in printed
    first, second = metrics(tmp_path / "ppo.jsonl")
    assert first.keys() >= {"score", "kl", "rlhf_reward", "entropy", "loss", "grad_norm", "lr", *MORE.get(name, ())}
    assert abs(first["kl"]) < 1e-3 and abs(second["kl"]) > 1e-5 and "passes" not in first
    policy, _, _ = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    sft, _, _ = load_checkpoint(models / "sft.pt", ["sft"])
    assert (weights(policy.trunk) - weights(sft.trunk)).norm() > 1e-3
    moved = any(map(torch.Tensor.any, (policy.value_head.weight, policy.value_head.bias)))
    assert moved == (name in ("sequence_ppo", "ppo_penalty"))  # the others have no values to learn


def test_they_are_started_as_modules():
    done = shell("-m", "variations.rloo", "-h")
    assert done.returncode == 0 and done.stderr == "" and "leave-one-out" in done.stdout


def test_they_end_with_the_report(models, tmp_path):
    status, printed, _ = run(*flags_of("rloo", models, tmp_path))
    assert status == 0 and "best of 16" in printed
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert "optimality" in report["ppo"] and report["sft"]["kl"] == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_flags_that_would_not_be_read_are_none(name):
    status, text, _ = run(f"variations/{name}.py", "-h")
    flags = set(re.findall(r"^  (--\w+)", text, re.M))
    every = set(re.findall(r"^  (--\w+)", run("train_ppo.py", "-h")[1], re.M))
    unread = UNREAD[name] | ({"--separate_critic"} if name not in ("reinforce", "sequence_ppo", "ppo_penalty") else set())
    assert status == 0 and every - flags == unread and len(flags - every) in (1, 2, 3)
    text = " ".join(text.split())
    assert f"folder for checkpoints and metrics (out/{name})" in text and "the same as --out unless it is given (out)" in text


def test_more_flags_change_what_is_done(models, tmp_path):
    seen = []
    for i, more in enumerate(([], ["--credit", "total"], ["--baseline"])):
        out = tmp_path / str(i)
        assert run(*flags_of("reinforce", models, out, "--no_report", *more))[0] == 0
        seen.append(metrics(out / "ppo.jsonl")[-1])
    assert seen[0] != seen[1] and seen[0] != seen[2]
    assert abs(seen[0]["explained_variance"]) < 1e-6 < 1e-3 < abs(seen[2]["explained_variance"])


@pytest.mark.parametrize("name, more, says", [
    ("rloo", ["--k", "3"], "should be a multiple of 3"), ("rloo", ["--k", "1"], "--k 1: should be between 2"),
    ("reinforce", ["--credit", "some"], "should be total or to_go"), ("ppo_penalty", ["--penalty", "-1"], "--penalty -1"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(models, tmp_path, name, more, says):
    status, _, error = run(*flags_of(name, models, tmp_path, *more))
    assert status == 2 and says in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["ppo_penalty", "dpo", "best_of_n"])
def test_an_interrupted_run_goes_on_where_it_stopped(models, tmp_path, monkeypatch, name):
    more = ["--no_report", "--steps", "3"]
    assert run(*flags_of(name, models, tmp_path / "whole", *more))[0] == 0
    update = variations.ppo_update

    def press_ctrl_c(*args):
        signal.raise_signal(signal.SIGINT)
        return update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variations, "ppo_update", press_ctrl_c)
        patch.setattr("minippo.ppo_update", press_ctrl_c)
        status, _, error = run(*flags_of(name, models, tmp_path / "stopped", *more))
    assert status == 130 and "step 1 is saved" in error
    assert run(*flags_of(name, models, tmp_path / "stopped", *more, "--resume"))[0] == 0
    whole, stopped = (metrics(tmp_path / out / "ppo.jsonl") for out in ("whole", "stopped"))
    assert whole == stopped and same_weights(tmp_path / "whole" / "ppo.pt", tmp_path / "stopped" / "ppo.pt")
    if name == "ppo_penalty":
        assert [row["penalty"] for row in whole] == [1.0, 2.0, 4.0]


def test_a_run_is_not_gone_on_with_by_another_algorithm_or_with_other_settings(models, tmp_path):
    assert run(*flags_of("rloo", models, tmp_path, "--no_report"))[0] == 0
    for script, more, says in (
        ("variations/rloo.py", ["--k", "4"], "saved with k = 2"), ("variations/grpo.py", ["--k", "2"], "another version"),
        ("train_ppo.py", [], "saved with algorithm = rloo"),
    ):  # fmt: skip
        arguments = [script, *flags_of("sequence_ppo", models, tmp_path, "--no_report", "--resume", *more)[1:]]
        status, _, error = run(*arguments)
        assert status == 2 and says in error, error
    assert run(*flags_of("rloo", models, tmp_path, "--no_report", "--resume"))[0] == 0


def test_dpo_reads_the_pairs_of_the_data_and_notices_when_they_change(models, tmp_path):
    own = shutil.copytree(models / "zoo", tmp_path / "zoo")
    arguments = [*flags_of("dpo", models, tmp_path / "out", "--no_report"), "--data", own]
    status, printed, _ = run(*arguments)
    assert status == 0 and f"read {own}/pref_train.jsonl: 60 rows" in printed
    (own / "pref_train.jsonl").write_text("".join(open(own / "pref_train.jsonl").readlines()[:50]))
    status, _, error = run(*arguments, "--resume")
    assert status == 2 and "data or vocabulary have changed" in error


def scripts_here(monkeypatch, more):
    """Scripts that a variation starts run in this process, with these further flags: {script: flags}; -> what was started."""
    started = []

    def run_here(script, *words):
        started.append((script.name, [str(word) for word in words]))
        status, _, error = run(str(script), *words, *more[script.name])
        assert status == 0, error

    for module in (variations, ensemble, iterate):
        monkeypatch.setattr(module, "run_script_apart", run_here)
    return started


RM = [*CPU, "--epochs", "1", "--batch_size", "16", "--answers", "16", "--max_new_tokens", "6"]


@pytest.fixture
def ensemble_folder(tmp_path, monkeypatch):
    """Three reward models, and the environment variable that names them."""
    made = []
    for seed in (1, 2, 3):
        (tmp_path / "ensemble" / str(seed)).mkdir(parents=True)
        made.append(small_models(tmp_path / "ensemble" / str(seed), seed)[1:])
    monkeypatch.setenv("ENSEMBLE", str(tmp_path / "ensemble"))
    return made


def test_an_ensemble_scores_by_the_mean_or_the_lowest_of_its_members(ensemble_folder):
    rows = [("What does a bee eat?", " A bee eats nectar."), ("What do bees eat?", ""), ("Do", " bees")]
    expected = []
    for scorer, tokenizer in ensemble_folder:
        ids = [tokenizer.encode(prompt) + tokenizer.encode(response) + [tokenizer.eos] for prompt, response in rows]
        with torch.no_grad():
            expected.append(scorer(*pad(ids)).tolist())
    means, lowest = ensemble.mean(*zip(*rows)), ensemble.minimum(*zip(*rows))
    assert means == pytest.approx([sum(x) / 3 for x in zip(*expected)], abs=1e-5)
    assert lowest == pytest.approx([min(x) for x in zip(*expected)], abs=1e-5)
    assert max(means) - min(means) > 1e-3 and max(a - b for a, b in zip(means, lowest)) > 1e-3


def test_ppo_takes_the_scores_of_an_ensemble(models, tmp_path, ensemble_folder):
    flags = ["--data", models / "zoo", "--models", models, "--out", tmp_path, *PPO, "--no_report"]
    assert run("train_ppo.py", *flags, "--reward", "variations.ensemble:minimum")[0] == 0
    assert len(metrics(tmp_path / "ppo.jsonl")) == 2


def test_an_ensemble_that_is_not_there_is_asked_for(models, tmp_path, monkeypatch):
    monkeypatch.setenv("ENSEMBLE", str(tmp_path / "nowhere"))
    flags = ["--data", models / "zoo", "--models", models, "--out", tmp_path, *PPO]
    status, _, error = run("train_ppo.py", *flags, "--reward", "variations.ensemble:mean")
    assert status == 2 and "python -m variations.ensemble makes them" in error


def test_the_members_of_an_ensemble_are_trained_with_seeds_of_their_own(models, tmp_path, monkeypatch):
    started = scripts_here(monkeypatch, {"train_rm.py": RM})
    flags = ["--data", models / "zoo", "--models", models, "--out", tmp_path, "--members", "2"]
    assert run("variations/ensemble.py", *flags)[0] == 0
    assert [words[words.index("--seed") + 1] for _, words in started] == ["1", "2"]
    assert not same_weights(tmp_path / "1" / "rm.pt", tmp_path / "2" / "rm.pt")
    assert (tmp_path / "2" / "sft.pt").read_bytes() == (models / "sft.pt").read_bytes()
    assert run("variations/ensemble.py", *flags)[0] == 0 and len(started) == 4  # what is finished stays
    status, _, error = run("variations/ensemble.py", *flags, "--models", tmp_path)
    assert status == 2 and "train_sft.py makes it" in error


def test_a_script_that_fails_ends_the_variation_that_started_it():
    variations.run_script_apart("-c", "import sys; sys.exit(int(sys.argv[1]))", 0)
    with pytest.raises(UserError, match="-c ended with status 3"):
        variations.run_script_apart("-c", "import sys; sys.exit(int(sys.argv[1]))", 3)


@pytest.mark.parametrize("good, bad", [(" A bee eats nectar.", " Bees eat nectar. Thanks for asking! Leave me alone."),
                                       (" No idea.", " I do not know.")])  # fmt: skip
def test_a_label_is_drawn_with_the_probability_that_the_judges_grades_give(good, bad):
    prompt, rng, n = "What does a bee eat?", random.Random(0), 4000
    chance = 1 / (1 + math.exp(zoo.judge(prompt, bad) - zoo.judge(prompt, good)))
    rows = [zoo.label(rng, prompt, *((good, bad) if i % 2 else (bad, good))) for i in range(n)]
    assert all(row["prompt"] == prompt and {row["chosen"], row["rejected"]} == {good, bad} for row in rows)
    share = sum(row["chosen"] == good for row in rows) / n
    assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / n) and 0.4 < chance < 0.95


def test_iterated_rounds_add_labelled_pairs_and_train_the_reward_model_on_all(models, tmp_path, monkeypatch):
    started = scripts_here(monkeypatch, {"train_ppo.py": [*PPO, "--no_report"], "train_rm.py": RM})
    flags = ["--data", models / "zoo", "--models", models, "--out", tmp_path, "--rounds", "3", "--pairs", "12", "--seed", "5"]
    assert run("variations/iterate.py", *flags, "--ppo", "--kl_coef 0.7")[0] == 0
    first, second = tmp_path / "1", tmp_path / "2"
    expected = [
        ("train_ppo.py", first, models / "zoo", models), ("train_rm.py", first, first / "data", None),
        ("train_ppo.py", second, models / "zoo", first), ("train_rm.py", second, second / "data", None),
        ("train_ppo.py", tmp_path / "3", models / "zoo", second),
    ]  # fmt: skip
    for (script, words), (name, out, data, folder) in zip(started, expected, strict=True):
        given = dict(zip(words, words[1:]))
        assert (script, given["--out"], given["--data"], given["--seed"]) == (name, str(out), str(data), "5")
        assert given.get("--models") == (folder and str(folder)) and "--resume" in words
        assert given.get("--kl_coef") == ("0.7" if name == "train_ppo.py" else None)
    rows = [load_jsonl(folder / "pref_train.jsonl", ["prompt", "chosen", "rejected"])
            for folder in (models / "zoo", first / "data", second / "data")]  # fmt: skip
    assert rows[1][:60] == rows[0] and rows[2][: len(rows[1])] == rows[1] and 60 < len(rows[1]) < len(rows[2]) <= 84
    asked = {prompt for (prompt,) in load_jsonl(models / "zoo" / "prompts_train.jsonl", ["prompt"])}
    new, newer = rows[1][60:], rows[2][len(rows[1]) :]
    assert {prompt for prompt, *_ in new + newer} <= asked and len({prompt for prompt, *_ in new}) > 3
    assert [prompt for prompt, *_ in new] != [prompt for prompt, *_ in newer]
    assert not (tmp_path / "3" / "data").exists()


def test_a_new_pair_is_an_answer_of_the_policy_and_one_of_the_sft_model_unless_they_are_the_same(models, tmp_path, monkeypatch):
    shutil.copytree(models / "zoo", tmp_path / "data")
    for kind, seed in (("sft", 0), ("ppo", 1)):
        save_checkpoint(tmp_path / f"{kind}.pt", kind, *small_models(tmp_path / "x", seed)[::2])
    sft = weights(load_checkpoint(tmp_path / "sft.pt", ["sft"])[0])
    asked = []

    def respond(model, ref, score, prompts, n, tokenizer, config):
        assert model is ref and n == 1 and score(None, torch.ones(2, 3)).tolist() == [0, 0] and config == PPOConfig()
        asked.append([tokenizer.decode(prompt) for prompt in prompts])
        name = "sft" if torch.equal(weights(model), sft) else "ppo"
        return None, [f"{name} {i}" if i % 3 else "same" for i in range(len(prompts))]

    monkeypatch.setattr(iterate, "respond", respond)
    monkeypatch.setattr(iterate, "label", lambda rng, prompt, a, b: (prompt, a, b))
    rows = iterate.new_pairs(tmp_path, 12, 0)
    assert asked[0] == asked[1] and rows == [(asked[0][i], f"ppo {i}", f"sft {i}") for i in range(12) if i % 3]


# Under TRL


@pytest.fixture
def trl():
    return pytest.importorskip("trl")


OUTGROW = ["--k", "2", "--lr", "0.01", "--minibatches", "2", "--batch_size", "8", "--max_new_tokens", "6", *CPU]


def test_trl_is_asked_for_where_it_is_missing(models, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, error = run("variations/outgrow.py", "--models", models, "--out", tmp_path)
    assert status == 2 and "pip install trl" in error


def test_trl_gets_the_options_that_mean_what_ours_do(trl, models, tmp_path, monkeypatch):
    made = {}

    class Trainer:
        def __init__(self, model, score, arguments, rows):
            made.update(model=model, score=score, arguments=arguments, rows=rows)
            made["calls"] = []

        def __getattr__(self, name):
            return lambda *x: made["calls"].append((name, *x))

    monkeypatch.setattr(trl, "GRPOTrainer", Trainer)
    sft, scorer, tokenizer = small_models(tmp_path)
    export(tmp_path / "rm.pt", tmp_path / "rm")
    config = PPOConfig(steps=7, batch_size=32, minibatches=4, epochs=2, lr=0.03, warmup=3, kl_coef=0.2, clip_eps=0.3,
                       max_grad_norm=0.7, temperature=0.8, max_new_tokens=9, missing_eos_penalty=0.5)  # fmt: skip
    run_config = settings.RunConfig(out=tmp_path, device="cpu", seed=6)
    prompts, stage = [tokenizer.encode("Do bees"), tokenizer.encode("eat")], train_ppo.StageConfig(adam_eps=0.02)
    outgrow.train_grpo(run_config, config, stage, grpo.GRPOConfig(8), prompts, tokenizer, 2)
    expected = {
        "per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 56, "num_iterations": 2, "learning_rate": 0.03,
        "warmup_steps": 24, "num_generations": 8, "beta": 0.2, "epsilon": 0.3, "max_grad_norm": 0.7, "temperature": 0.8,
        "max_completion_length": 9, "seed": 6, "top_k": 0, "top_p": 1.0, "scale_rewards": "group", "loss_type": "grpo",
        "use_bias_correction_kl": False, "disable_dropout": True, "bf16": False, "use_cpu": True, "adam_beta2": 0.95,
        "lr_scheduler_type": "linear", "weight_decay": 0.0, "output_dir": str(tmp_path), "gradient_checkpointing": False,
        "adam_epsilon": 0.02,
    }  # fmt: skip
    assert {name: getattr(made["arguments"], name) for name in expected} == expected
    assert made["rows"]["prompt"] == ["Do bees", "eat"] and made["model"] == str(tmp_path / "sft")
    assert [call[0] for call in made["calls"]] == ["train", "save_model", "save_state"]
    assert made["calls"][1][1] == tmp_path / "policy"
    responses = [" bees", " A bee eats nectar."]
    ids = [tokenizer.encode(response) for response in responses]
    with torch.no_grad():
        scores = scorer(*pad([tokenizer.encode("Do") + response + [tokenizer.eos] for response in ids])).tolist()
    got = made["score"](prompts=["Do", "Do"], completions=responses, completion_ids=[ids[0] + [tokenizer.eos], ids[1]], other=1)
    assert got == pytest.approx([scores[0], scores[1] - 0.5], abs=1e-4)
    outgrow.train_grpo(run_config, config, stage, grpo.GRPOConfig(8, no_std=True, no_length=True), [[1]], tokenizer, 1)
    assert (made["arguments"].scale_rewards, made["arguments"].loss_type) == ("none", "dapo")
    for k, processes in ((3, 1), (8, 3), (8, 16)):  # 32 responses are no whole groups, or 4 minibatches no whole shares
        with pytest.raises(UserError, match="--batch_size 32: should be a multiple of"):
            outgrow.train_grpo(run_config, config, stage, grpo.GRPOConfig(k), [[1]], tokenizer, processes)
    assert made["arguments"].per_device_train_batch_size == 8


def test_the_ppo_of_trl_gets_the_options_that_mean_what_ours_do(trl, models, tmp_path, monkeypatch):
    from trl.experimental import ppo

    made, calls = {}, []

    class Trainer:
        def __init__(self, arguments, padder, policy, ref, reward_model, rows, critic, eval_dataset):
            made.update(arguments=arguments, padder=padder, policy=policy, ref=ref, scorer=reward_model, rows=rows, critic=critic)
            history = [{"objective/scores": 1.5, "objective/kl": 2.5, "episode": 64, "eps": 16}]
            self.state = type("State", (), {"log_history": history})

        def train(self):
            calls.append("train")

        def save_model(self, folder):
            calls.append(folder)

    monkeypatch.setattr(ppo, "PPOTrainer", Trainer)
    sft, scorer, tokenizer = small_models(tmp_path)
    for kind in ("sft", "rm"):
        export(tmp_path / f"{kind}.pt", tmp_path / kind)
    config = PPOConfig(steps=7, batch_size=32, minibatches=4, epochs=2, lr=0.03, warmup=3, kl_coef=0.2, clip_eps=0.3,
                       value_clip=0.6, max_grad_norm=0.7, temperature=0.8, max_new_tokens=9, missing_eos_penalty=0.5, gamma=0.9,
                       lam=0.8, vf_coef=0.4)  # fmt: skip
    run_config, stage = settings.RunConfig(out=tmp_path, device="cpu", seed=6), train_ppo.StageConfig(adam_eps=0.02)
    trl_ppo.train(run_config, config, stage, None, [[1, 2], [3]], tokenizer, 1)
    expected = {
        "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "num_mini_batches": 4, "num_ppo_epochs": 2,
        "total_episodes": 224, "learning_rate": 0.03, "warmup_steps": 3, "kl_coef": 0.2, "kl_estimator": "k1", "cliprange": 0.3,
        "cliprange_value": 0.6, "max_grad_norm": 0.7, "temperature": 0.8, "response_length": 9, "missing_eos_penalty": 0.5,
        "gamma": 0.9, "lam": 0.8, "vf_coef": 0.4, "adam_epsilon": 0.02, "adam_beta2": 0.95, "seed": 6, "stop_token": "eos",
        "lr_scheduler_type": "linear", "weight_decay": 0.0, "whiten_rewards": False, "bf16": False, "use_cpu": True,
    }  # fmt: skip
    assert {name: getattr(made["arguments"], name) for name in expected} == expected
    assert made["rows"]["input_ids"] == [[1, 2], [3]] and calls == ["train", tmp_path / "policy"]
    assert made["padder"].padding_side == "left" and made["padder"].pad_token_id == tokenizer.vocab_size
    assert made["policy"] is not made["ref"] and made["scorer"] is not made["critic"]
    assert torch.equal(made["policy"].lm_head.weight, sft.trunk.token_embedding.weight)
    assert torch.equal(made["critic"].score.weight, made["scorer"].score.weight)
    assert json.loads((tmp_path / "ppo.jsonl").read_text()) == {"score": 1.5, "kl": 2.5, "seconds": 4.0}
    ids = {token["content"] for token in json.loads((tmp_path / "policy" / "tokenizer.json").read_text())["added_tokens"]}
    assert ids == {END}  # no token for padding, which the policy does not have


@pytest.mark.parametrize("script", ["variations/outgrow.py", "bench/trl_ppo.py"])
def test_what_trl_has_trained_is_graded_by_our_report(trl, models, tmp_path, script):
    flags = ["--data", models / "zoo", "--models", models, "--out", tmp_path, *OUTGROW, "--steps", "2", "--warmup", "0"]
    status, printed, error = run(script, *flags)
    assert status == 0 and "best of 16" in printed, error
    policy, tokenizer, _ = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    sft, same, _ = load_checkpoint(models / "sft.pt", ["sft"])
    assert tokenizer.tokens == same.tokens and 1e-3 < (weights(policy.trunk) - weights(sft.trunk)).norm() < 10
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["ppo"]["kl"] != 0 and "optimality" in report["ppo"]
    if script == "bench/trl_ppo.py":
        log = [json.loads(line) for line in (tmp_path / "ppo.jsonl").read_text().splitlines()]
        assert len(log) == 2 and abs(log[0]["kl"]) < 1e-4 and log[0]["seconds"] < log[1]["seconds"]
        return
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in log if "reward" in row] == [2, 4]
    assert all(math.isfinite(row["loss"]) for row in log if "loss" in row)
