"""DPO, direct preference optimisation: from the pairs to the policy, without a reward model's
scores.

    python -m variations.dpo           after train_sft.py and train_rm.py, on pref_train.jsonl
    python -m variations.dpo --ipo     with the loss of IPO

The policy with the largest J for a reward r is proportional to ref * exp(r / beta). Solved for r:

    r(x, y) = beta * log(pi(y | x) / ref(y | x)) + something that depends only on x

The Bradley-Terry loss (section 4 of minippo.py) needs only differences of r between answers to the
same x. So put this r into it, and train pi on the pairs (chosen, rejected). The loss of a pair is

    h   = log(pi / ref) of the chosen answer - log(pi / ref) of the rejected one
    DPO = -log sigmoid(beta * h)          Rafailov et al., arXiv:2305.18290, eq. 7
    IPO = (h - 1 / (2 beta))^2            Azar et al., arXiv:2310.12036, eq. 17: h has a target

Scores have standard deviation 1, but r does not, so the same --kl_coef is not the same penalty.
rm.pt and the 32 responses of an iteration are only for the log and the report.
"""

from dataclasses import dataclass

import torch

from minippo import accumulate_gradient, batch_metrics, evaluate_actions, gradient_step, mean_stats
from minippo import reward_model_loss, rollout
from plumbing.models import load_models
from plumbing.report import report
from plumbing.run import Run, adam
from plumbing.settings import read_flags, script
from plumbing.text import pad_completions, read_ids


@dataclass
class Settings:
    steps: int = 450  # iterations
    batch_size: int = 128  # pairs per iteration
    minibatches: int = 4  # gradient steps per iteration
    micro_batch: int = 0  # pairs in memory at once; 0: all of them
    lr: float = 8e-4  # peak learning rate, falling to 0
    warmup: int = 5  # iterations in which the rate climbs to its peak; at most a tenth of all
    adam_eps: float = 1e-4  # Adam's epsilon; weights with tiny, noisy gradients move less
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    kl_coef: float = 0.1  # beta
    ipo: bool = False  # the loss of IPO instead
    temperature: float = 1.0  # divides the logits, in sampling and in every log pi
    max_new_tokens: int = 48  # longest of the responses for the log, in tokens
    length_penalty: float = 0.0  # subtracted from their score for each token
    missing_eos_penalty: float = 1.0  # subtracted if one was cut off
    models: str = ""  # folder of sft.pt and rm.pt; if empty, --out or else the folder above it
    policy: str = ""  # checkpoint to start from instead of sft.pt, which remains the reference
    reward: str = ""  # module:function to score responses instead of rm.pt; see docs/using.md
    no_report: bool = False  # end without measuring the result on the validation prompts

    def __post_init__(self):
        if not (self.kl_coef > 0 and self.temperature > 0):
            numbers = f"kl_coef ({self.kl_coef}) and temperature ({self.temperature})"
            raise ValueError(f"{numbers}: should be above 0")
        if self.minibatches > self.batch_size:
            numbers = f"minibatches ({self.minibatches}), batch_size ({self.batch_size})"
            raise ValueError(f"{numbers}: a minibatch should have a pair")


def dpo_loss(policy, ref, pairs, config):
    """(prompt, chosen, rejected) as ids -> mean over the pairs, stats."""
    rows, beta = [(x, answer) for x, *answers in pairs for answer in answers], config.kl_coef
    tokens, mask = pad_completions(rows, policy.lm_head.weight.device)  # (2B, T), (2B, T-1)
    a, b = (evaluate_actions(x, tokens, mask, config.temperature)[0] for x in (policy, ref))
    chosen, rejected = (a - b).sum(1).view(-1, 2).unbind(1)  # log(pi / ref), (B,) each
    loss, stats = reward_model_loss(beta * chosen, beta * rejected)
    if config.ipo:
        loss = ((chosen - rejected - 1 / (2 * beta)) ** 2).mean()
    return loss, stats | {"loss": loss.item()}


@script
def main():
    config = read_flags(__doc__, Settings, out="out/dpo")
    policy, ref, score, tokenizer = load_models(config)
    pairs = read_ids(config.data, "pref", "train", tokenizer, policy.config.context)
    optimizer, schedule = adam(policy, config)
    run = Run("ppo", config, policy, tokenizer, optimizer, schedule, data=pairs, ref=ref)

    def loss_of(pairs):
        return dpo_loss(policy, ref, pairs, config)

    for _ in run.steps():
        batch_pairs, steps = run.batch(pairs, config.batch_size), []
        prompts = [prompt for prompt, *_ in batch_pairs[:32]]
        batch = rollout(policy, ref, score, prompts, config)  # only for the log
        for indices in torch.arange(len(batch_pairs)).tensor_split(config.minibatches):
            minibatch = [batch_pairs[i] for i in indices]
            optimizer.zero_grad()
            stats = accumulate_gradient(loss_of, minibatch, config.micro_batch, len)
            stats["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
            steps.append(stats)
        schedule.step()
        stats = mean_stats([(1 / len(steps), stats) for stats in steps])
        run.end_step(stats | batch_metrics(batch, config), batch)

    run.finish()
    report(run, score, [prompt for prompt, *_ in pairs])


if __name__ == "__main__":
    main()
