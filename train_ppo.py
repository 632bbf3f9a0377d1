"""Stage 3, PPO: the policy learns to write what the reward model scores highly, without straying far from the SFT model.

    python train_ppo.py                    after train_sft.py and train_rm.py, on the same data
    python train_ppo.py --data FOLDER      on prompts_train.jsonl and prompts_val.jsonl of your own: {"prompt"}
    python train_ppo.py --reward my:score  with a function of yours in my.py instead of the reward model

Each iteration: sample responses, score them, work out advantages, update. Writes out/ppo.pt and out/report.json.
"""

import importlib
import itertools
import json
import math
import sys
from pathlib import Path

import torch

from bench.report import make_report, print_report
from minippo import PPOConfig, UserError, adapt_kl_coef, evaluate_actions, explained_variance, frozen_copy, gae, generate
from minippo import kl_adjusted_rewards, kl_per_response, load_checkpoint, masked_mean, ppo_update, save_checkpoint
from minippo import score_responses, whiten
from plumbing import Progress, RunConfig, adamw, batches, encode_rows, join_rows, prepare, read_flags, read_rows, run_script, set_lr


def main():
    run, ppo = read_flags(__doc__, RunConfig(), PPOConfig())
    prepare(run)
    if ppo.cuda_graph and run.device == "cpu":
        raise UserError("--cuda_graph needs a CUDA GPU; leave it out")
    policy, reward_model, score, tokenizer, facts = load_models(run, ppo)
    prompts, val_prompts = (
        [prompt for (prompt,) in encode_rows(read_rows(run.data, "prompts", split), tokenizer, policy.config.context)]
        for split in ("train", "val")
    )
    ref = frozen_copy(policy)
    sft = frozen_copy(policy) if ppo.ref_update_every else ref  # the report compares with the SFT model itself
    if ppo.separate_critic:
        policy = policy.with_critic(reward_model)
    policy.eval()  # no dropout, ever: it would make the policy differ from itself
    optimizer = adamw(policy, ppo.lr)
    progress = Progress("ppo", run, (ppo, policy.config), ppo.steps, facts, policy=policy, ref=ref, optimizer=optimizer)
    kl_coef = progress.values.setdefault("kl_coef", ppo.kl_coef)

    print(f"PPO on {run.device}: {ppo.steps} iterations of {ppo.batch_size} responses, {ppo.epochs} x {ppo.minibatches} steps each")
    stream = itertools.chain.from_iterable(batches(len(prompts), ppo.batch_size, run.seed))
    stream = itertools.islice(stream, progress.values["step"] * ppo.batch_size, None)
    for step in range(progress.values["step"], ppo.steps):
        lr = set_lr(optimizer, ppo.lr, step, ppo.steps, ppo.warmup)

        # 1. Sample a response to each prompt.  2. Score it, and each of its tokens.
        rows = sorted(prompts[i] for i in itertools.islice(stream, ppo.batch_size))  # what begins alike is read once
        batch, scores, ended = rollout(policy, ref, score, rows, ppo)
        if step == 0:
            check_start(policy, batch, ppo, 1e-3 if run.dtype == "float32" else 0.2)

        # 3. Rewards per token, and how much better than expected each token was.
        rewards = kl_adjusted_rewards(scores, batch["logprobs"], batch["ref_logprobs"], batch["mask"], kl_coef)
        advantages, batch["returns"] = gae(rewards, batch["values"], batch["mask"], ppo.gamma, ppo.lam)
        batch["advantages"] = whiten(advantages, batch["mask"])

        # 4. Update the policy and the value function.
        stats = ppo_update(policy, optimizer, batch, ppo, step + 1)

        metrics, kl = measure(batch, scores, ended, kl_coef)
        if step % 40 == 0:
            two = [0, len(rows) // 2]
            for i, *texts in zip(two, *texts_of(tokenizer, batch["tokens"][two], batch["mask"][two])):
                print(f"    {''.join(texts)!r}  score {scores[i]:.2f}  KL {kl[i]:.2f}")

        # 5. Adapt beta to the KL, and move the reference, if so asked.
        kl_coef = progress.values["kl_coef"] = adapt_kl_coef(kl_coef, metrics["kl"], ppo.kl_target, ppo.batch_size, ppo.kl_horizon)
        if ppo.ref_update_every and (step + 1) % ppo.ref_update_every == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)
        progress.end_step(sum(map(len, rows)) + int(batch["mask"].sum()), SHOWN, **metrics, **stats, lr=lr)

    save_checkpoint(run.out / "ppo.pt", "ppo", policy, tokenizer)
    print(f"saved {run.out / 'ppo.pt'}{'' if ppo.no_report else '; now the report'}")
    if not ppo.no_report:
        report = make_report(policy, sft, reward_model, score, val_prompts, tokenizer, run, ppo, facts)
        (run.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        print_report(report)


@torch.no_grad()
def rollout(policy, ref, score, prompts, ppo):
    """Responses to P prompts, lists of ids, and all that there is to know of them before the update.

    -> batch: tokens (P, T), and (P, T-1) each: mask, logprobs, values, ref_logprobs; scores, and whether each ended: (P,).
    """
    parts, size, settings = [], ppo.rollout_batch or len(prompts), (ppo.max_new_tokens, ppo.temperature)
    for i in range(0, len(prompts), size):
        # Sampling knows the log-probability of each token and the value before it: nothing has to read the rows again.
        tokens, mask, logprobs, values = generate(policy, prompts[i : i + size], *settings, cuda_graph=ppo.cuda_graph)
        scores, ended = score(tokens, mask)
        ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, ppo.temperature, with_entropy=False)
        parts.append((tokens, mask, logprobs, values, ref_logprobs, scores, ended))
    *rows, scores, ended = join_rows(parts)
    return dict(zip(("tokens", "mask", "logprobs", "values", "ref_logprobs"), rows)), scores, ended


