"""The ladder from REINFORCE to PPO: how much the gradient of one sampled response varies, exactly.

    python -m bench.ladder    writes bench/results.json and RESULTS.md; takes seconds

What multiplies a token's grad log pi? Section 5 of minippo.py climbs from the whole reward of the
response, over the return from the token on and that less a value, to GAE's advantage. On average
they give the same gradient. Here is by how much one sample is off, in a task so small that every
response can be listed with its probability: the variance E|g - E g|^2 of the gradient g of one
response. The values are perfect: V(s) is the mean return of all responses that pass through s. As a
rule, not by a law, each rung has less variance than the one before.
"""

import itertools

import torch

from bench.tables import keep, made, tables
from minippo import GPT, GPTConfig, RewardModel, evaluate_actions, gae, kl_adjusted_rewards
from minippo import row_lengths
from plumbing.page import rounded
from plumbing.rows import pad_completions


def responses(vocab_size, horizon):
    """All that may be sampled: up to the end token, the last id, or cut off at the horizon."""
    for length in range(horizon + 1):
        for words in itertools.product(range(vocab_size - 1), repeat=length):
            yield [*words, vocab_size - 1] if length < horizon else [*words]


def perfect_values(tokens, mask, returns, chances):
    """V(s) = E[return | s]: (B, T), (B, T-1) each, and the probabilities (B,) of the rows, which
    list every response to a prompt -> (B, T-1). A state is all tokens so far."""
    values = torch.zeros_like(returns)
    for t in range(mask.shape[1]):
        live = mask[:, t]
        _, state = tokens[live, : t + 1].unique(dim=0, return_inverse=True)
        mass = torch.zeros_like(chances).index_add(0, state, chances[live])
        total = torch.zeros_like(chances).index_add(0, state, (chances * returns[:, t])[live])
        values[live, t] = (total / mass)[state]
    return values


def estimates(policy, tokens, mask, advantages):
    """sum_t A_t grad log pi_t of each row: (B, T), (B, T-1) each -> (B, P) for the P weights that
    log pi depends on."""
    weights = list(policy.trunk.parameters())  # the vocabulary head's are the token embedding's
    rows = []
    for row in range(len(mask)):
        logprobs, _, _ = evaluate_actions(policy, tokens[row, None], mask[row, None])
        found = torch.autograd.grad((advantages[row] * logprobs).sum(), weights)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def ladder(policy, ref, scores, tokens, mask, kl_coef):
    """Every response to a prompt, with its score (B,) -> {rung: {"variance": E|g - E g|^2}}."""
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
        gradients = estimates(policy, tokens, mask, x)  # (B, P)
        mean = chances @ gradients
        variance = chances @ (gradients - mean).square().sum(1)
        rungs[rung] = {"variance": variance.item()}
    return rungs


def task(vocab_size, horizon, seed, size=0.3):
    """Policy, reference and reward model with random weights, and every response: what ladder()
    takes but the price of the KL."""
    torch.manual_seed(seed)
    config = GPTConfig(vocab_size, 16, layers=2, heads=2, channels=8)
    networks = [make(config).double().eval() for make in (GPT, GPT, RewardModel)]
    with torch.no_grad():
        for parameter in torch.nn.ModuleList(networks).parameters():
            parameter.add_(size * torch.randn_like(parameter))
    tokens, mask = pad_completions([([1, 0, 1], y) for y in responses(vocab_size, horizon)])
    policy, ref, reward_model = networks
    return policy, ref, reward_model(tokens, row_lengths(mask)).detach(), tokens, mask


def main():
    torch.set_num_threads(1)
    rungs, source = ladder(*task(vocab_size=4, horizon=4, seed=0), kl_coef=0.5), made()
    first = rungs["total return"]["variance"]
    for rung in rungs.values():
        rung |= {"share of the first": rung["variance"] / first, "made": source}
    keep({"ladder": rungs})
    print(tables(rounded({"ladder": rungs}))["ladder"])


if __name__ == "__main__":
    main()
