"""What train_ppo.py looks at besides the metrics: do the settings, the start, and the KL make sense?"""

import math
import time

import torch

from minippo import evaluate_actions, kl_per_response, row_lengths, score_responses
from plumbing.errors import UserError
from plumbing.fast import generate
from plumbing.page import write_page
from plumbing.recorder import Recorder
from plumbing.report import truth_about
from plumbing.tokenizer import texts_of
from plumbing.training import reward_model_warnings

# A response went astray if its KL exceeds 20 nats plus 10 times that of the median response.
ASTRAY_NATS, ASTRAY_MEDIANS = 20.0, 10.0
SPREAD = (0.02, 20.0)  # of the first scores; beyond these the default beta means something else
PAGE_SECONDS = 60  # between two versions of the page


def check_settings(config, stage):
    """UserError for numbers that do not go together."""
    if config.minibatches > stage.batch_size:
        raise UserError(
            f"--minibatches {config.minibatches}: more than --batch_size {stage.batch_size}"
        )
    if stage.batch_size % stage.group_size:
        groups = f"should be a multiple of {stage.group_size}, the group size"
        raise UserError(f"--batch_size {stage.batch_size}: {groups}")
    if stage.kl_horizon < math.inf and not config.kl_coef:
        raise UserError("--kl_horizon has no effect with --kl_coef 0: beta would stay 0")


def warn_about(prompts, models, config):
    """Say what does not go together, before it costs a run."""
    context, longest = models.policy.config.context, config.max_new_tokens
    short = sum(len(prompt) + longest > context for prompt in prompts)
    if short:
        room = f"leave less than {longest} tokens of the context of {context} for a response"
        print(f"warning: {short:,} of {len(prompts):,} prompts {room} (--max_new_tokens)")
    rm = models.facts.get("rm", {})
    if rm.get("max_new_tokens", longest) != longest:
        lengths = f"answers of up to {rm['max_new_tokens']} tokens, and PPO writes up to {longest}"
        scale = "scores have mean 0 and standard deviation 1 on"
        print(f"warning: {scale} {lengths}; run train_rm.py with --max_new_tokens {longest}")
    for doubt in reward_model_warnings(rm):
        print(doubt)


@torch.no_grad()
def check_start(policy, ref, score, prompts, config, stage, dtype):
    """Nothing has been trained yet, so pi / old must be 1 at every token, and the KL 0, unless
    --policy or --reference was given. If they are not, sampling and scoring disagree (padding?
    dropout? temperature?): training makes no sense.

    In bfloat16 single tokens are off by its rounding, so there the mean is judged.
    """
    prompts = prompts[: stage.rollout_batch or stage.batch_size]
    tokens, mask, sampled, _ = generate(policy, prompts, config.max_new_tokens, config.temperature)
    scored, ref_logprobs = (
        evaluate_actions(model, tokens, mask, config.temperature, with_entropy=False)[0]
        for model in (policy, ref)
    )
    off = ((scored - sampled).exp() - 1).abs()[mask]  # of the ratio
    nats = (scored - ref_logprobs).abs()[mask]
    off = (off.max() if dtype == "float32" else off.mean()).item()
    tolerance, when = 1e-3 if dtype == "float32" else 0.05, "before the first update"
    if not off <= tolerance:
        raise UserError(f"{when} a ratio is {off:.4f} off 1: sampling and scoring disagree")
    from_sft = not (stage.policy or stage.reference)
    if from_sft and not nats.max() <= tolerance:
        raise UserError(f"{when} a token is {nats.max():.4f} nats away from the reference, not 0")
    kl = " and the KL to the reference is 0" * from_sft
    print(f"checked: {when} the ratio is 1{kl}")
    scores, _ = score_responses(score, tokens, mask, config, policy.config.eos)
    spread = scores.std(correction=0).item()
    if config.kl_coef and len(prompts) > 1 and not SPREAD[0] <= spread <= SPREAD[1]:
        suits = f"--kl_coef {config.kl_coef:g} suits a spread around 1"
        print(f"warning: the standard deviation of the first scores is {spread:.3g}; {suits}")


def check_kl(batch, tokenizer):
    """Warn if the KL is below 0, which a true KL cannot be, and of responses that went astray.

    Astray: after a beginning that the policy hardly ever writes, nothing keeps it near the
    reference. If such a beginning is drawn all the same, what follows is no language, and often
    does not end. (See "An accident worth knowing" in RESULTS.md.)
    """
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], batch["mask"])
    mean, error = kl.mean().item(), kl.std(correction=0).item() / math.sqrt(len(kl))
    if len(kl) >= 16 and mean < -4 * error - 1e-4:  # the error of a few is not to be relied on
        print(f"warning: KL {mean:.3f} ± {error:.3f} is below 0: sampling and scoring disagree")
    astray = kl > ASTRAY_NATS + ASTRAY_MEDIANS * kl.median()
    if astray.any():
        worst = [int(kl.argmax())]
        _, (text,) = texts_of(tokenizer, batch["tokens"][worst], batch["mask"][worst])
        count = f"{int(astray.sum())} of {len(kl)} responses went astray"
        print(f"warning: {count}. KL {kl.max():.0f}: {text[:80]!r}")


def show_responses(batch, tokenizer):
    """Print two responses with their scores and KLs."""
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], batch["mask"])
    rows = [0, len(kl) // 2]
    texts = zip(*texts_of(tokenizer, batch["tokens"][rows], batch["mask"][rows]))
    for i, (prompt, response) in zip(rows, texts):
        print(f"    {prompt + response!r}  score {batch['scores'][i]:.2f}  KL {kl[i]:.2f}")


class Watch:
    """What follows an iteration: the log and the state, warnings, the page."""

    def __init__(self, state, models, ref, config, stage):
        self.state, self.models, self.ref = state, models, ref
        self.config, self.stage = config, stage
        self.recorder = Recorder(
            state.run.out / "ppo_traces.jsonl",
            state.settings,
            models.tokenizer,
            truth_about(state.run.data)[1],
            models.policy,
            ref,
            config,
            state.step,
            stage.steps,
        )
        self.written = time.perf_counter()  # the page

    def end_step(self, batch, metrics, kl_coef):
        """batch, metrics: what ppo_iteration returned; kl_coef: beta of the next iteration."""
        if len(metrics["passes"]) == 1:  # of a single pass they are the same numbers once more
            metrics = {name: x for name, x in metrics.items() if name != "passes"}
        if self.state.log is None:  # first: if it cannot be written, no file of an earlier run is
            self.state.open_log()
        # First what was recorded: on --resume, what lies beyond the saved step goes.
        self.recorder.record(self.models.policy, self.ref, batch, metrics, self.config)
        check_kl(batch, self.models.tokenizer)
        if self.state.step % 40 == 0:
            show_responses(batch, self.models.tokenizer)
        self.state.values["kl_coef"] = kl_coef
        tokens = int(row_lengths(batch["mask"]).sum())
        self.state.end_step(metrics, tokens, show=["score", "kl", "entropy", "eos_rate"])
        if time.perf_counter() - self.written > PAGE_SECONDS:
            self.written = time.perf_counter()
            try:
                write_page(self.state.run.out, self.stage.models)
            except UserError as error:  # a full disk: no reason to end the run
                print(f"warning: {error}")
