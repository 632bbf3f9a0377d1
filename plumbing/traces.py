"""What train_ppo.py records for its page: every number of a few responses, token by token, at a few iterations.

out/ppo_traces.jsonl holds a JSON object a line, one for each of the iterations 1, 2, 5, 10, 20, 50, ... and for the last:

    step, kl_coef       the iteration, and beta in it
    settings            the settings of the run
    mean, std           of the advantages of all tokens of the batch: what whitening subtracts and divides by
    judge               his mean grade of the batch, where there is a judge
    tracked             responses of the first of these iterations, from the lowest score to the highest; in every line the same
    sampled             responses of this iteration, from the lowest score to the highest

A response is an object too. These entries are about all of it (score: less penalties, as at its sampling; judge: if there is one):

    prompt, text, prompt_ids, ids, score, ended, judge

and these hold an entry per token: its text, then the numbers, and what the clip says of it (see clip_case):

    tokens, log_pi, log_old, log_ref, kl, reward, value, return, advantage, whitened, ratio, clip

log_old, log_ref and value are those of before the update, and so is what follows from them; log_pi is of after its last step.
The numbers of `sampled` are the batch's own. Those of `tracked` are computed anew, as if the responses were part of the batch.
"""

import json
import math

import torch

from minippo import evaluate_actions, gae, kl_adjusted_rewards

step_of = None
from plumbing.report import truth_about
from plumbing.rows import pad_completions
from plumbing.tokenizer import texts_of

RESPONSES = 6  # of each kind, in each line


def recorded(step, steps):
    """Is iteration `step`, counted from 1, one of 1, 2, 5, 10, 20, 50, ..., or the last of all `steps`?"""
    return str(step).rstrip("0") in ("1", "2", "5") or step == steps


