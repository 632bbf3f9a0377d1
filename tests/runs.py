"""The files of a run that never was, with numbers chosen for the tests of its page."""

import json
import math

STOPS = (1, 10, 50)
MEAN, STD, EPS = 0.25, 0.5, 0.2
BEE = ([" A", " bee", " eats", " nectar", ".", "<eos>"], 2.0, "What does a bee eat?")
RUDE = ([" Leave", " me", " alone"], -1.5, 'Who? </script><img src=x onerror="1"> \x07\u202e\ud800')
SETTINGS = {"steps": 60, "batch_size": 8, "kl_coef": 0.1, "clip_eps": EPS, "gamma": 1.0, "lam": 1.0}
SETTINGS |= {"lr": 6e-4, "seed": 0, "reward": "", "max_new_tokens": 48, "missing_eos_penalty": 1.0}
SETTINGS |= {"kl_horizon": None, "ref_update_every": 0, "algorithm": "PPO", "reference": ""}


def response(tokens, score, prompt, step):
    """A response in ppo_traces.jsonl, with other numbers in each iteration."""
    push = 0.02 * step**0.5 * (1 if score > 0 else -1)
    places = range(len(tokens))
    ref = [-1.0 - 0.25 * i for i in places]
    kl = [(2, 3, 1, 0, -1, -2)[i] * push for i in places]
    old = [a + b for a, b in zip(ref, kl)]
    new = [x + 3 * (i - 1) * push for i, x in enumerate(old)]
    reward = [-0.1 * x + score * (i == len(tokens) - 1) for i, x in enumerate(kl)]
    value = [0.01 * step * (1 + 0.5 * i) for i in places]
    returns = [sum(reward[i:]) for i in places]
    advantage = [a - b for a, b in zip(returns, value)]
    numbers = {"log_pi": new, "log_old": old, "log_ref": ref, "kl": kl, "reward": reward}
    numbers |= {"value": value, "return": returns, "advantage": advantage}
    numbers["whitened"] = [(x - MEAN) / STD for x in advantage]
    numbers["ratio"] = [math.exp(a - b) for a, b in zip(new, old)]
    return {
        "prompt": prompt,
        "score": score,
        "ended": tokens[-1] == "<eos>",
        "tokens": tokens,
    } | numbers


def trace(step, **more):
    rows = [response(*x, step) for x in (RUDE, BEE)]
    line = {"step": step, "kl_coef": 0.1, "mean": MEAN, "std": STD, "judge": step / 25}
    return line | {"settings": SETTINGS, "tracked": rows, "sampled": rows[1:]} | more


def metric(step):
    """A line of ppo.jsonl."""
    kl, score = 0.05 * step, 0.03 * step
    passes = [{"clip_frac": 0.001 * step}, {"clip_frac": 0.002 * step}]
    row = {"step": step, "score": score, "kl": kl, "kl_coef": 0.1, "rlhf_reward": score - 0.1 * kl}
    row |= {"entropy": 1 / step, "explained_variance": step / 100, "response_length": 10 + step}
    row |= {"eos_rate": 0.75, "value_loss": 3 / step, "policy_loss": -0.001, "passes": passes}
    return row | {"seconds": 0.5 * step}


def measured(**figures):
    return figures | {f"{name}_se": 0.01 for name in figures}


REPORT = {
    "beta": 0.1,
    "notes": ["something of note <b>"],
    "best_judge": 3.0,
    "seconds": {"sft": 78.0, "rm": 132.0, "ppo": 30.0},
    "sft": measured(judge=-0.33, score=-0.01, penalty=0.25, kl=0, eos_rate=1, above_entropy=0.02)
    | measured(distinct=0.94, val_loss=0.507)
    | {"entropy_floor": 0.4862},
    "ppo": measured(judge=2.63, score=1.47, penalty=0.0, kl=2.73, eos_rate=0.987, optimality=0.86)
    | measured(distinct=0.51, val_loss=1.93),
    "ppo_unseen": {"prompts": 50} | measured(score=1.41, kl=2.57, optimality=0.834),
    "rm": measured(below_ceiling=0.0088) | {"label_ceiling": 0.8265, "label_loss_floor": 0.3653},
    "best_of_n": {"4": measured(judge=1.67, score=0.93) | {"kl": 0.636}},
    "optimum": [{"beta": 0.1, "score": 1.6, "kl": 2.9}, {"beta": 1.0, "score": 0.74, "kl": 0.37}],
    "samples": [{"prompt": RUDE[2], "sft": " Bees.", "ppo": " A bee.", "score": 1.5, "kl": 2.5}],
}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder):
    """All the files that the page is made of; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    fit = [{"step": i, "loss": 5 / i, "accuracy": 0.5 + 0.005 * i} for i in range(1, 61)]
    fit[49] |= {"val_loss": 0.25, "val_accuracy": 0.7}
    fit[2] |= {"val_loss": 9.0}  # before what the page shows of SFT
    write_jsonl(folder / "sft.jsonl", fit)
    write_jsonl(folder / "rm.jsonl", fit)
    write_jsonl(folder / "ppo.jsonl", [metric(step) for step in range(1, 61)])
    write_jsonl(folder / "ppo_traces.jsonl", [trace(step) for step in STOPS])
    (folder / "report.json").write_text(json.dumps(REPORT))
    return folder
