"""Proof without sampling: every response is enumerated, so that expectations are sums. Run: python -m pytest tests/test_exact.py

With three or four tokens and responses of at most three, the objective J = E[score] - beta KL is a short sum, and autograd
gives its gradient. The path that train_ppo.py takes (score, KL-adjusted rewards, GAE, policy loss, update) must give the same in
expectation.
"""

import itertools
import math

import pytest
import torch

from bench import ladder
from bench.ladder import PROMPTS, responses
from minippo import (
    PPOConfig,
    RewardModel,
    evaluate_actions,
    frozen_copy,
    gae,
    generate,
    kl_adjusted_rewards,
    kl_per_response,
    ppo_update,
    reward_model_loss,
    row_lengths,
    score_responses,
    whiten,
)
from plumbing import fast
from plumbing.text import pad_completions
from plumbing.training import pair_scores
from tiny import EOS, assert_equal, biased, f64, inf, nan, noise, stir, tiny_gpt, tiny_reward_model, weights


@pytest.fixture(autouse=True, params=["plain", "fast"])
def how(request, as_written):
    """Everything here holds for the networks as minippo.py computes them, and for the way in which the scripts do."""
    if request.param == "fast":
        fast.install()


EXACT = {"minibatches": 1, "max_grad_norm": inf, "vf_coef": 0.0}


def score_by(reward_model):
    return lambda tokens, mask: reward_model(tokens, row_lengths(mask))


class Task:
    """Policy, reference and reward model with random weights in float64, and every response to every prompt as one batch."""

    def __init__(self, vocab_size=4, horizon=3, temperature=1.0, kl_coef=0.1, prompts=PROMPTS):
        self.temperature, self.kl_coef, self.prompts = temperature, kl_coef, prompts
        self.policy, self.ref = tiny_gpt(vocab_size), frozen_copy(tiny_gpt(vocab_size))
        score = score_by(stir(RewardModel(self.policy.config).double(), 0.5))
        rows = [(prompt, response) for prompt in prompts for response in responses(vocab_size, horizon)]
        self.tokens, self.mask = pad_completions(rows)
        config = PPOConfig(length_penalty=0.1, missing_eos_penalty=0.5)
        self.scores, ended = score_responses(score, self.tokens, self.mask, config, vocab_size - 1)
        assert 0 < ended.sum() < len(ended) and self.scores.std() > 0.1

    def logprobs(self):
        return evaluate_actions(self.policy, self.tokens, self.mask, self.temperature)[0]

    def record(self, lam=1.0):
        """What ppo_iteration computes about a batch of responses, without whitening."""
        with torch.no_grad():
            logprobs, values, _ = evaluate_actions(self.policy, self.tokens, self.mask, self.temperature)
            ref_logprobs, _, _ = evaluate_actions(self.ref, self.tokens, self.mask, self.temperature)
        rewards = kl_adjusted_rewards(self.scores, logprobs, ref_logprobs, self.mask, self.kl_coef)
        advantages, returns = gae(rewards, values, self.mask, 1.0, lam)
        batch = {"tokens": self.tokens, "mask": self.mask, "logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": values}
        return batch | {"advantages": advantages, "returns": returns}

    def objective(self):
        """J, summed over the prompts: sum of p(y) (score(y) - beta log p(y) / ref(y))."""
        logprobs = self.logprobs().sum(1)
        ref_logprobs = evaluate_actions(self.ref, self.tokens, self.mask, self.temperature)[0].sum(1)
        assert_equal(logprobs.exp().sum(), f64(float(len(self.prompts))))  # nothing that could be sampled is missing
        return (logprobs.exp() * (self.scores - self.kl_coef * (logprobs - ref_logprobs))).sum()

    def gradient(self, x):
        gradients = torch.autograd.grad(x, list(self.policy.parameters()), allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in gradients])

    def step(self, batch, micro_batch=0, **changes):
        """The direction in which ppo_update moves the weights: one plain gradient step of size 1, taken back afterwards."""
        before = {name: x.clone() for name, x in self.policy.state_dict().items()}
        start = weights(self.policy)
        config = PPOConfig(batch_size=len(batch["tokens"]), temperature=self.temperature, **EXACT | changes)
        ppo_update(self.policy, torch.optim.SGD(self.policy.parameters(), 1.0), batch, config, micro_batch)
        moved = weights(self.policy) - start
        self.policy.load_state_dict(before)
        return moved

    def expected_step(self, batch, **changes):
        """E over responses of (step x number of its tokens): the loss is a mean over tokens, the objective a sum."""
        chances = self.logprobs().detach().sum(1).exp()
        total = torch.zeros_like(weights(self.policy))
        for i, chance in enumerate(chances):
            one = {name: x[i : i + 1] for name, x in batch.items()}
            total += chance * one["mask"].sum() * self.step(one, **changes)
        return total

    def state_chances(self):
        """(B, T-1): probability that sampling comes to each state, divided among the rows of the batch that pass it."""
        logprobs = self.logprobs().detach()
        return torch.where(self.mask, logprobs.sum(1, keepdim=True).exp(), 0.0)


