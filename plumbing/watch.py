"""What train_ppo.py looks at besides the metrics: does the start make sense, do the prompts, does the KL?"""

import math

import torch

from minippo import evaluate_actions, kl_per_response, score_responses
from plumbing.fast import generate
from plumbing.settings import UserError
from plumbing.text import texts_of

ASTRAY = (20.0, 10.0)  # a response whose KL exceeds the first, in nats, plus so many times that of the median response
SPREAD = (0.02, 20.0)  # of the scores at the start; beyond these the default beta means something else


def warn_of(prompts, models, config):
    """Say what does not go together, before it costs a run."""
    context, most = models.policy.config.context, config.max_new_tokens
    short = sum(len(prompt) + most > context for prompt in prompts)
    if short:
        room = f"leave less than {most} tokens of the context of {context} for a response"
        print(f"warning: {short:,} of {len(prompts):,} prompts {room} (--max_new_tokens)")
    rm = models.facts.get("rm", {})
    if rm.get("max_new_tokens", most) != most:
        length = f"answers of up to {rm['max_new_tokens']} tokens, and PPO writes up to {most}"
        print(f"warning: scores have mean 0 and standard deviation 1 on {length}; train_rm.py --max_new_tokens {most}")
    if rm.get("val_accuracy", 1) < 0.5 + 2 * rm.get("val_accuracy_se", 0):
        print("warning: the reward model is no better than chance: what PPO learns from it is noise")


@torch.no_grad()
def check_start(policy, ref, score, prompts, config, stage, dtype):
    """Nothing has been trained yet, so pi / old must be 1 at every token, and the KL 0, unless --policy or --reference was given.
    If they are not, sampling and scoring disagree (padding? dropout? temperature?): training makes no sense.

    In bfloat16 single tokens are off by its rounding, so there the mean is judged.
    """
    prompts = prompts[: stage.rollout_batch or len(prompts)]
    tokens, mask, logprobs, _ = generate(policy, prompts, config.max_new_tokens, config.temperature)
    same, there = (evaluate_actions(x, tokens, mask, config.temperature, with_entropy=False)[0] for x in (policy, ref))
    off, apart = ((same - logprobs).exp() - 1).abs()[mask], (same - there).abs()[mask]
    off = (off.max() if dtype == "float32" else off.mean()).item()
    tolerance, when = 1e-3 if dtype == "float32" else 0.05, "before the first update"
    if not off <= tolerance:
        raise UserError(f"{when} a ratio is {off:.4f} off 1: sampling and scoring disagree")
    if not (stage.policy or stage.reference or apart.max() <= tolerance):
        raise UserError(f"{when} a token is {apart.max():.4f} nats away from the reference, not 0")
    print(f"checked: {when} the ratio is 1{'' if stage.policy or stage.reference else ' and the KL to the reference is 0'}")
    spread = score_responses(score, tokens, mask, config, policy.config.eos)[0].std(correction=0).item()
    if config.kl_coef and len(prompts) > 1 and not SPREAD[0] <= spread <= SPREAD[1]:
        suits = f"--kl_coef {config.kl_coef:g} suits a spread around 1"
        print(f"warning: the standard deviation of the first scores is {spread:.3g}; {suits}")


def look(batch, tokenizer, show):
    """Warn if the KL is below 0, which a true KL cannot be, and of responses that went astray; show two responses if asked to.

    Astray: after a beginning that the policy hardly ever writes, nothing keeps it near the reference. If such a beginning is drawn
    all the same, what follows is no language, and often does not end. (See "An accident worth knowing" in RESULTS.md.)
    """
    kl, _ = kl_per_response(batch["logprobs"], batch["ref_logprobs"], batch["mask"])
    mean, error = kl.mean().item(), kl.std(correction=0).item() / math.sqrt(len(kl))
    if len(kl) >= 16 and mean < -4 * error - 1e-4:  # the error of a few is not to be relied on
        print(f"warning: KL {mean:.3f} ± {error:.3f} is below 0: sampling and scoring disagree")
    astray = kl > ASTRAY[0] + ASTRAY[1] * kl.median()
    if astray.any():
        worst = [int(kl.argmax())]
        _, (text,) = texts_of(tokenizer, batch["tokens"][worst], batch["mask"][worst])
        print(f"warning: {int(astray.sum())} of {len(kl)} responses went astray. KL {kl.max():.0f}: {text[:80]!r}")
    if show:
        two = [0, len(kl) // 2]
        for i, *texts in zip(two, *texts_of(tokenizer, batch["tokens"][two], batch["mask"][two])):
            print(f"    {''.join(texts)!r}  score {batch['scores'][i]:.2f}  KL {kl[i]:.2f}")
