"""What train_ppo.py looks at: do the settings, the start and each iteration make sense? And a few
responses token by token, for the page."""

import json
import math
import time

import torch

from data.files import UserError, read_log, write_file
from data.truth import judge_of
from minippo import draw, evaluate_actions, gather_logprobs, generate, kl_per_response, row_lengths
from minippo import score_responses, trace
from plumbing.page import write_page
from plumbing.tokenizer import texts_of

SPREAD = 0.02, 20.0  # of the first scores; beyond these the default beta means something else
ASTRAY = 20.0, 10.0  # a response is with a KL of 20 nats plus 10 times that of the median response
COLLAPSED = 100.0, 0.02  # a policy is at a mean KL above, or an entropy per token below
FEW = 16  # responses whose means are not relied on
RESPONSES = 6  # traced in an iteration
PAGE_SECONDS = 60  # between two versions of the page


def check_settings(config, stage):
    """UserError for numbers that do not go together."""
    k, size = getattr(config, "k", 1), f"--batch_size {stage.batch_size}: should be"
    if stage.batch_size % k:
        raise UserError(f"{size} a multiple of --k {k}")
    if stage.batch_size < config.minibatches:
        raise UserError(f"{size} at least --minibatches {config.minibatches}")
    if stage.kl_horizon < math.inf and not config.kl_coef:
        raise UserError("--kl_horizon has no effect with --kl_coef 0: beta would stay 0")
    if stage.kl_horizon == math.inf and stage.kl_target != type(stage).kl_target:
        raise UserError("--kl_target has no effect without --kl_horizon, 10000 for example")
    if stage.separate_critic and stage.head_lr_factor != type(stage).head_lr_factor:
        raise UserError("--head_lr_factor has no effect with --separate_critic; leave it out")


def doubts_about(figures, choices=2):
    """What its validation says against a model that chooses, in sentences."""
    guess = math.log(choices)
    if figures.get("val_loss", 0.0) >= guess:
        yield f"warning: at no time was the model better than guessing (loss {guess:.3f})"
    pairs = figures.get("val_pairs", math.inf)  # by chance a half is right, ± 0.5 / sqrt(pairs)
    if figures.get("val_accuracy", 1.0) <= 0.5 + 1 / math.sqrt(pairs):
        right = f"{100 * figures['val_accuracy']:.1f} % of {pairs:,} validation pairs right"
        yield f"warning: {right} is not clearly better than chance; the reward may be noise"


@torch.no_grad()
def check_start(policy, ref, score, prompts, config, stage, dtype):
    """Nothing has been trained yet, so pi / old must be 1 at every token, and the KL 0, unless
    --policy was given. UserError if they are not: sampling and scoring disagree (dropout?
    temperature?). In bfloat16 single tokens are off by its rounding, so there the mean is judged.
    """
    context, longest = policy.config.context, config.max_new_tokens
    if short := sum(len(prompt) + longest > context for prompt in prompts):
        room = f"leave less than {longest} tokens of the context of {context} for a response"
        print(f"warning: {short:,} of {len(prompts):,} prompts {room} (--max_new_tokens)")
    drawn = []  # log-probabilities by which generate() draws, column by column, of its rows

    def draw_and_record(logits):
        token = draw(logits)
        drawn.append(gather_logprobs(logits, token))
        return token

    prompts = prompts[: config.micro_batch or stage.batch_size]
    temperature, when = config.temperature, "before the first update"
    tokens, mask, logprobs, _ = generate(policy, prompts, longest, temperature, draw_and_record)
    ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, temperature)
    nats = (logprobs - ref_logprobs).abs()[mask].max().item()
    drawn_logprobs, lengths = torch.zeros_like(logprobs), row_lengths(mask)
    for t, column in enumerate(drawn, tokens.shape[1] - 1 - len(drawn)):
        drawn_logprobs[lengths > t + 1, t] = column
    off = ((logprobs - drawn_logprobs).exp() - 1).abs()[mask]
    off = (off.max() if dtype == "float32" else off.mean()).item()
    tolerance = 1e-3 if dtype == "float32" else 0.05
    if not off <= tolerance:
        raise UserError(f"{when} a ratio is {off:.4f} off 1: sampling and scoring disagree")
    if not stage.policy and not nats <= tolerance:
        raise UserError(f"{when} a token is {nats:.4f} nats away from the reference, not 0")
    kl = "" if stage.policy else " and the KL to the reference is 0"
    print(f"checked: {when} the ratio is 1{kl}")
    scores, _ = score_responses(score, tokens, mask, config, policy.config.eos)
    spread = scores.std(correction=0).item()
    if config.kl_coef and len(prompts) > 1 and not SPREAD[0] <= spread <= SPREAD[1]:
        suits = f"--kl_coef {config.kl_coef:g} suits a spread around 1"
        print(f"warning: the standard deviation of the first scores is {spread:.3g}; {suits}")


