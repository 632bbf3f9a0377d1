"""The ladder from REINFORCE to PPO: how much the gradient of one sampled response varies, exactly.

    python -m bench.ladder    writes bench/results.json and RESULTS.md; takes seconds

What multiplies a token's grad log pi? Section 5 of minippo.py climbs from the whole reward of the
response, over the return from the token on and that less a value, to GAE's advantage. On average
they give the same gradient. Here is by how much one sample is off, in a task so small that every
response can be listed with its probability: the variance E|g - E g|^2 of the gradient g of one
response, summed over the prompts, and the bias, how far E g is from that of the first rung, which
is the gradient of J. The values are perfect: V(s) is the mean return of all responses that pass
through s. Each rung has less variance as a rule, not by a law: with a small beta there are tasks in
which the rewards before a token happen to cancel something.
"""

import itertools

import torch

from bench.tables import keep, tables
from minippo import (
    GPT,
    GPTConfig,
    RewardModel,
    evaluate_actions,
    frozen_copy,
    gae,
    kl_adjusted_rewards,
    row_lengths,
)
from plumbing.rows import pad_completions

PROMPTS = [[0], [1, 0, 1], [0, 1]]  # of different lengths, in one batch


def responses(vocab_size, horizon):
    """All that may be sampled: up to the end token, the last id, or cut off at the horizon."""
    eos = vocab_size - 1
    for length in range(1, horizon + 1):
        for words in itertools.product(range(eos), repeat=length - 1):
            yield [*words, eos]
    yield from (list(words) for words in itertools.product(range(eos), repeat=horizon))


def perfect_values(tokens, mask, returns, chances):
    """V(s) = E[return | s]: (B, T), (B, T-1) each, and the probabilities (B,) of the rows, which
    list every response to each prompt -> (B, T-1). A state is where the response begins and all
    tokens so far."""
    begins = mask.int().argmax(1).tolist()
    states = {(b, t): (begins[b], *tokens[b, : t + 1].tolist()) for b, t in mask.nonzero().tolist()}
    total, mass = dict.fromkeys(states.values(), 0.0), dict.fromkeys(states.values(), 0.0)
    for (b, t), state in states.items():
        total[state] += chances[b] * returns[b, t]
        mass[state] += chances[b]
    values = torch.zeros_like(returns)
    for (b, t), state in states.items():
        values[b, t] = total[state] / mass[state]
    return values


def estimates(policy, tokens, mask, advantages):
    """sum_t A_t grad log pi_t of each row: (B, T), (B, T-1) each -> (B, P) for the P weights that
    log pi depends on."""
    weights = list(policy.trunk.parameters())  # the vocabulary head's are the token embedding's
    rows = []
    for i in range(len(mask)):
        row = slice(i, i + 1)
        logprobs, _, _ = evaluate_actions(policy, tokens[row], mask[row])
        rows.append(torch.autograd.grad((advantages[row] * logprobs)[mask[row]].sum(), weights))
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def variance_and_mean(estimates, chances, prompts):
    """Estimates (B, P) of the gradient, one from each response; chances, prompts (B,): its
    probability, the number of its prompt. -> E|g - E g|^2 for each prompt, summed, and the sum of
    the E g, (P,)."""
    means = estimates.new_zeros(int(prompts.max()) + 1, estimates.shape[1])
    means.index_add_(0, prompts, chances[:, None] * estimates)
    spread = (estimates - means[prompts]).square().sum(1)  # (B,)
    return (chances * spread).sum().item(), means.sum(0)


def ladder(policy, ref, scores, tokens, mask, prompts, kl_coef):
    """Every response to every prompt, with its score (B,) -> {rung: {"variance": ..., "bias":
    ...}}."""
    with torch.no_grad():
        logprobs, _, _ = evaluate_actions(policy, tokens, mask)
        ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask)
    chances, nothing = logprobs.sum(1).exp(), torch.zeros_like(logprobs)
    rewards = kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, kl_coef)
    to_go, returns = gae(rewards, nothing, mask, 1.0, 1.0)
    values = perfect_values(tokens, mask, returns, chances)
    advantages = {
        "total return": rewards.sum(1, keepdim=True) * mask,
        "reward-to-go": to_go,
        "less the value": gae(rewards, values, mask, 1.0, 1.0)[0],
        "GAE, lam = 0.95": gae(rewards, values, mask, 1.0, 0.95)[0],
    }
    rungs = {}
    for rung, x in advantages.items():
        gradients = estimates(policy, tokens, mask, x)
        rungs[rung] = variance_and_mean(gradients, chances, prompts)
    exact = rungs["total return"][1]  # E[grad log p(y) R(y)], from which section 5 starts
    return {
        rung: {"variance": variance, "bias": (mean - exact).norm().item()}
        for rung, (variance, mean) in rungs.items()
    }


def task(vocab_size, horizon, seed, size=0.3):
    """Policy, reference and reward model with random weights, and every response: what ladder()
    takes but the price of the KL."""
    torch.manual_seed(seed)
    config = GPTConfig(vocab_size, 16, layers=2, heads=2, channels=8)
    networks = [make(config).double().eval() for make in (GPT, GPT, RewardModel)]
    with torch.no_grad():
        for parameter in torch.nn.ModuleList(networks).parameters():
            parameter.add_(size * torch.randn_like(parameter))
    policy, ref, reward_model = networks
    rows = [
        (i, prompt, response)
        for i, prompt in enumerate(PROMPTS)
        for response in responses(vocab_size, horizon)
    ]
    tokens, mask = pad_completions([row[1:] for row in rows])
    with torch.no_grad():
        scores = reward_model(tokens, row_lengths(mask))
    return policy, frozen_copy(ref), scores, tokens, mask, torch.tensor([i for i, _, _ in rows])


def main():
    torch.set_num_threads(1)
    rungs = ladder(*task(vocab_size=4, horizon=4, seed=0), kl_coef=0.5)
    keep({"ladder": rungs})
    print(tables({"ladder": rungs})["ladder"])


if __name__ == "__main__":
    main()