CASES = [{"vocab_size": 4, "horizon": 3}, {"vocab_size": 3, "horizon": 2}, {"temperature": 0.7}, {"temperature": 1.6},
         {"kl_coef": 0.0}, {"kl_coef": 2.0}]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_expected_update_is_the_gradient_of_score_minus_beta_kl(case):
    task = Task(**case)
    batch = task.record()
    assert batch["values"][task.mask].std() > 0.1  # a baseline that is anything but constant, and cancels
    exact = task.gradient(task.objective())
    # Whole batch: weigh each response by its probability, undo the mean over tokens.
    weight = batch["logprobs"].sum(1, keepdim=True).exp() * task.mask.sum()
    assert_equal(task.step(batch | {"advantages": weight * batch["advantages"]}), exact, 1e-9)
    assert exact.norm() > 1e-3


def test_the_expected_update_is_the_same_when_every_response_is_a_batch_of_its_own():
    task = Task()
    assert_equal(task.expected_step(task.record()), task.gradient(task.objective()), 1e-9)


def test_with_perfect_values_the_expected_update_is_exact_at_any_lambda():
    task = Task()
    batch, chances = task.record(), task.logprobs().detach().sum(1).exp()
    # V(s) = E[return | s]: average the returns of all rows that pass through the same state. How much may still be written
    # belongs to the state, so the place where the response begins does.
    begins = task.mask.int().argmax(1).tolist()
    states = [[(begin, *row[: t + 1].tolist()) for t in range(task.mask.shape[1])] for begin, row in zip(begins, task.tokens)]
    total, mass = {}, {}
    for b, t in task.mask.nonzero().tolist():
        state = states[b][t]
        total[state] = total.get(state, 0.0) + chances[b] * batch["returns"][b, t]
        mass[state] = mass.get(state, 0.0) + chances[b]
    values = torch.zeros_like(batch["values"])
    for b, t in task.mask.nonzero().tolist():
        values[b, t] = total[states[b][t]] / mass[states[b][t]]
    exact = task.gradient(task.objective())
    logprobs, ref_logprobs = batch["logprobs"], batch["ref_logprobs"]
    rewards = kl_adjusted_rewards(task.scores, logprobs, ref_logprobs, task.mask, task.kl_coef)
    weight = chances[:, None] * task.mask.sum()
    for lam in (0.0, 0.5, 0.95, 1.0):
        advantages, _ = gae(rewards, values, task.mask, 1.0, lam)
        assert_equal(task.step(batch | {"advantages": weight * advantages}), exact, 1e-9)


@pytest.fixture(scope="module")
def rungs():
    """The ladder in a task where the values are perfect: how much the gradient of one response varies, and how far it is off on
    average."""
    return [(task, ladder.ladder(*task, kl_coef=0.5)) for task in (ladder.task(3, 3, seed) for seed in range(2))]


def test_each_rung_from_reinforce_to_ppo_takes_away_variance_and_adds_no_bias(rungs):
    names = ["total return", "reward-to-go", "less the value", "GAE, lam = 0.95"]
    for _, ladder_of_task in rungs:
        assert list(ladder_of_task) == names
        variances = [ladder_of_task[name]["variance"] for name in names]
        assert all(after < 0.99 * before for before, after in itertools.pairwise(variances))
        assert all(ladder_of_task[name]["bias"] < 1e-9 for name in names)


