"""PPO for a language model of transformers: a program, and a file to copy beside minippo.py.

    python -m examples.with_transformers        a tiny Bloom learns to write capital letters
    python -m examples.with_transformers --policy sft --reward_model rm --data FOLDER --out ppo

A row of the data has a "prompt": a text, a conversation or a list of ids. A reward is a classifier
or, as in TRL, a function: score(prompts, completions, completion_ids, **other columns) -> numbers.
"""

import copy
import json
import pkgutil
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

import minippo


@dataclass
class Config(minippo.PPOConfig):
    policy: str = ""  # folder of the SFT model
    reward_model: str = ""  # folder of a classifier
    reward: str = ""  # or module:function
    data: str = ""  # with prompts_train.jsonl
    out: str = ""  # new folder
    lora: bool = False  # by the program, which merges it at the end
    steps: int = 100
    batch_size: int = 64
    sample_batch: int = 64  # sampled at once
    lr: float = 1e-5  # LoRA: 1e-4
    value_lr: float = 3e-4
    seed: int = 0


def refuse(wrong, message, value):
    if wrong:
        raise ValueError(f"{message}: {value!r:.200}")


class Policy(torch.nn.Module):
    """A model and a value head."""

    def __init__(self, model, eos):
        super().__init__()
        self.model = model.eval()  # no dropout
        self.body = model.get_decoder()
        self.lm_head = model.get_output_embeddings()
        self.value_head = torch.nn.Linear(self.lm_head.weight.shape[1], 1, device=model.device)
        torch.nn.init.zeros_(self.value_head.weight)
        sizes = model.config.get_text_config()
        context = getattr(sizes, "max_position_embeddings", 10**9)
        self.config = SimpleNamespace(eos=eos, context=context, layers=0)  # the cache adds them

    def trunk(self, tokens, cache=None, start=0):
        if cache is None:
            return self.body(tokens, use_cache=False).last_hidden_state
        past = transformers.DynamicCache(cache)
        hidden = self.body(tokens, past_key_values=past, use_cache=True).last_hidden_state
        cache[:] = [[layer.keys, layer.values] for layer in past.layers]
        return hidden

    def forward(self, tokens, mask):
        hidden = self.trunk(tokens)[mask]
        return self.lm_head(hidden), self.value_head(hidden.float()).squeeze(-1)


def check(policy, prompts):
    """Is log pi that of the model itself, with gradients and token by token?"""
    refuse(policy.model._is_stateful, "not all layers are attention", policy.body)
    tokens, mask = minippo.generate(policy, [ids[:16] for ids in prompts[:16]], 16)
    logprobs, _ = minippo.evaluate_actions(policy, tokens, mask)
    cache = []
    with torch.no_grad():
        hidden = torch.cat([policy.trunk(column, cache) for column in tokens.split(1, 1)], 1)
        logits = torch.stack([policy.model(tokens).logits, policy.lm_head(hidden)])
    nats = minippo.gather_logprobs(logits[:, :, :-1], tokens[:, 1:].expand(2, -1, -1))
    gap = (nats - logprobs)[:, mask].abs().mean(1).max().item()
    limit = 0.2 if policy.model.dtype.itemsize < 4 else 1e-3
    refuse(not gap < limit, "log pi (dropout? prefix tuning?) is off by", gap)


class Prompt(list):
    """Ids. row: the user's dict."""


def is_chat(prompt):
    return len(prompt) > 0 and isinstance(prompt[0], dict)


def encode(tokenizer, rows, room):
    """-> Prompts of 1 to `room` tokens."""
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    prompts = []
    places = []
    for place, row in enumerate(rows, 1):
        ids = row["prompt"]
        if isinstance(ids, str):
            ids = tokenizer.encode(ids)
            if ids[-1:] == [eos]:  # some tokenizers end each text
                del ids[-1]
        elif is_chat(ids):
            refuse(ids[-1]["role"] == "assistant", "a prompt ends with an answer", row)
            ids = tokenizer.apply_chat_template(ids, add_generation_prompt=True, return_dict=False)
        odd = ids[:2] in ([bos, bos], [eos, eos]) or ids[-2:] == [eos, eos]
        odd = odd or pad in ids and pad not in (bos, eos)
        refuse(odd, "a prompt has padding or begins twice", row)
        if 0 < len(ids) <= room:
            prompts.append(Prompt(ids))
            prompts[-1].row = row
        else:
            places.append(place)
    if places:
        print(f"{len(places)} prompts are empty or above {room} tokens, first {places[0]}")
    refuse(not prompts, "no prompt is left of", rows)
    return prompts


def text_scores(reward, tokenizer, prompts, tokens, mask):
    """(B,), by a function of texts."""
    rows = [prompt.row for prompt in prompts]
    columns = {name: [row.get(name) for row in rows] for name in set().union(*rows)}
    ids = [row[row_mask].tolist() for row, row_mask in zip(tokens[:, 1:], mask)]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    for i, row in enumerate(rows):
        if is_chat(row["prompt"]):
            texts[i] = [{"role": "assistant", "content": texts[i]}]
    columns |= {"prompts": columns.pop("prompt"), "completions": texts, "completion_ids": ids}
    with torch.random.fork_rng():  # the function may seed torch
        numbers = reward(**columns)
    scores = torch.as_tensor(numbers, dtype=torch.float32, device=tokens.device)
    fine = scores.shape == (len(texts),) and scores.isfinite().all()
    refuse(not fine, "wanted one finite number per completion", numbers)
    return scores