def spaced(count, wanted):
    """At most `wanted` of the numbers 0 .. count - 1, evenly spaced, the first and the last among them."""
    return (
        [i * (count - 1) // max(1, wanted - 1) for i in range(wanted)]
        if wanted < count
        else list(range(count))
    )


def clip_case(ratio, advantage, clip_eps):
    """Which of the six cases above minippo.policy_loss is this? In the first two, the token has no gradient any more."""
    high, low = ratio > 1 + clip_eps, ratio < 1 - clip_eps
    if advantage > 0:
        return "risen enough" if high else "pulled back up" if low else "in between"
    if advantage < 0:
        return "fallen enough" if low else "pulled back down" if high else "in between"
    return "in between"


def finite(x):
    """The same lists and dicts, with None for infinity and NaN, which JSON does not know."""
    if isinstance(x, dict):
        return {name: finite(value) for name, value in x.items()}
    if isinstance(x, list):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def spell(tokenizer, i):
    """The text of one token. Bytes that are no text by themselves, as parts of a letter, become \\xe2."""
    return "<eos>" if i == tokenizer.eos else tokenizer.tokens[i].decode(errors="backslashreplace")


class Traces:
    """Records a run: around(rollout) is the rollout that ppo_iteration is given, and record() is called after it.

    size: responses evaluated at once; 0: all of them. No random number is drawn, and nothing is scored again.
    """

    def __init__(self, progress, tokenizer, size=0):
        self.progress, self.tokenizer, self.size = progress, tokenizer, size
        self.path, self.judge = (
            progress.run.out / "ppo_traces.jsonl",
            truth_about(progress.run.data)[1],
        )
        self.lines, self.tracked, self.again, self.file = [], [], None, None
        if progress.step and self.path.exists():
            self.read_back()

    def read_back(self):
        """Of an interrupted run: its lines up to where it goes on, and the tracked responses. If they cannot be used: neither."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(True)
            lines = [line for line in lines if step_of(line) <= self.progress.step]
            tracked = json.loads(lines[-1])["tracked"] if lines else []
            self.tracked = [
                {name: x[name] for name in ("prompt_ids", "ids", "score", "ended")} for x in tracked
            ]
            self.lines = lines
        except (KeyError, TypeError):
            print(f"{self.path} is damaged, or another version's: it begins anew")

    def begin(self):
        """From here on the file of an earlier run is overwritten; but if its log cannot be, nothing is."""
        if self.progress.log is None:
            self.progress.open_log()
        self.path.write_text("".join(self.lines), encoding="utf-8")
        self.file = open(self.path, "a", encoding="utf-8")

    def due(self):
        """Is the iteration in work one to be recorded? None of another algorithm is: the numbers are PPO's."""
        return not self.progress.settings.get("algorithm") and recorded(
            self.progress.step + 1, self.progress.steps
        )

    def around(self, rollout):
        """The same function; when it is called in an iteration to be recorded, the tracked responses are looked at too."""

        def watched(policy, ref, score, prompts, config):
            batch = rollout(policy, ref, score, prompts, config)
            self.again = (
                self.look_again(policy, ref, config) if self.due() and self.tracked else None
            )
            return batch

        return watched

    def look_again(self, policy, ref, config):
        """-> the tracked responses, as minippo.rollout returns them."""
        device = policy.lm_head.weight.device
        tokens, mask = pad_completions(
            [(row["prompt_ids"], row["ids"]) for row in self.tracked], device
        )
        scores, ended = (
            torch.tensor([row[name] for row in self.tracked], device=device)
            for name in ("score", "ended")
        )
        logprobs, values = self.evaluate(policy, tokens, mask, config)
        ref_logprobs, _ = self.evaluate(ref, tokens, mask, config)
        return {"tokens": tokens, "mask": mask, "logprobs": logprobs, "ref_logprobs": ref_logprobs,
                "values": values, "scores": scores, "ended": ended}  # fmt: skip

    @torch.no_grad()
    def evaluate(self, model, tokens, mask, config):
        """-> log-probabilities and values, (R, T-1) each."""
        size = self.size or len(mask)
        pieces = zip(tokens.split(size), mask.split(size))
        parts = [
            evaluate_actions(model, *piece, config.temperature, with_entropy=False)[:2]
            for piece in pieces
        ]
        return [torch.cat(x) for x in zip(*parts)]

    def record(self, policy, batch, metrics, config):
        """To be called after ppo_iteration, with what it returns, and before the end of the step is logged."""
        if self.file is None:
            self.begin()
        if not self.due():
            return
        raw, _ = gae(
            batch["rewards"], batch["values"], batch["mask"], config.gamma, config.lam
        )  # not whitened, as the batch's are
        inside, rows = raw[batch["mask"]], batch["scores"].argsort(stable=True)
        mean, std = inside.mean(), inside.std(correction=0).clamp(min=1e-4)
        rows = rows[spaced(len(rows), RESPONSES)]
        sampled = {name: x[rows] for name, x in (batch | {"raw": raw}).items()}
        tracked = (
            sampled
            if self.again is None
            else complete(self.again, metrics["kl_coef"], config, mean, std)
        )
        line = {
            "step": self.progress.step + 1,
            "kl_coef": metrics["kl_coef"],
            "settings": self.progress.settings,
        }
        grades = self.grades(*texts_of(self.tokenizer, batch["tokens"], batch["mask"]))
        line |= {"mean": mean.item(), "std": std.item()} | (
            {"judge": sum(grades) / len(grades)} if grades else {}
        )
        line |= {
            "tracked": self.describe(tracked, policy, config),
            "sampled": self.describe(sampled, policy, config),
        }
        self.tracked = line["tracked"]
        self.file.write(json.dumps(finite(line)) + "\n")
        self.file.flush()

    def grades(self, prompts, texts):
        """What the judge says of each response; [] if there is none, or if he does not know a prompt."""
        try:
            return [self.judge(*pair) for pair in zip(prompts, texts)] if self.judge else []
        except ValueError:
            return []

    def describe(self, part, policy, config):
        """Some responses with all that ppo_iteration knows of them -> a list of dicts, as in the file."""
        tokens, mask, old = part["tokens"], part["mask"], part["logprobs"]
        logprobs, _ = self.evaluate(policy, tokens, mask, config)
        columns = {
            "log_pi": logprobs, "log_old": old, "log_ref": part["ref_logprobs"], "kl": old - part["ref_logprobs"],
            "reward": part["rewards"], "value": part["values"], "return": part["returns"], "advantage": part["raw"],
            "whitened": part["advantages"], "ratio": (logprobs - old).exp(),
        }  # fmt: skip
        texts, rows = texts_of(self.tokenizer, tokens, mask), []
        grades = self.grades(*texts)
        for i, (prompt, text) in enumerate(zip(*texts)):
            begin, ids = int(mask[i].int().argmax()) + 1, tokens[i, 1:][mask[i]].tolist()
            row = {
                "prompt": prompt,
                "text": text,
                "prompt_ids": tokens[i, :begin].tolist(),
                "ids": ids,
            }
            row |= {"score": part["scores"][i].item(), "ended": bool(part["ended"][i])}
            row |= {"judge": grades[i]} if grades else {}
            row |= {"tokens": [spell(self.tokenizer, x) for x in ids]}
            row |= {name: x[i][mask[i]].tolist() for name, x in columns.items()}
            rows.append(
                row
                | {
                    "clip": [
                        clip_case(*x, config.clip_eps) for x in zip(row["ratio"], row["whitened"])
                    ]
                }
            )
        return rows


def complete(batch, kl_coef, config, mean, std):
    """What rollout returns -> the same with rewards, returns and advantages, raw and whitened, as ppo_iteration computes them; but
    whitened with mean and standard deviation of another batch."""
    mask = batch["mask"]
    rewards = kl_adjusted_rewards(
        batch["scores"], batch["logprobs"], batch["ref_logprobs"], mask, kl_coef
    )
    raw, returns = gae(rewards, batch["values"], mask, config.gamma, config.lam)
    whitened = torch.where(mask, (raw - mean) / std, 0.0)
    return batch | {"rewards": rewards, "returns": returns, "raw": raw, "advantages": whitened}