def test_the_variances_of_the_ladder_are_those_of_the_gradients_of_single_responses(rungs):
    (policy, ref, scores, tokens, mask, prompts), measured = rungs[0]
    logprobs, ref_logprobs = (evaluate_actions(x, tokens, mask)[0].detach() for x in (policy, ref))
    rewards = kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, 0.5)
    chances, returns = logprobs.sum(1).exp(), rewards.flip(1).cumsum(1).flip(1)
    values = ladder.perfect_values(tokens, mask, returns, chances)
    gradients = {name: [] for name in measured}
    for row in range(len(mask)):
        r, v = rewards[row, mask[row]], values[row, mask[row]]
        to_go = r.flip(0).cumsum(0).flip(0)
        delta = r + torch.cat([v[1:], v.new_zeros(1)]) - v
        lam = [sum(0.95 ** (s - t) * delta[s] for s in range(t, len(r))) for t in range(len(r))]
        for name, A in zip(measured, (r.sum().expand(len(r)), to_go, to_go - v, torch.stack(lam)), strict=True):
            log_p = evaluate_actions(policy, tokens[[row]], mask[[row]])[0][0, mask[row]]
            g = torch.autograd.grad((A * log_p).sum(), list(policy.trunk.parameters()))
            gradients[name].append(torch.cat([x.flatten() for x in g]))
    for name, rows in gradients.items():
        expected = 0.0
        for prompt in range(3):
            p, g = chances[prompts == prompt][:, None], torch.stack(rows)[prompts == prompt]
            expected += (p * g**2).sum() - (p * g).sum(0).square().sum()  # E|g|^2 - |E g|^2
        assert expected.item() == pytest.approx(measured[name]["variance"], rel=1e-9)


def test_the_expected_step_of_the_kl_loss_is_the_gradient_of_the_kl_in_the_states_visited():
    # The loss reaches the choice made in a state, not which states are reached: those count as given.
    task = Task()
    batch = task.record() | {"advantages": torch.zeros_like(task.mask, dtype=torch.float64)}
    policy, ref = (model(task.tokens[:, :-1])[0].log_softmax(-1) for model in (task.policy, task.ref))
    kl = (policy.exp() * (policy - ref)).sum(-1)
    exact = task.gradient((task.state_chances() * kl).sum())
    assert_equal(task.expected_step(batch, kl_loss_coef=0.3), -0.3 * exact, 1e-9)
    assert exact.norm() > 1e-2


