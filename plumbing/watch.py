"""A check before PPO begins, and what the screen says while it runs."""

import math

import torch

from data.rows import UserError
from minippo import evaluate_actions, gather_logprobs, generate, kl_per_response
from plumbing.settings import printable
from plumbing.text import responses_of


@torch.no_grad()
def check_start(policy, ref, score, prompts, config):
    """Before the first update pi / old must be 1 at every token and, if the policy starts as the
    SFT model, the KL 0; else UserError. In bfloat16 rounding moves single tokens: there the mean
    ratio counts. Warns if the scores have another scale than the settings expect."""
    tokens, mask = generate(policy, prompts, config.max_new_tokens, config.temperature)
    logprobs, _ = evaluate_actions(policy, tokens, mask, config.temperature)
    ref_logprobs, _ = evaluate_actions(ref, tokens, mask, config.temperature)
    # As sampling reads them: token by token, with a cache
    cache = [[] for _ in range(policy.config.layers)]
    states = range(tokens.shape[1] - 1)
    hidden = torch.cat([policy.trunk(tokens[:, t : t + 1], cache, t) for t in states], 1)[mask]
    sampled = gather_logprobs(policy.lm_head(hidden), tokens[:, 1:][mask], config.temperature)

    off = ((logprobs[mask] - sampled).exp() - 1).abs()
    worst, limit = (off.mean(), 0.05) if policy.config.bfloat16 else (off.max(), 1e-3)
    if not worst <= limit:
        raise UserError(f"before training a ratio is {worst:.4f} off 1: sampling and update differ")
    nats = (logprobs - ref_logprobs)[mask].abs().max()
    if not config.policy and not nats <= 1e-3:
        raise UserError(f"before training a token is {nats:.4f} nats from the reference, not 0")
    kl = "" if config.policy else " and the KL to the reference is 0"
    print(f"checked: before the first update the ratio is 1{kl}")
    spread = score(prompts, tokens, mask).double().std(correction=0).item()
    if spread > 0 and not 0.2 < spread < 5:
        print(f"warning: the standard deviation of the first scores is {spread:.2g}: divide by it")


def metrics(batch, prompts, judge, tokenizer):
    """What minippo.batch_metrics leaves out. With a value function, explained_variance, 1 -
    Var(returns - values) / Var(returns): 1 if the values are perfect, 0 if they are no better than
    the mean. With a judge, its mean grade."""
    stats = {}
    if "returns" in batch:
        returns = batch["returns"][batch["mask"]]
        errors = returns - batch["old_values"][batch["mask"]]
        stats["explained_variance"] = 1 - errors.var().item() / (returns.var().item() + 1e-8)
    if judge:
        responses = responses_of(batch["tokens"], batch["mask"])
        texts = [(p.row["prompt"], tokenizer.decode(ids)) for p, ids in zip(prompts, responses)]
        stats["judge"] = sum(judge(*pair) for pair in texts) / len(texts)
    return stats


def show(step, batch, stats, prompts, tokenizer):
    """Now and then: a response of the batch, and a warning if something looks wrong."""
    if step % 40 == 1:
        i = step % len(prompts)  # they are sorted by length: not always the shortest
        ids = responses_of(batch["tokens"], batch["mask"])[i]
        text = printable((prompts[i].row["prompt"] + tokenizer.decode(ids))[:400], keep="")
        print(f"       {text!r}  score {batch['scores'][i]:.2f}")
    kl = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], batch["mask"])
    error = kl.std(correction=0).item() / math.sqrt(len(kl))
    message = ""
    if len(kl) >= 16 and stats["kl"] < -4 * error - 1e-4:
        message = f"the KL is {stats['kl']:.3f}, below 0: sampling and update disagree"
    elif stats["kl"] > 100 or stats["entropy"] < 0.02:
        message = "all answers may be the same by now (a smaller --lr, a larger --kl_coef?)"
    elif stats["eos_rate"] < 0.5:
        message = "most responses are cut off (a larger --max_new_tokens?)"
    if message and step % 10 == 1:
        print(f"warning: iteration {step}: {message}")