def classifier_scores(model, tokens, mask):
    """(B,), read at the last token that is not padding."""
    config = model.eval().config
    pad = config.get_text_config().pad_token_id
    refuse(config.num_labels != 1 or pad is None, "wanted num_labels=1 and a pad_token_id", config)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_text = columns < minippo.row_lengths(mask)[:, None]
    tokens = tokens.masked_fill(~is_text, pad)
    return model(tokens, attention_mask=is_text.long()).logits[:, 0].float()


def rollout(policy, ref, score, prompts, config):
    """minippo.rollout for random prompts, in pieces of similar length."""
    choices = [prompts[i] for i in torch.randint(len(prompts), (config.batch_size,))]
    pieces = defaultdict(list)
    for i, prompt in enumerate(sorted(choices, key=len)):
        pieces[i // config.sample_batch, len(prompt) // config.max_new_tokens].append(prompt)
    rows = defaultdict(list)
    for piece in pieces.values():
        for name, tensor in minippo.rollout(policy, ref, score, piece, config).items():
            rows[name].extend(tensor.unsqueeze(-1))
    return {name: pad_sequence(rows[name], batch_first=True).squeeze(-1) for name in rows}


def train(model, tokenizer, prompts, reward, config):
    """PPO, in place -> the metrics of each step."""
    torch.manual_seed(config.seed)
    eos = tokenizer.eos_token_id
    refuse(eos is None, "no end token", tokenizer)
    ends = model.generation_config.eos_token_id  # None, an id or a list
    other = isinstance(ends, int) and ends != eos or isinstance(ends, list) and eos not in ends
    refuse(other, f"the tokenizer ends texts with {eos}, the model with", ends)
    policy = Policy(model, eos)
    prompts = encode(tokenizer, prompts, policy.config.context - config.max_new_tokens)
    check(policy, prompts)
    weights = [p for p in model.parameters() if p.requires_grad]
    refuse({p.dtype for p in weights} != {torch.float32}, "wanted float32 weights", weights)
    value_head = {"params": policy.value_head.parameters(), "peak": config.value_lr}
    groups = [{"params": weights, "peak": config.lr}, value_head]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
    # The reference shares the weights that are not trained: with LoRA, nearly all.
    constants = {id(p): p for p in policy.parameters() if not p.requires_grad}
    ref = copy.deepcopy(policy, constants).requires_grad_(False)
    is_classifier = isinstance(reward, torch.nn.Module)
    mean, std = 0.0, 1.0

    def score(prompts, tokens, mask):
        if is_classifier:
            return (classifier_scores(reward, tokens, mask) - mean) / std
        return text_scores(reward, tokenizer, prompts, tokens, mask)

    no_penalties = replace(config, length_penalty=0.0, missing_eos_penalty=0.0)
    first = rollout(policy, ref, score, prompts, no_penalties)["scores"]
    if is_classifier:  # from now on 0 and 1
        mean, std = first.mean(), first.std()
        refuse(not std > 0, "the scores do not differ", first)
    torch.nn.init.constant_(policy.value_head.bias, first.mean() - mean)
    log = []
    for step in range(config.steps):
        minippo.set_lr(optimizer, step, config.steps, warmup=5)
        batch = rollout(policy, ref, score, prompts, config)
        log.append(minippo.batch_metrics(batch, config))
        shown = "  ".join(f"{name} {log[-1][name]:.2f}" for name in ("score", "kl", "eos_rate"))
        print(f"iteration {step + 1}  {shown}")
        batch |= minippo.compute_advantages(batch, config)
        minippo.ppo_update(policy, optimizer, batch, config)
    return log


def demo(steps=30):
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=259, eos_token_id=1))
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # a token is a byte

    def capitals(completions, **columns):
        return [sum(map(str.isupper, text)) / 2 for text in completions]

    config = Config(max_new_tokens=16, steps=steps, lr=1e-2, value_lr=3e-2)
    return train(model, tokenizer, [{"prompt": "A bee"}], capitals, config)


def load(kind, folder):
    refuse(Path(folder, "adapter_config.json").exists(), "an adapter: merge it first", folder)
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    refuse(info["missing_keys"], f"{folder} lacks weights", info["missing_keys"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), transformers.AutoTokenizer.from_pretrained(folder)


def main(config):
    torch.manual_seed(config.seed)  # of the adapter's weights
    refuse(any(Path(config.out).glob("*")), "not empty", config.out)
    with open(f"{config.data}/prompts_train.jsonl", encoding="utf-8-sig") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    model, tokenizer = load(transformers.AutoModelForCausalLM, config.policy)
    if config.reward:
        reward = pkgutil.resolve_name(config.reward)
    else:
        reward, other = load(transformers.AutoModelForSequenceClassification, config.reward_model)
        extra = tokenizer.get_vocab().items() - other.get_vocab().items()
        refuse(extra, "another vocabulary", extra)
    if config.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    Path(config.out).mkdir(parents=True, exist_ok=True)
    train(model, tokenizer, rows, reward, config)
    model = model.merge_and_unload() if config.lora else model
    model.save_pretrained(config.out)
    tokenizer.save_pretrained(config.out)


if __name__ == "__main__":
    (config,) = transformers.HfArgumentParser(Config).parse_args_into_dataclasses()
    if config.policy:
        main(config)
    else:
        demo()