def test_with_one_token_the_kl_loss_and_the_kl_in_the_reward_have_the_same_gradient():
    paid, charged = Task(horizon=1, kl_coef=0.3), Task(horizon=1, kl_coef=0.0)
    charged.policy, charged.ref, charged.scores = paid.policy, paid.ref, paid.scores
    assert_equal(charged.expected_step(charged.record(), kl_loss_coef=0.3), paid.expected_step(paid.record()), 1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_expected_step_of_the_entropy_bonus_is_the_gradient_of_the_entropy_in_the_states_visited(temperature):
    task = Task(temperature=temperature)
    batch = task.record() | {"advantages": torch.zeros_like(task.mask, dtype=torch.float64)}
    policy = (task.policy(task.tokens[:, :-1])[0] / temperature).log_softmax(-1)
    entropy = -(policy.exp() * policy).sum(-1)
    exact = task.gradient((task.state_chances() * entropy).sum())
    assert_equal(task.expected_step(batch, entropy_coef=0.2), 0.2 * exact, 1e-9)
    assert exact.norm() > 1e-2


def test_the_value_loss_drives_the_values_to_the_expected_return():
    # At V = E[return | state] the expected gradient of the plain squared error is zero.
    task = Task(kl_coef=0.0)
    batch = task.record() | {"advantages": torch.zeros_like(task.mask, dtype=torch.float64)}
    values = evaluate_actions(task.policy, task.tokens, task.mask)[1]
    chances = task.logprobs().detach().sum(1, keepdim=True).exp()
    exact = task.gradient((torch.where(task.mask, chances, 0.0) * 0.5 * (values - batch["returns"]) ** 2).sum())
    assert_equal(task.expected_step(batch, vf_coef=0.7, value_clip=inf), -0.7 * exact, 1e-9)


def test_the_expected_gradient_of_the_reward_model_is_that_of_the_bradley_terry_likelihood():
    model, truth = tiny_reward_model(), tiny_reward_model()
    pairs = [(prompt, a, b) for prompt in PROMPTS for a, b in itertools.combinations(list(responses(4, 2)), 2)]
    with torch.no_grad():
        a, b = pair_scores(truth, pairs, "cpu")
        chance = (a - b).sigmoid()  # that people prefer a
    parameters = list(model.parameters())

    def gradient(loss):
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in gradients])

    expected = 0.0
    for pair, p in zip(pairs, chance):  # the label is random: a is chosen with probability p
        for label, probability in ((pair, p), ((pair[0], pair[2], pair[1]), 1 - p)):
            expected = expected + probability * gradient(reward_model_loss(*pair_scores(model, [label], "cpu"))[0]) / len(pairs)
    a, b = pair_scores(model, pairs, "cpu")
    likelihood = chance * torch.log((a - b).sigmoid()) + (1 - chance) * torch.log(1 - (a - b).sigmoid())
    assert_equal(expected, gradient(-likelihood.mean()), 1e-9)
    assert expected.norm() > 1e-3
    # At the truth nothing is left to learn.
    model.load_state_dict(truth.state_dict())
    rest = sum(p * gradient(reward_model_loss(*pair_scores(model, [pair], "cpu"))[0])
               + (1 - p) * gradient(reward_model_loss(*pair_scores(model, [(pair[0], pair[2], pair[1])], "cpu"))[0])
               for pair, p in zip(pairs, chance))  # fmt: skip
    assert_equal(rest, torch.zeros_like(rest), 1e-9)


# What must not matter: padding, neighbours, their order, how a batch is split


def sampled(n=9, temperature=1.0):
    """A policy, a reference, a reward model, and responses of several lengths to prompts of several lengths."""
    policy, ref, scorer = biased(tiny_gpt(), {EOS: 2.0}), frozen_copy(tiny_gpt()), frozen_copy(tiny_reward_model())
    tokens, mask, logprobs, _ = generate(policy, [[1 + i % 3] * (1 + i % 4) for i in range(n)], 8, temperature)
    assert len(set(mask.sum(1).tolist())) > 2
    return policy, ref, scorer, tokens, mask, logprobs


def numbers(policy, ref, scorer, tokens, mask, temperature=1.0):
    """Everything that ppo_iteration computes about each row, before it averages anything: name -> (B,) or (B, T-1)."""
    with torch.no_grad():
        logprobs, values, entropy = evaluate_actions(policy, tokens, mask, temperature)
        ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, temperature)
    config = PPOConfig(length_penalty=0.1, missing_eos_penalty=0.5)
    scores, ended = score_responses(score_by(scorer), tokens, mask, config, EOS)
    rewards = kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, 0.2)
    advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
    k1, k3 = kl_per_response(logprobs, ref_logprobs, mask)
    out = {"logprobs": logprobs, "values": values, "entropy": entropy, "scores": scores, "ended": ended, "rewards": rewards}
    return out | {"advantages": advantages, "returns": returns, "k1": k1, "k3": k3}


def widened(tokens, mask, columns, junk):
    """The same rows with `columns` more columns, and every slot of padding filled with `junk`."""
    after = torch.arange(tokens.shape[1]) > row_lengths(mask)[:, None] - 1
    tokens = torch.where(after, junk, tokens)
    return torch.nn.functional.pad(tokens, (0, columns), value=junk), torch.nn.functional.pad(mask, (0, columns))


@pytest.mark.parametrize("junk", [0, 7, EOS])
@pytest.mark.parametrize("columns", [0, 3])
def test_what_stands_in_the_padding_and_how_much_there_is_changes_no_number_of_a_row(junk, columns):
    *models, tokens, mask, _ = sampled()
    clean, width = numbers(*models, tokens, mask), mask.shape[1]
    for name, x in numbers(*models, *widened(tokens, mask, columns, junk)).items():
        assert_equal((x[:, :width] if x.dim() == 2 else x).double(), clean[name].double(), 1e-6)
        assert x.dim() == 1 or not x[:, width:].any()