@torch.no_grad()
def check_start(policy, batch, ppo, tolerance):
    """Before the first update policy, sampler and reference are one and the same. Most bugs of RLHF code show up here."""
    some = {name: x[: ppo.rollout_batch or None] for name, x in batch.items()}
    scored, _, _ = evaluate_actions(policy, some["tokens"], some["mask"], ppo.temperature, with_entropy=False)
    off = ((scored - some["logprobs"]).exp() - 1).abs().max().item()
    kl = (scored - some["ref_logprobs"]).abs().max().item()
    if not off <= tolerance:
        raise UserError(f"before the first update a ratio is {off:.4f} away from 1: sampling and scoring disagree")
    if not kl <= tolerance:
        raise UserError(f"before the first update a token is {kl:.4f} nats away from the reference, not 0")
    print("checked: before the first update the ratio is 1 and the KL to the reference is 0")


SHOWN = ["score", "kl", "entropy", "eos_rate"]  # on the screen; all metrics are in the log


def measure(batch, scores, ended, kl_coef):
    """What the log says of a batch of responses, and the KL of each, (P,)."""
    mask = batch["mask"]
    kl, kl_k3 = kl_per_response(batch["logprobs"], batch["ref_logprobs"], mask)
    score, mean, error = scores.mean().item(), kl.mean().item(), kl.std(correction=0).item() / math.sqrt(len(kl))
    if len(kl) >= 16 and mean < -4 * error - 1e-4:  # the error of a few responses is not to be relied on
        print(f"warning: KL {mean:.3f} ± {error:.3f} is below 0: sampling and scoring disagree")
    return {
        "score": score, "kl": mean, "kl_k3": kl_k3.mean().item(), "kl_coef": kl_coef, "rlhf_reward": score - kl_coef * mean,
        "entropy": -masked_mean(batch["logprobs"], mask).item(),  # entropy = E[-log pi], here over samples
        "explained_variance": explained_variance(batch["values"], batch["returns"], mask),
        "response_length": mask.sum(1).float().mean().item(), "eos_rate": ended.float().mean().item(),
    }, kl  # fmt: skip


def load_models(run, ppo):
    """-> policy, reward model (None with --reward), the function that scores responses, tokenizer, facts for the report."""
    folder = Path(ppo.models or run.out)
    policy, tokenizer, sft_facts = load_checkpoint(folder / "sft.pt", ["sft"], run.device)
    reward_model, facts, function = None, {"sft": sft_facts}, load_function(ppo.reward) if ppo.reward else None
    if not function:
        reward_model, rm_tokenizer, facts["rm"] = load_checkpoint(folder / "rm.pt", ["rm"], run.device)
        if rm_tokenizer.tokens != tokenizer.tokens or reward_model.config != policy.config:
            raise UserError(f"{folder}: rm.pt was not made from sft.pt; run train_rm.py again after train_sft.py")
        reward_model = frozen_copy(reward_model)
    elif ppo.separate_critic:
        raise UserError("--separate_critic starts from the reward model, and with --reward there is none")

    def score(tokens, mask):
        def scores_of_texts(tokens, lengths):
            return score_texts(function, tokenizer, tokens, mask)

        model = scores_of_texts if function else reward_model
        return score_responses(model, tokens, mask, tokenizer.eot, ppo.length_penalty, ppo.missing_eos_penalty)

    return policy, reward_model, score, tokenizer, facts


def load_function(name):
    """"module:function" -> the function; the module is looked for in the current folder too."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError(f"{function} is no function")
        return found
    except (ImportError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"--reward {name}: {error}; should be module:function, for instance my:score for score() in my.py")


def texts_of(tokenizer, tokens, mask):
    """Rows (B, T) -> their prompts and their responses as text."""
    begins = mask.int().argmax(1) + 1
    prompts = [tokenizer.decode(row[:begin].tolist()) for row, begin in zip(tokens, begins)]
    return prompts, [tokenizer.decode(row[1:][inside].tolist()) for row, inside in zip(tokens, mask)]


def score_texts(function, tokenizer, tokens, mask):
    """The scores (B,) that a function of texts gives to rows (B, T), in place of a reward model."""
    scores = function(*texts_of(tokenizer, tokens, mask))
    try:
        scores = torch.tensor([float(score) for score in scores], device=tokens.device)
    except (TypeError, ValueError, RuntimeError):  # no list, or a list of something else
        scores = torch.tensor([])
    if len(scores) != len(tokens) or not scores.isfinite().all():
        raise UserError(f"--reward: {len(tokens)} responses should get {len(tokens)} finite numbers, got {scores.tolist()}"[:200])
    return scores


if __name__ == "__main__":
    run_script(main)