def faults(metrics, kl, responses):
    """What is wrong with an iteration -> {kind: sentence}. kl: of each response.

    Astray: nothing keeps a policy near the reference after a beginning that it hardly ever writes.
    If one is drawn all the same, what follows is no language. ("An accident" in RESULTS.md.)
    """
    found, astray = {}, kl > ASTRAY[0] + ASTRAY[1] * kl.median()
    if astray.any():
        count = f"{int(astray.sum())} of {len(kl)} responses went astray"
        found["astray"] = f"{count}. KL {kl.max():.0f}: {responses[int(kl.argmax())][:80]!r}"
    if len(kl) < FEW:
        return found
    mean, error = kl.mean().item(), kl.std(correction=0).item() / math.sqrt(len(kl))
    if mean < -4 * error - 1e-4:
        found["sign"] = f"KL {mean:.3f} ± {error:.3f} is below 0: sampling and scoring disagree"
    if mean > COLLAPSED[0] or metrics["entropy"] < COLLAPSED[1]:
        figures = f"KL {mean:.0f}, entropy {metrics['entropy']:.3f} nats per token"
        found["collapse"] = f"{figures}: the policy may have collapsed (a smaller --lr?)"
    if not metrics["eos_rate"]:
        found["end"] = "no response has ended by itself (a larger --max_new_tokens?)"
    return found


def traced(step, steps):
    """Is iteration `step`, counted from 1, one of 1, 2, 5, 10, 20, 50, ..., or the last one?"""
    return str(step).rstrip("0") in ("1", "2", "5") or step == steps


class Watch:
    """What follows an iteration: warnings, the log and the state, the traces, the page."""

    def __init__(self, state, models, config, stage):
        self.state, self.models, self.config, self.stage = state, models, config, stage
        config.kl_coef = state.values.get("kl_coef", config.kl_coef)  # of a run that goes on
        self.judge = judge_of(state.run.data)
        self.path = state.run.out / "ppo_traces.jsonl"
        self.traces = [line for line in read_log(self.path) if line["step"] <= state.step]
        self.written = time.perf_counter()  # the page
        self.warned = set()
        rm = models.facts["rm"]
        if (longest := rm.get("max_new_tokens", now := config.max_new_tokens)) != now:
            scale = f"the scale of the scores is that of answers of up to {longest} tokens"
            print(f"warning: {scale}, and PPO writes {now} (--max_new_tokens)")
        for doubt in doubts_about(rm):
            print(doubt)

    def end_step(self, batch, metrics):
        """batch: of the iteration, before its update; metrics: of both."""
        step = self.state.step + 1
        prompts, responses = texts_of(self.models.tokenizer, batch["tokens"], batch["mask"])
        if self.judge:  # it only looks on
            grades = [self.judge(*pair) for pair in zip(prompts, responses)]
            metrics = metrics | {"judge": sum(grades) / len(grades)}
        kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], batch["mask"])
        for kind, text in faults(metrics, kl, responses).items():
            if kind not in self.warned:
                self.warned.add(kind)
                print(f"warning: iteration {step}: {text}")
        if step % 40 == 1:
            figures = f"score {batch['scores'][0]:.2f}  KL {kl[0]:.2f}"
            print(f"    {prompts[0] + responses[0]!r}  {figures}")
        if traced(step, self.stage.steps):
            # Before the state: on --resume, what lies beyond the saved step goes.
            self.traces.append(self.trace(batch, prompts))
            write_file(self.path, "".join(json.dumps(line) + "\n" for line in self.traces))
        self.state.values["kl_coef"] = self.config.kl_coef
        tokens = int(row_lengths(batch["mask"]).sum())
        self.state.end_step(metrics, tokens, show=["score", "judge", "kl", "entropy", "eos_rate"])
        if time.perf_counter() - self.written > PAGE_SECONDS:
            self.written = time.perf_counter()
            write_page(self.state.run.out, self.stage.models)

    @torch.no_grad()
    def trace(self, batch, prompts):
        """A line of ppo_traces.jsonl: some responses of the iteration, from the lowest score to the
        highest, token by token."""
        order = batch["scores"].argsort(stable=True)
        rows = order[torch.linspace(0, len(order) - 1, min(RESPONSES, len(order))).long()]
        part, policy = {name: x[rows] for name, x in batch.items()}, self.models.policy
        tokens, mask = part["tokens"], part["mask"]
        part["logprobs"], _, _ = evaluate_actions(policy, tokens, mask, self.config.temperature)
        responses = [
            {"prompt": prompts[row], "score": batch["scores"][row].item()}
            | {"columns": trace(part, i, self.models.tokenizer.spell)}
            for i, row in enumerate(rows.tolist())
        ]
        step = self.state.step + 1
        return {"step": step, "settings": self.state.settings, "responses": responses}