def test_a_row_alone_has_the_numbers_that_it_has_among_others_in_any_order():
    *models, tokens, mask, _ = sampled()
    together, order = numbers(*models, tokens, mask), torch.randperm(len(tokens))
    shuffled = numbers(*models, tokens[order], mask[order])
    for name, x in together.items():
        assert_equal(shuffled[name].double(), x[order].double(), 1e-6)
    for i in range(len(tokens)):
        width = int(row_lengths(mask)[i]) - 1
        alone = numbers(*models, tokens[i : i + 1, : width + 1], mask[i : i + 1, :width])
        for name, x in alone.items():
            assert_equal(x[0].double(), (together[name][i, :width] if x.dim() == 2 else together[name][i]).double(), 1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_sampled_cached_and_scored_logprobs_agree(temperature):
    policy, _, _, tokens, mask, logprobs = sampled(temperature=temperature)
    assert_equal(logprobs, evaluate_actions(policy, tokens, mask, temperature)[0])
    direct = (policy(tokens[:, :-1])[0] / temperature).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    assert_equal(logprobs[mask], direct[mask])


@pytest.mark.parametrize("minibatches", [1, 2, 4, 9])
def test_the_gradients_of_the_minibatches_add_up_to_that_of_the_batch(minibatches):
    policy, ref, scorer, tokens, mask, _ = sampled()
    with torch.no_grad():
        logprobs, values, _ = evaluate_actions(policy, tokens, mask)
        ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask)
    batch = {"tokens": tokens, "mask": mask, "logprobs": logprobs - 0.1, "ref_logprobs": ref_logprobs, "values": values - 0.1}
    batch |= {"advantages": whiten(noise(*mask.shape), mask), "returns": noise(*mask.shape)}
    seen, counts = [], []

    def watch(count):  # the loss of a minibatch is a mean over its tokens: weigh its gradient by their number
        optimizer = torch.optim.SGD(policy.parameters(), 0.0)
        gradients = []
        optimizer.register_step_pre_hook(lambda *_: gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()])))
        config = PPOConfig(batch_size=9, minibatches=count, max_grad_norm=inf, entropy_coef=0.1, kl_loss_coef=0.1)
        torch.manual_seed(0)
        ppo_update(policy, optimizer, batch, config)
        torch.manual_seed(0)
        counts[:] = [int(mask[rows].sum()) for rows in torch.randperm(9).tensor_split(count)]
        return sum(count * gradient for count, gradient in zip(counts, gradients, strict=True))

    seen = [watch(1), watch(minibatches)]
    assert_equal(seen[1], seen[0], 1e-9)
    assert seen[0].norm() > 0.1


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 100])
def test_a_minibatch_in_pieces_takes_the_same_step_however_the_tokens_are_spread(micro_batch):
    torch.manual_seed(0)
    task = Task()
    batch = task.record()
    changes = {"vf_coef": 0.5, "entropy_coef": 0.1, "kl_loss_coef": 0.1}
    whole = task.step(batch, **changes)
    assert len(set(task.mask.sum(1).tolist())) > 2 and whole.norm() > 1e-3
    assert_equal(task.step(batch, micro_batch=micro_batch, **changes), whole)


@pytest.mark.parametrize("junk", [nan, inf, 1e9])
def test_garbage_outside_the_mask_changes_no_gradient_of_an_update(junk):
    moves = []
    for filling in (0.0, junk):
        torch.manual_seed(0)
        task = Task()
        batch = task.record()
        batch = {name: torch.where(task.mask, x, filling) if x.is_floating_point() else x for name, x in batch.items()}
        moves.append(task.step(batch, vf_coef=0.5, entropy_coef=0.1, kl_loss_coef=0.1))
    assert_equal(moves[0], moves[1])
    assert math.isfinite(moves[0].norm()) and moves[0].norm() > 1e-3
