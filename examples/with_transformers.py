"""PPO for a causal language model of transformers: a program, and a file to copy beside minippo.py.

    python -m examples.with_transformers        a tiny Llama learns to write capital letters
    python -m examples.with_transformers --policy sft --reward_model rm --data FOLDER --out ppo

`trl sft` and `trl reward` make such folders; transformers, vLLM and TRL read the new one. train()
takes texts, conversations, lists of ids, or dicts with one of these as "prompt" and other columns.
A reward is a classifier or, as for TRL's GRPO, a function: score(prompts, completions,
completion_ids, **other columns) -> numbers. The value head is not saved: a second run has a new
one, and the policy that it starts from as its reference.
"""

import copy
import importlib
import json
import random
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

import minippo


@dataclass
class Config(minippo.PPOConfig):
    policy: str = ""  # folder of the SFT model
    reward_model: str = ""  # folder of a classifier
    reward: str = ""  # or module:function
    data: str = ""  # JSON lines with "prompt", or a folder with prompts_train.jsonl
    out: str = ""  # new folder
    lora: bool = False  # train an adapter, merged at the end
    steps: int = 100
    batch_size: int = 64
    lr: float = 1e-5  # for LoRA rather 1e-4
    value_lr: float = 3e-4  # of the value head
    seed: int = 0


def refuse(wrong, message, value):
    if wrong:
        raise ValueError(f"{message}: {value!r:.200}")


