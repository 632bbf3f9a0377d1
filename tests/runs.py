"""What the tests of traces and page begin with: small untrained models for train_ppo.py, and the files of a run that never was."""

import json
import math

import pytest
import torch

from cli import run
from data import zoo
from minippo import GPT, GPTConfig, RewardModel
from plumbing.checkpoints import save_checkpoint
from plumbing.text import Tokenizer
from plumbing.traces import clip_case
from tiny import stir

PPO = "--device cpu --batch_size 8 --minibatches 2 --max_new_tokens 6".split()


def make_models(folder):
    """Writes the default data, but few rows, into folder/zoo, and sft.pt and rm.pt into the folder; returns it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ROWS", dict.fromkeys(zoo.ROWS, 20)), ("FACTS", zoo.FACTS[:8]), ("HELD_OUT", 4)):
            patch.setattr(zoo, name, value)
        zoo.write_data(folder / "zoo", seed=0)
    torch.manual_seed(1)
    tokenizer = Tokenizer.train(zoo.PROMPTS, 270)
    config = GPTConfig(tokenizer.vocab_size, context=48, layers=1, heads=2, channels=16)
    policy = stir(GPT(config), 0.1)
    with torch.no_grad():
        policy.trunk.norm.bias[0], policy.lm_head.weight[tokenizer.eos, 0] = 5.0, 0.8  # so about half of the responses end
    save_checkpoint(folder / "sft.pt", "sft", policy, tokenizer, val_loss=2.0, val_loss_se=0.1, val_tokens=100)
    facts = {"val_loss": 0.6, "val_accuracy": 0.7, "val_accuracy_se": 0.01}
    save_checkpoint(folder / "rm.pt", "rm", stir(RewardModel(policy), 0.1), tokenizer, **facts)
    return folder


def ppo(models, out, *flags):
    """train_ppo.py on these -> exit status, what it printed, and its errors."""
    few = [] if "--no_report" in flags else ["--report_prompts", 2]
    return run("train_ppo.py", "--data", models / "zoo", "--models", models, "--out", out, *PPO, *few, *flags)


# The files of a run that never was, with numbers chosen for a test of its page

STOPS = (1, 10, 50)
BEE = ([" A", " bee", " eats", " nectar", ".", "<eos>"], 2.0, "What does a bee eat?")
RUDE = ([" Leave", " me", " alone"], -1.5, 'Who are you? </script><img src=x onerror="alert(1)"> \x07\u202e\ud800')
MEAN, STD, EPS = 0.25, 0.5, 0.2


def response(tokens, score, prompt, step, beta=0.1):
    """An object of ppo_traces.jsonl, with other numbers in each iteration. Its returns are those of lambda = gamma = 1."""
    n, push = len(tokens), 0.02 * step ** 0.5 * (1 if score > 0 else -1)
    ref = [-1.0 - 0.25 * i for i in range(n)]
    old = [x + (2, 3, 1, 0, -1, -2)[i % 6] * push for i, x in enumerate(ref)]
    new = [x + 3 * (i - 1) * push for i, x in enumerate(old)]
    kl = [a - b for a, b in zip(old, ref)]
    reward = [-beta * x + (score if i == n - 1 else 0) for i, x in enumerate(kl)]
    value = [0.01 * step * (1 + 0.5 * i) for i in range(n)]
    returns = [sum(reward[i:]) for i in range(n)]
    advantage = [a - b for a, b in zip(returns, value)]
    whitened = [(x - MEAN) / STD for x in advantage]
    ratio = [math.exp(a - b) for a, b in zip(new, old)]
    numbers = {"log_pi": new, "log_old": old, "log_ref": ref, "kl": kl, "reward": reward, "value": value, "return": returns,
               "advantage": advantage, "whitened": whitened, "ratio": ratio}  # fmt: skip
    clip = [clip_case(*x, EPS) for x in zip(ratio, whitened)]
    about = {"prompt": prompt, "text": "".join(tokens), "score": score, "ended": tokens[-1] == "<eos>", "judge": score + 0.5}
    return {**about, "tokens": tokens, **numbers, "clip": clip}


SETTINGS = {
    "steps": 60, "batch_size": 8, "kl_coef": 0.1, "clip_eps": EPS, "gamma": 1.0, "lam": 1.0, "lr": 6e-4, "seed": 0, "epochs": 2,
    "reward": "", "max_new_tokens": 48, "missing_eos_penalty": 1.0, "kl_horizon": None, "ref_update_every": 0,
}  # fmt: skip


def trace(step, **more):
    rows = [response(*x, step) for x in (RUDE, BEE)]
    return {"step": step, "kl_coef": 0.1, "settings": SETTINGS, "mean": MEAN, "std": STD, "judge": step / 25, "tracked": rows,
            "sampled": rows[1:], **more}  # fmt: skip


def metric(step):
    """A line of ppo.jsonl."""
    kl, score = 0.05 * step, 0.03 * step
    passes = [{"clip_frac": 0.001 * step}, {"clip_frac": 0.002 * step}]
    return {"step": step, "score": score, "kl": kl, "kl_coef": 0.1, "rlhf_reward": score - 0.1 * kl, "entropy": 1 / step,
            "explained_variance": step / 100, "clip_frac": 0.0015 * step, "response_length": 10 + step, "eos_rate": 0.75,
            "value_loss": 3 / step, "policy_loss": -0.001, "passes": passes, "seconds": 0.5 * step}  # fmt: skip


REPORT = {
    "beta": 0.1, "seed": 0, "best_judge": 3.0, "seconds": {"sft": 78.0, "rm": 132.0, "ppo": 30.0, "report": 45.0},
    "sft": {"judge": -0.33, "judge_se": 0.04, "score": -0.01, "score_se": 0.03, "kl": 0.0, "kl_se": 0.0, "eos_rate": 1.0,
            "eos_rate_se": 0.0, "response_length": 9.9, "response_length_se": 0.09, "val_loss": 0.507, "val_loss_se": 0.0032,
            "above_entropy": 0.0207, "above_entropy_se": 0.0017, "entropy_floor": 0.4862},
    "ppo": {"judge": 2.63, "judge_se": 0.03, "score": 1.47, "score_se": 0.02, "kl": 2.73, "kl_se": 0.03, "eos_rate": 1.0,
            "eos_rate_se": 0.0, "response_length": 12.36, "response_length_se": 0.08, "win_rate_vs_sft": 0.906,
            "win_rate_vs_sft_se": 0.005, "optimality": 0.86, "optimality_se": 0.011},
    "ppo_unseen": {"prompts": 50, "score": 1.41, "score_se": 0.06, "kl": 2.57, "kl_se": 0.1, "optimality": 0.834,
                   "optimality_se": 0.015},
    "rm": {"val_accuracy": 0.8177, "val_accuracy_se": 0.0043, "label_ceiling": 0.8265, "label_loss_floor": 0.3653,
           "below_ceiling": 0.0088, "below_ceiling_se": 0.0026},
    "best_of_n": {"4": {"judge": 1.67, "judge_se": 0.02, "score": 0.93, "score_se": 0.04, "kl": 0.63629},
                  "16": {"judge": 2.58, "judge_se": 0.03, "score": 1.42, "score_se": 0.04, "kl": 1.8351}},
    "optimum": [{"beta": 0.05, "score": 1.65, "judge": 2.74, "kl": 3.59}, {"beta": 0.1, "score": 1.6, "judge": 2.73, "kl": 2.89},
                {"beta": 1.0, "score": 0.74, "judge": 1.27, "kl": 0.37}],
    "samples": [{"prompt": "What does a bee eat?", "sft": " Bees </script> bamboo.", "ppo": " A bee eats nectar.", "score": 1.5,
                 "kl": 2.5, "judge": 2.0, "sft_score": -0.5, "sft_judge": -1.5}],
}  # fmt: skip


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder):
    """All the files that the page is made of; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    fit = [{"step": i, "loss": 5 / i, "accuracy": 0.5 + 0.005 * i} for i in range(1, 61)]
    fit[49] |= {"val_loss": 0.25, "val_accuracy": 0.7}
    fit[59] |= {"val_loss": 0.2, "val_accuracy": 0.8}
    write_jsonl(folder / "sft.jsonl", fit)
    write_jsonl(folder / "rm.jsonl", fit)
    write_jsonl(folder / "ppo.jsonl", [metric(step) for step in range(1, 61)])
    write_jsonl(folder / "ppo_traces.jsonl", [trace(step) for step in STOPS])
    (folder / "report.json").write_text(json.dumps(REPORT))
    return folder
