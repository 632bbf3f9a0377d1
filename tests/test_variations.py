"""PPO's neighbours: what a step is on average, exactly; and that they run as train_ppo.py does.
Run: python -m pytest tests/test_variations.py (the last tests need trl)

The first part lists every group of responses to a prompt, computes its loss as if it had been
sampled, and adds up the losses, times the probabilities of the groups: the gradient of this sum is
the expected step.
"""

import inspect
import itertools
import json
import math
import random
import re
import shutil
import signal
import sys
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import minippo
import variations
from cli import metrics, run, same_weights
from data import zoo
from minippo import (
    GPT,
    GPTConfig,
    PPOConfig,
    RewardModel,
    evaluate_actions,
    frozen_copy,
)
from plumbing import fast, training
from plumbing.checkpoints import load_checkpoint, read_contents, save_checkpoint
from plumbing.errors import UserError
from plumbing.rows import load_jsonl, pad, pad_completions, read_ids
from plumbing.settings import RunConfig
from plumbing.tokenizer import Tokenizer
from plumbing.training import loss_in_pieces
from tiny import assert_equal, f64, inf, stir, tiny_gpt, weights
from train_ppo import StageConfig
from variations import best_of_n, dpo, ensemble, grpo, iterate, ppo_ptx, rloo
from variations.ppo_penalty import PenaltyLoss, adapt_penalty
from variations.reinforce import reinforce_advantages, reinforce_loss
from variations.sequence_ppo import sequence_advantages, sequence_loss

PROMPTS = [[1, 0, 1], [0, 1]]  # of different lengths