class Policy(torch.nn.Module):
    """A model, perhaps with an adapter of peft, and a value head, as minippo.GPT."""

    def __init__(self, model, eos):
        super().__init__()
        self.model = model.eval()  # no dropout
        self.body = model.get_decoder()
        self.lm_head = model.get_output_embeddings()
        self.value_head = torch.nn.Linear(self.lm_head.weight.shape[1], 1, device=model.device)
        torch.nn.init.zeros_(self.value_head.weight)
        layers = model.modules()
        self.checkpoints = [x for x in layers if getattr(x, "gradient_checkpointing", False)]
        sizes = model.config.get_text_config()
        context = getattr(sizes, "max_position_embeddings", 10**9)
        rope = getattr(sizes, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":  # past it, earlier positions would change
            context = rope["original_max_position_embeddings"]
        self.config = SimpleNamespace(eos=eos, context=context, layers=0)  # the cache adds them

    def trunk(self, tokens, cache=None, start=0):
        for layer in self.checkpoints:  # they need the training mode
            layer.training = torch.is_grad_enabled()
        past = None if cache is None else transformers.DynamicCache([x for x in cache if x])
        output = self.body(tokens, past_key_values=past, use_cache=past is not None)
        if past is not None:
            cache[:] = [[layer.keys, layer.values] for layer in past.layers]
        return output.last_hidden_state

    def forward(self, tokens, mask):
        hidden = self.trunk(tokens)[mask]
        return self.lm_head(hidden), self.value_head(hidden.float()).squeeze(-1)


def check(policy, prompts):
    """Is log pi that of the model itself, with gradients and token by token?"""
    name = type(policy.body).__name__
    refuse(policy.model._is_stateful, "not all layers are attention", name)
    prompts = [prompts[i % len(prompts)][:16] for i in range(16)]
    tokens, mask = minippo.generate(policy, prompts, 16)
    logprobs, _ = minippo.evaluate_actions(policy, tokens, mask)
    cache = []
    with torch.no_grad():
        hidden = torch.cat([policy.trunk(column, cache) for column in tokens.split(1, 1)], 1)
        logits = torch.stack([policy.model(tokens).logits, policy.lm_head(hidden)])
    nats = minippo.gather_logprobs(logits[:, :, :-1], tokens[:, 1:].expand(2, -1, -1))
    gap = (nats - logprobs)[:, mask].abs().mean(1).max().item()
    limit = 0.2 if policy.model.dtype.itemsize < 4 else 1e-3  # in 16 bits, 0.12 was measured
    hint = "log pi is off (dropout, prefix tuning, more than a linear head?) by nats"
    refuse(not gap < limit, f"{name}: {hint}", gap)


class Prompt(list):
    """Ids. row: the user's dict."""

    row = None


def encode(tokenizer, rows, room):
    """-> Prompts of at most `room` tokens; says which are left out."""
    refuse(isinstance(rows, str | dict), "wanted a list of prompts", rows)
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    adds_end = tokenizer("a")["input_ids"][-1:] == [eos]  # as T5 does
    prompts = []
    for row in rows:
        row = row if isinstance(row, dict) else {"prompt": row}
        ids = row["prompt"]
        if isinstance(ids, str):
            ids = tokenizer(ids)["input_ids"]
            ids = ids[:-1] if adds_end else ids
        elif ids and isinstance(ids[0], dict):
            refuse(ids[-1]["role"] == "assistant", "a prompt ends with an answer", row)
            ids = tokenizer.apply_chat_template(ids, add_generation_prompt=True, return_dict=False)
        has_pad = pad in ids if pad not in (bos, eos) else pad != bos and ids[:1] == [pad]
        refuse(has_pad or ids[:2] == [bos, bos], "a prompt has padding or begins twice", row)
        prompts.append(Prompt(ids))
        prompts[-1].row = row
    places = [i for i, ids in enumerate(prompts, 1) if not 0 < len(ids) <= room]
    if places:
        why = f"empty, or above {room} tokens (context - max_new_tokens)"
        print(f"{len(places)} prompts left out, the first is {places[0]}: {why}")
    return [ids for ids in prompts if 0 < len(ids) <= room]


def text_scores(reward, tokenizer, prompts, tokens, mask):
    """(B,), by a function of texts, decoded as by TRL."""
    rows = [prompt.row for prompt in prompts]
    columns = {name: [row.get(name) for row in rows] for name in set().union(*rows)}
    ids = [row[row_mask].tolist() for row, row_mask in zip(tokens[:, 1:], mask)]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    if isinstance(rows[0]["prompt"][0], dict):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    columns |= {"prompts": columns.pop("prompt"), "completions": texts, "completion_ids": ids}
    with torch.random.fork_rng():  # the function may seed torch
        numbers = reward(**columns)
        numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
        is_list = hasattr(numbers, "__iter__") and not isinstance(numbers, dict | set | str)
        numbers = [*numbers] if is_list else [numbers]
    scores = []
    for number, text in zip_longest(numbers, texts):
        number = number.item() if hasattr(number, "item") else number
        fine = isinstance(number, int | float) and abs(number) <= 1e6 and text is not None
        refuse(not fine, f"wanted one finite reward for each, not {number!r:.80} for", text)
        scores.append(float(number))
    return torch.tensor(scores, device=tokens.device)


def classifier_scores(classifier, tokens, mask):
    """(B,), read where the classifier reads: at the last token that is not its padding."""
    config = classifier.eval().config
    pad = config.get_text_config().pad_token_id
    refuse(config.num_labels != 1 or pad is None, "wanted num_labels=1 and a pad_token_id", config)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_text = columns < minippo.row_lengths(mask)[:, None]
    tokens = tokens.masked_fill(~is_text, pad)
    return classifier(tokens, attention_mask=is_text.long()).logits[:, 0].float()


def train(model, tokenizer, prompts, reward, config):
    """PPO, in place -> the metrics of each step."""
    policy = Policy(model, tokenizer.eos_token_id)
    refuse(policy.config.eos is None, "no eos_token", tokenizer)
    prompts = encode(tokenizer, prompts, policy.config.context - config.max_new_tokens)
    check(policy, prompts)
    weights = [p for p in model.parameters() if p.requires_grad]
    dtypes = {p.dtype for p in weights}
    refuse(dtypes != {torch.float32}, "the weights to train should be float32", dtypes)
    groups = [
        {"params": weights, "peak": config.lr},
        {"params": policy.value_head.parameters(), "peak": config.value_lr},
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
    # The reference shares the weights that are not trained: with LoRA, nearly all
    constants = {id(p): p for p in policy.parameters() if not p.requires_grad}
    ref = copy.deepcopy(policy, constants).requires_grad_(False)
    is_classifier = isinstance(reward, torch.nn.Module)
    mean, std = 0.0, 1.0

    def score(prompts, tokens, mask):
        if is_classifier:
            return (classifier_scores(reward, tokens, mask) - mean) / std
        return text_scores(reward, tokenizer, prompts, tokens, mask)

    dice = random.Random(config.seed)  # a reward may seed the others
    batch_prompts = sorted(dice.choices(prompts, k=config.batch_size), key=len)
    no_penalties = replace(config, length_penalty=0.0, missing_eos_penalty=0.0)
    first = minippo.rollout_in_pieces(policy, ref, score, batch_prompts, no_penalties)["scores"]
    print(f"first scores: mean {first.mean():.3g}, standard deviation {first.std():.3g}")
    if is_classifier:  # from now on 0 and 1
        mean, std = first.mean(), first.std()
    torch.nn.init.constant_(policy.value_head.bias, first.mean() - mean)

    log = []
    for step in range(config.steps):
        minippo.set_lr(optimizer, step, config.steps, warmup=5)
        batch_prompts = sorted(dice.choices(prompts, k=config.batch_size), key=len)
        batch = minippo.rollout_in_pieces(policy, ref, score, batch_prompts, config)
        log.append(minippo.batch_metrics(batch, config))
        batch |= minippo.compute_advantages(batch, config)
        minippo.ppo_update(policy, optimizer, batch, config)
        if step % 10 == 0 or step + 1 == config.steps:
            row = batch["tokens"][0, : minippo.row_lengths(batch["mask"])[0]]
            watch = "score {score:.2f}  kl {kl:.2f}".format(**log[-1])
            print(f"iteration {step + 1}  {watch}  {tokenizer.decode(row)!r}", flush=True)
    return log


def demonstrate(steps=50):
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # a token is a byte

    def capitals(completions, **columns):
        return [sum(map(str.isupper, text)) / 2 for text in completions]

    config = Config(max_new_tokens=16, steps=steps, lr=3e-3, value_lr=3e-2)
    return train(model, tokenizer, ["A bee", "Hello"], capitals, config)


def load(kind, folder):
    """-> model, tokenizer."""
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    refuse(info["missing_keys"], f"{folder} lacks weights", info["missing_keys"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), transformers.AutoTokenizer.from_pretrained(folder)


def main(config):
    torch.manual_seed(config.seed)
    refuse(Path(config.out).exists(), "exists already", config.out)
    data = Path(config.data)
    data = data / "prompts_train.jsonl" if data.is_dir() else data
    rows = [json.loads(line) for line in open(data, encoding="utf-8")]
    model, tokenizer = load(transformers.AutoModelForCausalLM, config.policy)
    if config.reward:
        module, _, name = config.reward.partition(":")
        reward = getattr(importlib.import_module(module), name)
    else:
        kind = transformers.AutoModelForSequenceClassification
        reward, other = load(kind, config.reward_model)
        same = tokenizer.get_vocab().items() <= other.get_vocab().items()
        refuse(not same, "another vocabulary than the policy's", config.reward_model)
    if config.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    train(model, tokenizer, rows, reward, config)
    model = model.merge_and_unload() if config.lora else model
    model.save_pretrained(config.out)
    tokenizer.save_pretrained(config.out)


if __name__ == "__main__":
    (settings,) = transformers.HfArgumentParser(Config).parse_args_into_dataclasses()
    if settings == Config():
        demonstrate()
    else:
        main(settings)
