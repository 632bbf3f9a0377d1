"""What train_ppo.py records for its page: every number of a few responses, token by token.

out/ppo_traces.jsonl holds a JSON object a line, for the iterations 1, 2, 5, 10, 20, 50, ... and the
last:

    step, kl_coef, settings     the iteration, beta in it, and the settings of the run
    judge                       mean grade of the batch; null without a judge
    mean, std                   of all advantages of the batch: whitening subtracts and divides by
    tracked                     responses of the first of these iterations, the same in every line
    sampled                     responses of this iteration

Both lists go from the lowest score to the highest. Of a response, these entries are about all of it
(score: at its sampling, less penalties), and the others hold a number per token:

    prompt, prompt_ids, ids, score, ended, judge
    tokens, log_pi, log_old, log_ref, kl, reward, value, return, advantage, whitened, ratio

log_pi is of after the update, log_old and what follows from it of before. The numbers of `sampled`
are the batch's. Those of `tracked` are computed as if they were part of it, by minippo.compute_advantages: so an
algorithm with another function for that tracks no responses. What it does not have is left out.
"""

import json
import math
from dataclasses import replace

import torch

from minippo import compute_advantages, evaluate_actions
from plumbing.files import read_log, write_file
from plumbing.rows import pad_completions
from plumbing.tokenizer import texts_of

RESPONSES, TOKENS = 6, 1000  # in a list: so many responses; fewer where they may be long
COLUMNS = {  # name in the file: name in a batch
    "log_old": "old_logprobs",
    "log_ref": "ref_logprobs",
    "reward": "rewards",
    "value": "old_values",
    "return": "returns",
    "advantage": "advantages",
    "whitened": "whitened",
}


def recorded(step, steps):
    """Is iteration `step`, counted from 1, one of 1, 2, 5, 10, 20, 50, ..., or the last one?"""
    return str(step).rstrip("0") in ("1", "2", "5") or step == steps


def spaced(count, wanted):
    """At most `wanted` of the numbers 0 .. count - 1, evenly spaced from the first to the last."""
    wanted = min(count, wanted)
    return [i * (count - 1) // max(1, wanted - 1) for i in range(wanted)]


def rounded(x, digits=17):
    """The same lists and dicts with fewer digits (17 are all), and None for infinity and NaN, which
    JSON does not know."""
    if isinstance(x, dict):
        return {name: rounded(value, digits) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [rounded(value, digits) for value in x]
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    return x


class Recorder:
    """Records a run. It draws no random number and scores nothing again.

    judge: (prompt, text) -> grade, or None. step: iterations done, of all `steps`; what the file
    says of these is kept.
    """

    def __init__(self, path, settings, tokenizer, judge, policy, ref, config, step, steps):
        self.path, self.settings, self.tokenizer, self.judge = path, settings, tokenizer, judge
        self.step, self.steps = step, steps
        self.lines = [line for line in read_log(path) if line["step"] <= step]
        self.tracked = self.lines[-1].get("tracked", []) if self.lines else []
        try:
            [(x["prompt_ids"], x["ids"], x["score"], x["ended"]) for x in self.tracked]
        except (KeyError, TypeError):
            print(f"{path} is damaged, or another version's: it begins anew")
            self.lines, self.tracked = [], []
        self.look_ahead(policy, ref, config)

    def record(self, policy, ref, batch, metrics, config):
        """To be called at the end of each iteration, when `ref` is what the next one will find."""
        self.step += 1
        if recorded(self.step, self.steps):
            self.lines.append(rounded(self.line(policy, batch, metrics["kl_coef"], config)))
            write_file(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))
        self.look_ahead(policy, ref, config)

    def look_ahead(self, policy, ref, config):
        """If the next iteration is to be recorded, evaluate the tracked responses: the policy of
        now is its old policy."""
        due = recorded(self.step + 1, self.steps)
        self.before = [rollout_of(x, policy, ref, config) for x in self.tracked if due]

    def line(self, policy, batch, kl_coef, config):
        grades = [self.grade(*pair) for pair in zip(*self.texts(batch))]
        line = {"step": self.step, "kl_coef": kl_coef, "settings": self.settings}
        line["judge"] = None if None in grades else sum(grades) / len(grades)
        line |= {"mean": 0.0, "std": 1.0, "tracked": [], "sampled": []}
        if "advantages" not in batch:  # an algorithm that credits no tokens
            return line
        if config.whiten:
            inside = batch["advantages"][batch["mask"]]
            line["mean"] = inside.mean().item()
            line["std"] = max(inside.std(correction=0).item(), 1e-4)  # as in minippo.whiten
        order = batch["scores"].argsort(stable=True).tolist()
        wanted = min(RESPONSES, max(1, TOKENS // config.max_new_tokens))
        rows = [order[i] for i in spaced(len(order), wanted)]
        sampled = [{name: x[i : i + 1] for name, x in batch.items()} for i in rows]
        tracked = []
        for x in self.before:
            x |= compute_advantages(x, replace(config, whiten=False), kl_coef)
            tracked.append(x | {"whitened": (x["advantages"] - line["mean"]) / line["std"]})
        if self.settings.get("algorithm", "PPO") in ("PPO", ""):
            line["tracked"] = [self.response(x, policy, config) for x in tracked or sampled]
        line["sampled"] = [self.response(x, policy, config) for x in sampled]
        self.tracked = line["tracked"]
        return line

    def response(self, x, policy, config):
        """A batch of one response, with what phases 1 to 3 know of it -> the dict of the file."""
        mask = x["mask"]
        numbers = {name: x[key] for name, key in COLUMNS.items() if key in x}
        numbers["log_pi"], _ = evaluate(policy, x["tokens"], mask, config)
        numbers["kl"] = numbers["log_old"] - numbers["log_ref"]
        numbers["ratio"] = (numbers["log_pi"] - numbers["log_old"]).exp()
        (prompt,), (text,) = self.texts(x)
        begin, ids = int(mask.int().argmax()) + 1, x["tokens"][:, 1:][mask].tolist()
        return {
            "prompt": prompt,
            "prompt_ids": x["tokens"][0, :begin].tolist(),
            "ids": ids,
            "score": x["scores"].item(),
            "ended": x["ended"].item(),
            "judge": self.grade(prompt, text),
            "tokens": [self.tokenizer.spell(i) for i in ids],
        } | {name: values[mask].tolist() for name, values in numbers.items()}

    def texts(self, batch):
        return texts_of(self.tokenizer, batch["tokens"], batch["mask"])

    def grade(self, prompt, text):
        """What the judge says; None if there is no judge, or if it does not know the prompt."""
        try:
            return self.judge(prompt, text) if self.judge else None
        except ValueError:
            return None


@torch.no_grad()
def evaluate(model, tokens, mask, config):
    """-> log-probabilities and values of the responses, (B, T-1) each."""
    return evaluate_actions(model, tokens, mask, config.temperature, with_entropy=False)[:2]


def rollout_of(response, policy, ref, config):
    """A response of the file -> what minippo.rollout returns, as if it had been sampled now."""
    device = policy.lm_head.weight.device
    tokens, mask = pad_completions([(response["prompt_ids"], response["ids"])], device)
    old_logprobs, old_values = evaluate(policy, tokens, mask, config)
    return {
        "tokens": tokens,
        "mask": mask,
        "scores": torch.tensor([response["score"]], device=device),
        "ended": torch.tensor([response["ended"]], device=device),
        "old_logprobs": old_logprobs,
        "old_values": old_values,
        "ref_logprobs": evaluate(ref, tokens, mask, config)[0],
    }