class Task:
    """Three tokens, the last of which ends a response; every response to every prompt is a row."""

    def __init__(self, kl_coef=0.3, horizon=2):
        self.policy, self.ref = tiny_gpt(3), frozen_copy(tiny_gpt(3))
        words = [x for n in range(horizon + 1) for x in itertools.product((0, 1), repeat=n)]
        rows = [(prompt, [*x, 2][:horizon]) for prompt in PROMPTS for x in words]
        self.tokens, self.mask = pad_completions(rows)
        self.groups = torch.arange(len(rows)).view(len(PROMPTS), -1)  # the rows of each prompt
        self.scores = torch.randn(len(rows), dtype=torch.float64)
        exact = {"minibatches": 1, "whiten": False, "vf_coef": 0.0, "max_grad_norm": inf}
        self.config = PPOConfig(temperature=0.7, kl_coef=kl_coef, **exact)

    def evaluate(self, model):
        return evaluate_actions(model, self.tokens, self.mask, 0.7)

    def total(self):
        """log pi of the responses: (B,)."""
        return self.evaluate(self.policy)[0].sum(1)

    def kl(self):
        """Its estimate from each response: (B,)."""
        return self.total() - self.evaluate(self.ref)[0].sum(1)

    def objective(self):
        """J, summed over the prompts."""
        chances = self.total().exp()
        assert_equal(chances.sum(), f64(float(len(PROMPTS))))  # no response is missing
        return (chances * (self.scores - self.config.kl_coef * self.kl())).sum()

    def kl_in_states_visited(self, a, b):
        """KL(a || b) of the choices, summed over the states; which are visited counts as given."""
        a, b = ((x(self.tokens[:, :-1])[0] / 0.7).log_softmax(-1) for x in (a, b))
        chances = self.mask * self.total().detach().exp()[:, None]
        return (chances * (a.exp() * (a - b)).sum(-1)).sum()

    def gradient(self, x):
        parameters = list(self.policy.parameters())
        found = torch.autograd.grad(x, parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in found])

    def rollout(self):
        """What minippo.rollout would return, had it sampled every row once."""
        with torch.no_grad():
            old_logprobs, old_values, _ = self.evaluate(self.policy)
            ref_logprobs, _, _ = self.evaluate(self.ref)
        batch = {"tokens": self.tokens, "mask": self.mask, "scores": self.scores}
        batch |= {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        return batch | {"old_values": old_values}

    def loss(self, compute_advantages, loss_of, batch):
        """As a sum: times what it was divided by."""
        batch = batch | compute_advantages(batch, self.config, self.config.kl_coef)
        loss, stats = loss_of(self.policy, batch, self.config)
        return stats["count"] * loss

    def expected_step(self, compute_advantages, loss_of, k=1):
        """E of the step on k responses to a prompt, per response."""
        batch, chances, loss = self.rollout(), self.total().detach().exp(), 0.0
        for rows in self.groups.tolist():
            for group in map(list, itertools.product(rows, repeat=k)):
                group_loss = self.loss(compute_advantages, loss_of, part(batch, group))
                loss = loss + chances[group].prod() * group_loss / k
        step = -self.gradient(loss)
        assert step.norm() > 1e-2
        return step


def part(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


def reinforced(credit, baseline):
    found = partial(reinforce_advantages, credit=credit, baseline=baseline)
    return found, partial(reinforce_loss, baseline=baseline)


def grouped(no_std=False, no_length=False):
    compute_advantages = partial(grpo.grpo_advantages, k=2, no_std=no_std)
    return compute_advantages, partial(grpo.grpo_loss, no_length=no_length)


RLOO = partial(rloo.rloo_advantages, k=2), rloo.rloo_loss
BEST = partial(best_of_n.best_of_n_advantages, n=2), best_of_n.imitation_loss
RUNGS = [reinforced(*x) for x in itertools.product(("total", "to_go"), (True, False))]
EXACT = {
    **{f"rung {i}": (*rung, 1) for i, rung in enumerate(RUNGS)},
    "one action": (sequence_advantages, sequence_loss, 1),
    "penalty": (minippo.compute_advantages, PenaltyLoss(), 1),
    "rloo": (*RLOO, 2),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_expected_step_is_the_gradient_of_score_minus_beta_kl(name):
    task = Task()
    assert_equal(task.expected_step(*EXACT[name]), task.gradient(task.objective()), 1e-9)


def test_the_rungs_of_reinforce_differ_in_every_single_step():
    task = Task()
    moves = [task.gradient(task.loss(*rung, part(task.rollout(), [4]))) for rung in RUNGS]
    assert all((a - b).norm() > 1e-3 for a, b in itertools.combinations(moves, 2))


def test_a_mean_that_holds_the_response_itself_shrinks_the_gradient_of_the_score():
    task = Task(kl_coef=0.0)
    expected = task.expected_step(*grouped(no_std=True, no_length=True), k=2)
    assert_equal(expected, task.gradient(task.objective()) / 2, 1e-9)  # (k - 1) / k


def test_grpo_with_std_follows_the_chance_of_winning_and_not_the_score():
    task = Task(kl_coef=0.0)
    chances, scores = task.total().exp()[task.groups], task.scores[task.groups]
    sign = (scores[:, :, None] - scores[:, None]).sign()
    wins = (chances[:, :, None] * chances.detach()[:, None] * sign).sum()  # P(win) - P(lose)
    exact, score = task.gradient(wins), task.gradient(task.objective())
    step = task.expected_step(*grouped(no_length=True), k=2)
    assert_equal(step, exact / math.sqrt(2), 1e-9)
    assert 0 < torch.cosine_similarity(exact, score, 0) < 0.999  # another direction


def test_grpo_divides_each_response_by_its_length():
    task = Task(kl_coef=0.0)
    total, scores = task.total()[task.groups], task.scores[task.groups]
    chances, lengths = total.detach().exp(), task.mask.sum(1)[task.groups]
    advantages = (scores - (chances * scores).sum(1, keepdim=True)) / 2  # E[A | the response]
    exact = task.gradient((chances * advantages / lengths * total).sum())
    assert_equal(task.expected_step(*grouped(no_std=True), 2), exact, 1e-9)


def test_the_loss_of_k3_has_the_gradient_of_the_kl_from_the_reference():
    task = Task()
    task.scores = torch.zeros_like(task.scores)
    there = task.gradient(task.kl_in_states_visited(task.ref, task.policy))
    back = task.gradient(task.kl_in_states_visited(task.policy, task.ref))  # as in J
    assert_equal(task.expected_step(*grouped(True, True), k=2), -0.3 * there, 1e-9)
    assert (there - back).norm() > 0.1 * back.norm()


def test_the_geometric_mean_of_the_ratios_divides_each_response_by_its_length():
    task = Task()
    first = task.mask.int().argmax(1, keepdim=True)
    values = task.evaluate(task.policy)[1].gather(1, first).squeeze(1)
    advantages = (task.scores - 0.3 * task.kl() - values).detach()
    total, lengths = task.total(), task.mask.sum(1)
    exact = task.gradient((total.detach().exp() * advantages / lengths * total).sum())
    assert_equal(task.expected_step(*GSPO), exact, 1e-9)


def test_imitating_the_best_of_n_moves_towards_its_distribution():
    task = Task()
    rewards, total = (task.scores - 0.3 * task.kl())[task.groups], task.total()[task.groups]
    chances = total.detach().exp()
    at_most = (chances[:, None] * (rewards[:, None] <= rewards[:, :, None])).sum(2)
    best = at_most**2 - (at_most - chances) ** 2  # the chance of being the better one of two
    assert_equal(best.sum(1), f64([1.0, 1.0]))
    assert_equal(task.expected_step(*BEST, 2), task.gradient((best * total).sum()) / 2, 1e-9)


def test_the_penalty_has_the_gradient_of_the_kl_from_the_old_policy():
    task, loss_of, old = Task(), PenaltyLoss(penalty=1.5), tiny_gpt(3)
    task.policy, policy = old, task.policy
    batch, chances = task.rollout(), task.total().detach().exp()
    batch |= {"whitened": 0 * batch["old_logprobs"], "returns": batch["old_values"]}
    loss = 0.0
    for i, chance in enumerate(chances):
        row_loss, stats = loss_of(policy, part(batch, [i]), task.config)
        loss = loss + chance * stats["count"] * row_loss
    kl = task.kl_in_states_visited(old, policy)
    task.policy = policy
    assert_equal(loss, 1.5 * kl, 1e-9)
    assert_equal(task.gradient(loss), 1.5 * task.gradient(kl), 1e-9)


@pytest.mark.parametrize("ipo", [False, True])
def test_pairs_labelled_by_a_reward_that_the_policy_is_best_for_teach_it_nothing(ipo):
    task, beta = Task(), 0.05 if ipo else 0.4
    log_ratio = task.kl()  # log(pi / ref) of each response
    for truth, nothing in ((beta, True), (2 * beta, False)):
        loss = 0.0
        pairs = [itertools.permutations(rows, 2) for rows in task.groups.tolist()]
        for i, j in itertools.chain(*pairs):
            gap = truth * (log_ratio[i] - log_ratio[j]).detach()  # of r = beta log(pi / ref)
            chance = 0.5 + gap if ipo else gap.sigmoid()  # that i is chosen
            loss = loss + chance * dpo.dpo_loss(log_ratio[[i]], log_ratio[[j]], beta, ipo)[0]
        assert (task.gradient(loss).norm() < 1e-9) == nothing


def test_the_loss_of_dpo_works_when_pasted_and_is_a_mean_over_pairs():
    pasted = {"torch": torch}
    exec(inspect.getsource(dpo.dpo_loss), pasted)
    chosen, rejected, h = f64([1.0, -2.0, 0.5]), f64([-0.5, 1.0, 0.5]), [1.5, -3.0, 0.0]
    losses = [math.log(1 + math.exp(-0.2 * x)) for x in h], [(x - 2.5) ** 2 for x in h]
    for ipo, expected in enumerate(losses):
        loss, stats = pasted["dpo_loss"](chosen, rejected, 0.2, bool(ipo))
        assert loss.item() == pytest.approx(sum(expected) / 3)
        assert stats == pytest.approx({"loss": loss.item(), "margin": -0.5, "accuracy": 1 / 3})


# A loss is a mean over what the paper says, far from ratio 1 and in minibatches of unequal lengths


def clipped(x):
    return torch.min(x.ratio * x.A, x.ratio.clamp(0.8, 1.2) * x.A)


def half_square(x):
    """The clipped value loss."""
    near = x.old_values + (x.values - x.old_values).clamp(-0.1, 0.1)
    return 0.5 * torch.max((x.values - x.returns) ** 2, (near - x.returns) ** 2)


def one_action(x, power):
    x.ratio, x.A = x.ratio.prod() ** power, x.A[0]
    return -clipped(x) + 0.5 * half_square(x)[0]


def grpo_terms(x):
    return -clipped(x) + 0.3 * (x.q - 1 - x.q.log())


def penalised(x):
    return -x.ratio * x.A + 1.7 * (x.ratio - 1 - x.ratio.log()) + 0.5 * half_square(x)


GSPO = sequence_advantages, partial(sequence_loss, mean=True)
PAPER = {  # compute_advantages, loss_of; and of one response the terms of the mean
    "reinforce": (reinforce_advantages, reinforce_loss, lambda x: -x.ratio * x.A),
    "less value": (*reinforced("total", True), lambda x: -x.ratio * x.A + 0.5 * half_square(x)),
    "rloo": (*RLOO, lambda x: -clipped(x)),
    "grpo": (grouped()[0], grpo.grpo_loss, lambda x: grpo_terms(x).mean()),
    "no length": (*grouped(True, True), grpo_terms),
    "one action": (sequence_advantages, sequence_loss, lambda x: one_action(x, 1)),
    "gspo": (*GSPO, lambda x: one_action(x, 1 / len(x.A))),
    "penalty": (minippo.compute_advantages, PenaltyLoss(1.7), penalised),
    "best of n": (*BEST, lambda x: -x.logprobs[: len(x.logprobs) * x.chosen]),
}


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("computed", ["plain", "fast"])
def test_the_loss_of_a_minibatch_is_the_mean_of_the_paper_however_it_is_cut(name, computed):
    compute_advantages, loss_of, terms = PAPER[name]
    task = Task(horizon=3)
    config = replace(task.config, vf_coef=0.5, value_clip=0.1, whiten=True)
    batch = part(task.rollout(), [0, 3, 20, 29, 9, 14, 1, 0, 16, 15])
    batch |= compute_advantages(batch, config, 0.3)
    stir(task.policy, 0.05)
    if computed == "fast":
        fast.install()
    for rows in ([0, 1, 2, 3, 6, 7], [4, 5, 8, 9]):
        minibatch = part(batch, rows)
        mask = minibatch["mask"]
        logprobs, values, _ = evaluate_actions(task.policy, minibatch["tokens"], mask, 0.7)
        of_tokens = {
            "A": minibatch.get("whitened", mask),
            "returns": minibatch.get("returns", values),
        }
        of_tokens |= {"logprobs": logprobs, "values": values, "old_values": minibatch["old_values"]}
        of_tokens["ratio"] = (logprobs - minibatch["old_logprobs"]).exp()
        of_tokens["q"] = (minibatch["ref_logprobs"] - logprobs).exp()
        found = []
        for i, chosen in enumerate(minibatch.get("chosen", mask.any(1)).tolist()):
            numbers = {name: x[i, mask[i]] for name, x in of_tokens.items()}
            found.append(terms(SimpleNamespace(chosen=chosen, **numbers)).view(-1))
        paper = torch.cat(found)
        exact = task.gradient(paper.mean())
        outside = ((of_tokens["ratio"] - 1).abs() > 0.2)[mask]
        assert 0 < outside.sum() < len(outside) and exact.norm() > 1e-2
        for size in (0, 1, 4):
            task.policy.zero_grad()
            loss, stats = loss_in_pieces(loss_of, size)(task.policy, minibatch, config)
            loss.backward()
            assert_equal(left_gradient(task.policy), exact, 1e-10)
            assert stats["count"] == len(paper)
            assert stats["loss"] == pytest.approx(paper.mean().item())


def left_gradient(policy):
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("ipo", [False, True])
def test_the_loss_of_pairs_is_the_mean_over_pairs_and_leaves_the_reference_alone(ipo):
    task, ref = Task(horizon=3), tiny_gpt(3)
    task.ref, pairs = ref, torch.tensor([[0, 9], [14, 3], [16, 29]])
    chosen, rejected = task.kl()[pairs].unbind(1)
    loss, stats = dpo.dpo_loss(chosen, rejected, task.config.kl_coef, ipo)
    exact, batch = task.gradient(loss), {"tokens": task.tokens[pairs], "mask": task.mask[pairs]}
    assert exact.norm() > 1e-2
    fast.install()
    for size in (0, 1, 2):
        task.policy.zero_grad()
        loss_of = loss_in_pieces(partial(dpo.pair_loss, ref=ref, ipo=ipo), size)
        found, found_stats = loss_of(task.policy, batch, task.config)
        found.backward()
        assert_equal(left_gradient(task.policy), exact, 1e-10)
        assert found_stats == pytest.approx({**stats, "count": 3})
    assert not any(p.grad is not None for p in ref.parameters())


# What their functions compute


def test_the_responses_to_a_prompt_are_compared_with_each_other():
    rewards, std = f64([1.0, 2.0, 6.0, 5.0, 5.0, 5.0]), math.sqrt(14 / 2)
    assert_equal(rloo.leave_one_out(rewards, 3), f64([1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0]))
    assert_equal(grpo.group_advantages(rewards, 3), f64([-2 / std, -1 / std, 3 / std, 0, 0, 0]))
    assert_equal(grpo.group_advantages(rewards, 3, no_std=True), f64([-2, -1, 3, 0, 0, 0]))
    assert best_of_n.best_rows(rewards, 3).tolist() == [False, False, True, True, False, False]


def test_one_action_has_one_value_and_is_whitened_over_the_responses():
    task, rows = Task(), [2, 3, 9, 13, 0]
    batch = part(task.rollout(), rows)
    found = sequence_advantages(batch, replace(task.config, whiten=True), 0.3)
    first = batch["mask"].int().argmax(1, keepdim=True)
    values = batch["old_values"].gather(1, first)
    returns = (task.scores - 0.3 * task.kl().detach())[rows][:, None]
    advantages = returns - values
    whitened = (advantages - advantages.mean()) / advantages.std(correction=0)
    expected = {"old_values": values, "returns": returns, "advantages": advantages}
    for name, x in (expected | {"whitened": whitened}).items():
        assert_equal(found[name], x * batch["mask"])


def test_what_the_log_and_the_table_read_of_the_advantages():
    task = Task()
    batch = part(task.rollout(), [4, 9])
    mask = batch["mask"]
    rewards = minippo.compute_advantages(batch, task.config, 0.3)["rewards"]
    to_go = rewards.flip(1).cumsum(1).flip(1) * mask
    for credit, baseline in itertools.product(("total", "to_go"), (True, False)):
        found = reinforced(credit, baseline)[0](batch, task.config, 0.3)
        assert_equal(found["rewards"], rewards)
        assert_equal(found["returns"], to_go)  # what the values learn, whatever the advantages are
        returns = rewards.sum(1, keepdim=True) * mask if credit == "total" else to_go
        assert_equal(found["advantages"], returns - baseline * batch["old_values"])
    assert_equal(reinforce_advantages(batch, task.config, 0.3)["advantages"], to_go)
    found = RLOO[0](batch, task.config, 0.3)
    assert_equal(found["returns"], rewards.sum(1, keepdim=True) * mask)
    whole = rewards.sum(1)
    assert_equal(found["advantages"], f64([[1.0], [-1.0]]) * (whole[0] - whole[1]) * mask)
    sign = (task.scores[4] - task.scores[9]).sign()
    found = grpo.grpo_advantages(batch, task.config, 0.3, k=2)
    assert_equal(found["advantages"], f64([[1.0], [-1.0]]) * math.sqrt(0.5) * sign * mask)


def test_the_penalty_is_doubled_or_halved_beyond_one_and_a_half_times_its_target():
    for d, c in ((0.0, 1), (0.0066, 1), (0.007, 2), (0.0149, 2), (0.0151, 4), (9.0, 4)):
        assert adapt_penalty(2.0, d, 0.01) == c
    assert PenaltyLoss() == PenaltyLoss(1.0, 0.01)
    assert adapt_penalty(0.015, 0.0, 0.01) == 0.01 and adapt_penalty(70.0, 9.0, 0.01) == 100


def test_ptx_adds_the_loss_of_as_many_demonstrations_as_there_are_responses(monkeypatch):
    task = Task()
    rows = [([1, 0], [1, 2]), ([0], [0, 1, 2]), ([0, 1, 1], [2])]
    monkeypatch.setattr(ppo_ptx, "read_demonstrations", lambda *folders: rows)
    batch = part(task.rollout(), [0, 3, 9, 5, 1])
    batch |= minippo.compute_advantages(batch, task.config, 0.3)
    torch.manual_seed(7)
    drawn = [rows[i] for i in torch.randint(3, (5,)).tolist()]
    tokens, mask = pad_completions(drawn)
    sft = -evaluate_actions(task.policy, tokens, mask)[0].sum() / mask.sum()
    exact = minippo.ppo_loss(task.policy, batch, task.config)[0] + 0.7 * sft
    torch.manual_seed(7)
    loss, stats = ppo_ptx.ptx_loss(task.policy, batch, task.config, 0.7, "out", "data")
    assert len(set(map(str, drawn))) == 3
    assert stats["loss"] == pytest.approx(exact.item())
    assert stats["sft_loss"] == pytest.approx(sft.item())
    assert_equal(task.gradient(loss), task.gradient(exact))


def test_the_demonstrations_of_ptx_are_those_of_stage_1(models, tmp_path):
    for split, word in (("train", "bees"), ("val", "eat")):
        rows = [{"prompt": "Do", "completion": f" {word}"}]
        write_rows(tmp_path / f"sft_{split}.jsonl", rows)
    tokenizer = load_checkpoint(models / "sft.pt", ["sft"])[1]
    (found,) = ppo_ptx.read_demonstrations(models, tmp_path)
    ids = tokenizer.encode("Do"), [*tokenizer.encode(" bees"), tokenizer.eos]
    assert tuple(map(list, found)) == ids


@pytest.mark.parametrize("size", [0, 1])
def test_the_penalty_follows_the_last_minibatch_in_pieces_too(size):
    task, loss = Task(), PenaltyLoss(3.0)
    batch = task.rollout()
    batch |= loss.adapt_and_compute_advantages(batch, task.config, 0.3)
    loss_of = loss_in_pieces(loss, size)
    for minibatch in (part(batch, [0, 1, 2]), part(batch, [3, 7, 9, 10])):
        task.policy.zero_grad()
        loss_of(task.policy, minibatch, task.config)[0].backward()
        stir(task.policy, 0.05)
    task.policy.zero_grad()
    _, stats = loss_of(task.policy, minibatch, task.config)
    d = stats["approx_kl"]
    assert stats["penalty"] == 3 and d > 1e-4
    kept = loss.state_dict()
    for target, c in ((d / 1.6, 6.0), (d / 1.4, 3.0), (d * 1.4, 3.0), (d * 1.6, 1.5)):
        other = PenaltyLoss(target=target)
        other.load_state_dict(kept)
        other.adapt_and_compute_advantages(batch, task.config, 0.3)
        assert other.c == c


# As programs


def small_models(folder, seed=0):
    """sft.pt and rm.pt with random weights -> the models and their tokenizer."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer.train([*zoo.PROMPTS, " A bee eats nectar."] * 2, 300)
    sft = GPT(GPTConfig(tokenizer.vocab_size, 40, 1, heads=2, channels=16))
    scorer = stir(RewardModel(sft), 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder / "sft.pt", "sft", sft, tokenizer, val_loss=3.0, val_loss_se=0.1)
    save_checkpoint(folder / "rm.pt", "rm", scorer, tokenizer)
    return sft.eval(), scorer.eval(), tokenizer


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))  # no line break ends the file


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """-> a folder with sft.pt and rm.pt, and data/."""
    folder = tmp_path_factory.mktemp("models")
    small_models(folder)
    (folder / "data").mkdir()
    prompts = list(zoo.PROMPTS)[:20]
    pairs = [zoo.label(random.Random(i), x, " No idea.", f" {x}") for i, x in enumerate(prompts)]
    for split in ("train", "val"):
        write_rows(folder / "data" / f"pref_{split}.jsonl", pairs)
        write_rows(folder / "data" / f"prompts_{split}.jsonl", [{"prompt": x} for x in prompts])
    write_rows(folder / "sft.jsonl", [{"step": 1, "loss": 7.25, "seconds": 1}])
    return folder


CPU = ["--device", "cpu", "--max_new_tokens", 6]
PPO = [*CPU, "--steps", 2, "--batch_size", 8, "--minibatches", 2, "--warmup", 0, "--lr", 0.01]
CRITIC = {"gamma", "lam", "vf_coef", "value_clip", "critic_lr", "head_lr", "separate_critic"}
GROUPS, TERMS = CRITIC | {"no_whiten", "group_size"}, {"entropy_coef", "kl_loss_coef"}
FIXED_BETA = {"kl_target", "kl_horizon"}
PENALTY = ["--penalty 3", "--target 1"]
UNREAD = {  # flags of train_ppo.py without effect
    "reinforce": CRITIC | {"no_whiten", "clip_eps"},
    "rloo": GROUPS,
    "grpo": GROUPS | TERMS | FIXED_BETA,
    "sequence_ppo": {"gamma", "lam"} | TERMS,
    "ppo_penalty": {"clip_eps"} | TERMS,
    "ppo_ptx": set(),
    "best_of_n": GROUPS | TERMS | {"clip_eps"},
    "dpo": GROUPS | TERMS | FIXED_BETA | {"clip_eps", "ref_update_every"},
}
ALGORITHMS = {  # name, flags, other settings, what is in the log
    "reinforce": ("REINFORCE", [], ["--credit total", "--baseline"], []),
    "rloo": ("RLOO", ["--k", 2], ["--k 4"], []),
    "grpo": ("GRPO", ["--k", 2], ["--no_std", "--no_length", "--k 4"], []),
    "sequence_ppo": ("sequence PPO", [], ["--mean"], ["value_loss"]),
    "ppo_penalty": ("PPO penalty", ["--target", 1e-9], PENALTY, ["penalty", "value_loss"]),
    "ppo_ptx": ("PPO ptx", [], ["--ptx_coef 0.5"], ["value_loss", "sft_loss"]),
    "best_of_n": ("best of n", ["--n", 2], ["--n 4"], []),
    "dpo": ("DPO", ["--samples", 3], ["--ipo", "--samples 4"], ["accuracy", "margin"]),
}


def start(script, models, out, *flags):
    algorithm_flags = ALGORITHMS[script][1] if script in ALGORITHMS else []
    folders = ["--data", models / "data", "--models", models, "--out", out]
    return run(f"variations/{script}.py", *folders, *PPO, *algorithm_flags, *flags)


@pytest.mark.parametrize("script", ALGORITHMS)
def test_they_run_as_train_ppo_does_up_to_the_report(models, tmp_path, monkeypatch, script):
    monkeypatch.setattr("plumbing.report.OPTIMUM_SAMPLES", 64)
    name, flags, others, columns = ALGORITHMS[script]
    status, printed, error = start(script, models, tmp_path, "--report_prompts", 2)
    assert (status, error) == (0, "") and f"how much of the way {name} has come" in printed
    assert json.loads((tmp_path / "report.json").read_text())["algorithm"] == name
    first, second = metrics(tmp_path / "ppo.jsonl")
    assert first.keys() >= {"score", "kl", "entropy", "loss", "grad_norm", "lr", *columns}
    assert abs(first["kl"]) < 1e-3 and abs(second["kl"]) > 1e-5
    assert (first["lr"], second["lr"]) == pytest.approx((0.01, 0.005))
    assert "7.25" in (tmp_path / "report.html").read_text(encoding="utf-8")  # of stage 1
    policy, _, _ = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    sft, _, _ = load_checkpoint(models / "sft.pt", ["sft"])
    assert (weights(policy.trunk) - weights(sft.trunk)).norm() > 1e-3
    assert bool(policy.value_head.weight.any()) == ("value_loss" in columns)
    contents = read_contents(tmp_path / "ppo_state.pt", ["state"])
    settings, optimizer = contents["settings"], contents["optimizer"]
    assert optimizer["param_groups"][0]["eps"] == 1e-4
    assert settings["group_size"] == (flags[1] if {"--k", "--n"} & set(flags) else 1)
    # It does not go on with other settings, nor as another algorithm.
    for other in map(str.split, others):
        status, _, error = start(script, models, tmp_path, "--resume", *other)
        assert status == 2 and re.search(f"saved with (.*, )?{other[0][2:]} = ", error), error
    ppo_flags = ["--data", models / "data", "--models", models, "--out", tmp_path, *PPO]
    status, _, error = run("train_ppo.py", *ppo_flags, "--resume")
    assert status == 2 and "was saved" in error


@pytest.mark.parametrize("script", ALGORITHMS)
def test_flags_without_effect_are_refused_and_help_shows_the_others(script):
    flags, unread = ALGORITHMS[script][1], UNREAD[script]
    names = {field.name for settings in (PPOConfig, StageConfig) for field in fields(settings)}
    for flag in names - {"whiten"} | {"no_whiten"}:
        status, printed, error = run(f"variations/{script}.py", "-h", f"--{flag}=1")
        assert (status == 2 and "no effect" in error) == (flag in unread), flag
    status, printed, _ = run(f"variations/{script}.py", "-h")
    assert status == 0 and all(f"  {flag} " in printed for flag in flags[::2])
    assert f"(out/{script})" in printed and "--steps" in printed
    assert re.search(r"rm\.pt[^()]*\(out\)", " ".join(printed.split()))  # --models


@pytest.mark.parametrize(
    "script, flags, says",
    [
        ("rloo", ["--k", 3], "should be a multiple of 3"),
        ("rloo", ["--k", 1], "--k 1: should be between 2"),
        ("best_of_n", ["--n", 3], "should be a multiple of 3"),
        ("grpo", ["--k", 3], "should be a multiple of 3"),
        ("grpo", ["--k", 1], "--k 1: should be between 2"),
        ("reinforce", ["--credit", "both"], "should be total or to_go"),
        ("reinforce", ["--baseline", "--lam", 0.5], "no effect"),
        ("dpo", ["--kl_coef", 0], "--kl_coef 0"),
        ("dpo", ["--minibatches", 9], "more than --batch_size 8"),
    ],
)
def test_settings_that_make_no_sense_are_refused(models, tmp_path, script, flags, says):
    folders = ["--models", models, "--out", tmp_path]
    status, _, error = run(f"variations/{script}.py", *folders, *PPO[6:10], *flags)
    assert status == 2 and says in error and error.count("\n") == 1


def test_the_flags_of_reinforce_change_what_is_done(models, tmp_path):
    logs = []
    for i, flags in enumerate(([], ["--credit", "total"], ["--baseline", "--vf_coef", 1])):
        assert start("reinforce", models, tmp_path / str(i), "--no_report", *flags)[0] == 0
        logs.append(metrics(tmp_path / str(i) / "ppo.jsonl")[-1])
    assert logs[0] != logs[1] and abs(logs[0]["explained_variance"]) < 1e-6
    assert abs(logs[2]["explained_variance"]) > 1e-3


@pytest.mark.parametrize("script", ["ppo_penalty", "dpo"])
def test_an_interrupted_run_goes_on_where_it_stopped(models, tmp_path, script):
    flags, update, calls = ["--no_report", "--steps", 3], minippo.ppo_update, []

    def press_ctrl_c(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return update(*arguments)

    assert start(script, models, tmp_path / "whole", *flags)[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minippo, "ppo_update", press_ctrl_c)
        status, _, error = start(script, models, tmp_path / "stopped", *flags)
    assert status == 130 and "step 2 is saved" in error
    assert start(script, models, tmp_path / "stopped", *flags, "--resume")[0] == 0
    whole, stopped = (metrics(tmp_path / out / "ppo.jsonl") for out in ("whole", "stopped"))
    assert whole == stopped
    assert same_weights(tmp_path / "whole" / "ppo.pt", tmp_path / "stopped" / "ppo.pt")
    if script == "ppo_penalty":
        assert [row["penalty"] for row in whole] == [1.0, 2.0, 4.0]


def test_dpo_prefers_what_is_chosen_in_the_data(models, tmp_path):
    flags = "--no_report", "--steps", 12, "--kl_coef", 1
    assert start("dpo", models, tmp_path, *flags)[0] == 0
    policy, tokenizer, _ = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    sft, _, _ = load_checkpoint(models / "sft.pt", ["sft"])
    pairs = read_ids(models / "data", "pref", "train", tokenizer, 40)
    tokens, mask = pad_completions([(prompt, x) for prompt, *pair in pairs for x in pair])
    after, before = (evaluate_actions(x, tokens, mask)[0].sum(1) for x in (policy, sft))
    chosen, rejected = (after - before).view(-1, 2).unbind(1)
    assert (chosen > rejected).float().mean() > 0.9


def test_the_flags_of_dpo_reach_what_they_are_for(models, tmp_path, monkeypatch):
    rows, read_states = [], fast.read_states

    def watched(trunk, tokens, *rest):
        rows.append(len(tokens))
        return read_states(trunk, tokens, *rest)

    def dpo_run(name, *flags):
        assert start("dpo", models, tmp_path / name, "--no_report", *flags)[0] == 0
        return metrics(tmp_path / name / "ppo.jsonl")

    monkeypatch.setattr(fast, "read_states", watched)
    first = dpo_run("a", "--warmup", 1, "--steps", 3, "--micro_batch", 2)
    assert [row["lr"] for row in first] == pytest.approx([0.005, 0.01, 0.005])
    assert max(rows) == 4  # two pairs; the responses of the log are three
    seeds, batch_of = [], training.batch_of
    with monkeypatch.context() as patch:
        patch.setattr(training, "batch_of", lambda *x: seeds.append(x[-1]) or batch_of(*x))
        dpo_run("b", "--seed", 5)
    assert seeds == [5] * 4  # prompts and pairs of two iterations
    trained = tmp_path / "a" / "ppo.pt"
    for flag, starts_there in (("--policy", True), ("--reference", False)):
        dpo_run(flag, flag, trained, "--lr", 0)
        assert same_weights(trained, tmp_path / flag / "ppo.pt") == starts_there


def test_dpo_does_not_go_on_with_other_pairs_or_models(models, tmp_path):
    here = shutil.copytree(models, tmp_path / "models")
    assert start("dpo", here, tmp_path / "out", "--no_report")[0] == 0
    path = here / "data" / "pref_train.jsonl"
    pairs = path.read_text()
    path.write_text(pairs.replace("No idea", "No", 1))
    for says in ("data or vocabulary have changed", "has been made again"):
        status, _, error = start("dpo", here, tmp_path / "out", "--no_report", "--resume")
        assert status == 2 and says in error
        path.write_text(pairs)
        model, tokenizer, facts = load_checkpoint(here / "sft.pt", ["sft"])
        save_checkpoint(here / "sft.pt", "sft", model, tokenizer, **facts | {"val_loss": 2.5})


def test_groups_have_four_responses_unless_told_otherwise():
    assert rloo.RLOOConfig().k == grpo.GRPOConfig().k == best_of_n.BestConfig().n == 4


# Around the algorithm


@pytest.fixture
def started(monkeypatch):
    """Scripts that a variation starts run in this process, on little -> what was started."""
    flags = {
        "train_ppo.py": [*PPO, "--no_report"],
        "train_rm.py": [*CPU, "--epochs", 1, "--batch_size", 16, "--answers", 16],
    }
    calls = []

    def run_here(script, *words):
        calls.append((script.name, dict(zip(words, words[1:])), words))
        status, _, error = run(str(script), *words, *flags[script.name])
        assert status == 0, error

    for module in (ensemble, iterate, variations):
        monkeypatch.setattr(module, "run_python", run_here, raising=False)
    return calls


def test_dpo_has_seen_the_prompts_of_its_pairs(models, tmp_path, monkeypatch):
    seen = []

    def report(models, trained_on, prompts, *rest):
        seen.extend([trained_on, prompts])
        raise KeyboardInterrupt

    monkeypatch.setattr("plumbing.report.make_report", report)
    data = shutil.copytree(models / "data", tmp_path / "data")
    write_rows(data / "prompts_train.jsonl", [{"prompt": "What does a bee eat?"}])  # for the log
    write_rows(data / "prompts_val.jsonl", [{"prompt": "Why?"}])
    folders = ["--data", data, "--models", models, "--out", tmp_path / "out"]
    assert run("variations/dpo.py", *folders, *PPO, "--report_prompts", 2)[0] == 130
    tokenizer = load_checkpoint(models / "sft.pt", ["sft"])[1]
    rows = load_jsonl(models / "data" / "pref_train.jsonl", ["prompt"])
    assert seen == [[tokenizer.encode(prompt) for (prompt,) in rows], [tokenizer.encode("Why?")]]


def test_an_ensemble_scores_by_the_mean_or_the_lowest_of_its_members(models, tmp_path, monkeypatch):
    rows = [("What does a bee eat?", " A bee eats nectar."), ("What?", ""), ("Do", " bees" * 40)]
    expected = []
    monkeypatch.setenv("ENSEMBLE", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="python -m variations.ensemble makes them"):
        ensemble.mean(*zip(*rows))
    monkeypatch.setenv("ENSEMBLE", str(tmp_path / "ensemble"))
    for seed in (1, 2, 3):
        _, scorer, tokenizer = small_models(tmp_path / "ensemble" / str(seed), seed)
        ids = [tokenizer.encode(a) + tokenizer.encode(b) + [tokenizer.eos] for a, b in rows]
        ids = [row[: scorer.config.context] for row in ids]
        expected.append(scorer(*pad(ids)).detach())
    expected = torch.stack(expected)
    assert ensemble.mean(*zip(*rows)) == pytest.approx(expected.mean(0).tolist(), abs=1e-5)
    assert ensemble.minimum(*zip(*rows)) == pytest.approx(expected.amin(0).tolist(), abs=1e-5)
    folders = ["--data", models / "data", "--models", models, "--out", tmp_path / "out"]
    flags = [*folders, *PPO, "--no_report", "--reward", "variations.ensemble:minimum"]
    assert run("train_ppo.py", *flags)[0] == 0


def test_the_members_of_an_ensemble_have_seeds_of_their_own(models, tmp_path, started):
    flags = ["--data", models / "data", "--models", models, "--out", tmp_path, "--members", 2]
    assert run("variations/ensemble.py", *flags)[0] == 0
    assert [(call["--seed"], call["--data"]) for _, call, _ in started] == [
        (seed, str(models / "data")) for seed in (1, 2)
    ]
    assert all("--resume" in words for *_, words in started)
    assert not same_weights(tmp_path / "1" / "rm.pt", tmp_path / "2" / "rm.pt")
    assert run("variations/ensemble.py", *flags)[0] == 0 and len(started) == 2  # they stay
    (tmp_path / "1" / "sft.pt").write_bytes(b"of another run")
    status, _, error = run("variations/ensemble.py", *flags)
    assert status == 2 and "has been made again" in error and f"remove {tmp_path / '1'}" in error
    status, _, error = run("variations/ensemble.py", *flags, "--models", tmp_path)
    assert status == 2 and "train_sft.py or data/convert.py makes it" in error


def test_a_script_that_fails_ends_the_variation_that_started_it():
    variations.run_python("-c", "pass")
    with pytest.raises(UserError, match="-c ended with status 3"):
        variations.run_python("-c", "import sys; sys.exit(int(sys.argv[1]))", 3)


def test_iterated_rounds_add_labelled_pairs_and_train_the_reward_model_on_all(
    models, tmp_path, started, monkeypatch
):
    flags = ["--data", models / "data", "--models", models, "--out", tmp_path]
    flags += ["--rounds", 3, "--pairs", 12, "--seed", 5, "--ppo", "--kl_coef 0.7"]
    assert run("variations/iterate.py", *flags)[0] == 0
    first, second, third = (tmp_path / str(i) for i in (1, 2, 3))
    expected = [
        ("train_ppo.py", first, models / "data", models),
        ("train_rm.py", first, first / "data", None),
        ("train_ppo.py", second, models / "data", first),
        ("train_rm.py", second, second / "data", None),
        ("train_ppo.py", third, models / "data", second),
    ]
    for (script, given, words), (name, out, data, folder) in zip(started, expected, strict=True):
        assert (script, given["--out"], str(given["--data"])) == (name, out, str(data))
        assert str(given.get("--models")) == str(folder) and "--resume" in words
        assert given["--seed"] == 5 and given.get("--kl_coef") == ("0.7" if folder else None)
        longest = given.get("--max_new_tokens")  # the scale of the scores is that of PPO
        assert longest == (None if folder else dict(zip(PPO[::2], PPO[1::2]))["--max_new_tokens"])
    folders = [models / "data", first / "data", second / "data"]
    keys = ["prompt", "chosen", "rejected"]
    rows = [load_jsonl(folder / "pref_train.jsonl", keys) for folder in folders]
    assert rows[1][:20] == rows[0] and rows[2][: len(rows[1])] == rows[1]
    assert 20 < len(rows[1]) < len(rows[2]) <= 44
    new, newer = rows[1][20:], rows[2][len(rows[1]) :]
    assert [prompt for prompt, *_ in new] != [prompt for prompt, *_ in newer]
    assert len({prompt for prompt, *_ in new}) > 3 and not (third / "data").exists()
    # Stopped while the pairs of the second round are sampled, and while they are written.
    shutil.rmtree(second / "data")
    monkeypatch.setattr(iterate, "new_pairs", lambda *_: pytest.fail("sampled"))
    monkeypatch.setattr("sys.argv", ["iterate.py", *map(str, flags)])
    with pytest.raises(pytest.fail.Exception, match="sampled"):
        iterate.main()
    assert (first / "data").exists() and not (second / "data").exists()
    with open(second / "half_written" / "pref_train.jsonl", "a") as file:
        file.write('{"prompt": "ha')
    assert run("variations/iterate.py", *flags)[0] == 0
    assert load_jsonl(second / "data" / "pref_train.jsonl", keys) == rows[2]
    iterate.main()  # all pairs are there: none is sampled


def test_prompts_that_the_judge_does_not_know_are_refused_before_anything_runs(
    models, tmp_path, started
):
    write_rows(
        tmp_path / "prompts_train.jsonl", [{"prompt": sorted(zoo.PROMPTS)[0]}, {"prompt": "Hi"}]
    )
    flags = ["--data", tmp_path, "--models", models, "--out", tmp_path / "out"]
    status, _, error = run("variations/iterate.py", *flags)
    assert status == 2 and error.count("\n") == 1 and "'Hi'" in error and not started


def test_a_new_pair_is_an_answer_of_the_policy_and_one_of_the_sft_model(
    models, tmp_path, monkeypatch
):
    settings = {"max_new_tokens": 7, "temperature": 0.8}
    torch.save({"kind": "state", "settings": settings}, tmp_path / "ppo_state.pt")
    for seed, kind in enumerate(("sft", "ppo")):
        model, _, tokenizer = small_models(tmp_path / "any", seed)
        save_checkpoint(tmp_path / f"{kind}.pt", kind, model, tokenizer)
    sft = weights(load_checkpoint(tmp_path / "sft.pt", ["sft"])[0])
    asked = []

    def respond(model, ref, score, prompts, n, tokenizer, config):
        assert model is ref and n == 1 and (config.max_new_tokens, config.temperature) == (7, 0.8)
        assert score(torch.ones(2, 4), torch.ones(2, 3)).tolist() == [0, 0]
        assert torch.initial_seed() == 3
        asked.append([tokenizer.decode(prompt) for prompt in prompts])
        name = "sft" if torch.equal(weights(model), sft) else "ppo"
        return None, [f"{name} {i}" if i % 3 else "the same" for i in range(len(prompts))]

    monkeypatch.setattr(iterate, "respond", respond)
    monkeypatch.setattr(iterate, "label", lambda rng, prompt, a, b: (prompt, a, b))
    rows = iterate.new_pairs(tmp_path, prompts := [*zoo.PROMPTS][:20], 12, 3)
    assert asked[0] == asked[1] and set(asked[0]) <= set(prompts)
    assert rows == [(asked[0][i], f"ppo {i}", f"sft {i}") for i in range(12) if i % 3]


# Under TRL


@pytest.fixture
def outgrow():
    pytest.importorskip("trl")
    from variations import outgrow

    return outgrow


def test_trl_is_asked_for_where_it_is_missing(outgrow, models, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, error = run("variations/outgrow.py", "--models", models, "--out", tmp_path)
    assert status == 2 and "pip install trl" in error


def test_trl_gets_the_options_that_mean_what_ours_do(outgrow, tmp_path, monkeypatch):
    made, calls = [], []

    class Trainer:
        def __init__(self, *arguments):
            made[:] = arguments

        def __getattr__(self, name):
            return lambda *x: calls.append((name, *x))

    monkeypatch.setattr("trl.GRPOTrainer", Trainer)
    _, scorer, tokenizer = small_models(tmp_path)
    outgrow.export(tmp_path / "rm.pt", tmp_path / "rm")
    config = PPOConfig(minibatches=4, epochs=2, kl_coef=0.2, clip_eps=0.3, max_grad_norm=0.7)
    config = replace(config, temperature=0.8, max_new_tokens=9, missing_eos_penalty=0.5)
    stage = StageConfig(steps=7, batch_size=32, lr=0.03, warmup=3, adam_eps=0.02)
    prompts = [tokenizer.encode("Do bees"), tokenizer.encode("eat")]

    def train(processes=1, **flags):
        settings = RunConfig(out=tmp_path, device="cpu", seed=6), config, stage
        outgrow.train_grpo(*settings, grpo.GRPOConfig(**flags), prompts, tokenizer, processes)

    train(2, k=8)
    model, score, arguments, rows = made
    expected = {
        **{"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_iterations": 2},
        **{"max_steps": 56, "warmup_steps": 24, "learning_rate": 0.03, "adam_epsilon": 0.02},
        **{"num_generations": 8, "beta": 0.2, "epsilon": 0.3, "max_grad_norm": 0.7, "seed": 6},
        **{"temperature": 0.8, "top_k": 0, "top_p": 1.0, "max_completion_length": 9},
        **{"scale_rewards": "group", "loss_type": "grpo", "use_bias_correction_kl": False},
        **{"disable_dropout": True, "bf16": False, "use_cpu": True, "adam_beta2": 0.95},
        **{"lr_scheduler_type": "linear", "weight_decay": 0.0, "output_dir": str(tmp_path)},
        **{"gradient_checkpointing": False, "logging_steps": 8, "save_strategy": "no"},
    }
    assert {name: getattr(arguments, name) for name in expected} == expected
    assert model == str(tmp_path / "sft") and rows["prompt"] == ["Do bees", "eat"]
    assert calls == [("train",), ("save_model", tmp_path / "policy"), ("save_state",)]
    ids = [tokenizer.encode(text) for text in (" bees", " A bee eats nectar.")]
    full = [tokenizer.encode("Do") + response + [tokenizer.eos] for response in ids]
    expected = scorer(*pad(full)).tolist()
    texts = {"prompts": ["Do", "Do"], "completions": [" bees", " A bee eats nectar."]}
    found = score(**texts, completion_ids=[ids[0] + [tokenizer.eos], ids[1]], other=1)
    assert found == pytest.approx([expected[0], expected[1] - 0.5], abs=1e-4)
    train(k=8, no_std=True, no_length=True)
    assert (made[2].scale_rewards, made[2].loss_type) == ("none", "dapo")
    for k, processes in ((3, 1), (8, 3), (8, 16)):  # no whole groups, or no whole shares
        with pytest.raises(UserError, match="--batch_size 32: should be a multiple of"):
            train(processes, k=k)


def test_what_trl_has_trained_is_graded_by_our_report(outgrow, models, tmp_path, monkeypatch):
    folders = ["--data", models / "data", "--models", models, "--out", tmp_path]
    flags = [*folders, *PPO, "--k", 2, "--report_prompts", 2]
    status, printed, error = run("variations/outgrow.py", *flags)
    assert status == 0 and "how much of the way TRL's GRPO has come" in printed, error
    policy, _, _ = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    sft, _, _ = load_checkpoint(models / "sft.pt", ["sft"])
    assert 1e-3 < (weights(policy.trunk) - weights(sft.trunk)).norm() < 10
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in log if "reward" in row] == [2, 4]
    for more, says in ((["--reference", "x.pt"], "no effect"), ([], "ppo.pt: is there")):
        status, _, error = run("variations/outgrow.py", *flags, *more)
        assert status == 2 and says in error
    (tmp_path / "report.json").unlink()
    assert run("variations/outgrow.py", *flags[:-2], "--overwrite", "--no_report")[0] == 0
    assert not (tmp_path / "report.json").exists()
    data, asked = shutil.copytree(models / "data", tmp_path / "data"), []
    write_rows(data / "prompts_val.jsonl", [{"prompt": "Why?"}])
    monkeypatch.setattr("plumbing.report.make_report", lambda *x: asked.extend(x) or sys.exit(9))
    folders = ["--data", data, "--models", models, "--out", tmp_path / "again"]
    assert run("variations/outgrow.py", *folders, *flags[6:])[0] == 9
    tokenizer = load_checkpoint(models / "sft.pt", ["sft"])[1]
    assert len(asked[1]) == 20 and asked[2] == [tokenizer.encode("Why?")]


def test_flags_that_trl_does_not_read_are_refused(outgrow):
    flags = "ref_update_every policy reference reward length_penalty dtype micro_batch"
    for flag in f"{flags} grad_checkpoint resume save_every tensorboard clip_eps".split():
        status, _, error = run("variations/outgrow.py", "-h", f"--{flag}=1")
        assert (status == 2 and "no effect" in error) == (flag != "clip_eps"), flag
