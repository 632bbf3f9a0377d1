"""RLHF of a causal language model of Hugging Face transformers: a file to copy beside minippo.py.

    pip install "transformers>=5" peft        (peft: for LoRA)
    python -m examples.with_transformers      (a copy: python with_transformers.py)

A tiny Llama learns to write capital letters. In main(), put your own in place of

    model      AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float32).to("cuda")
    tokenizer  AutoTokenizer.from_pretrained("gpt2")
    prompts    texts; lists of ids; or conversations, [{"role": "user", "content": ...}]
    score      text_score(tokenizer, prompts, a function), or classifier_score(a classifier)
    config     missing_eos_penalty=0 for continuations, which need no end
    lr         for 135 million parameters 1e-4, head_lr 3e-4, fit 5e-5; LoRA 1e-3; tiny 3e-3

then model.save_pretrained(folder).

SFT           fit(policy, encode_rows(tokenizer, rows), sft_loss, lr)
Reward model  AutoModelForSequenceClassification.from_pretrained(the SFT model's folder,
              num_labels=1, dtype=torch.float32).to("cuda"), and
              fit(classifier, encode_rows(tokenizer, pairs), rm_loss, lr)
LoRA          a model of peft.get_peft_model(); the reference is the model without the adapter
RLOO, GRPO    Settings and algorithm=(compute_advantages, loss) of variations/rloo.py
Resuming      save policy.value_head.state_dict(), too; load it, and set policy.reference =
              reference_of(Policy(the SFT model, tokenizer)), or reference_of(policy) with LoRA
Memory        bfloat16=True; PPOConfig's micro_batch; model.gradient_checkpointing_enable()
generate()    of transformers draws from the same distribution only with top_k=0
"""

import copy
import math
import random
import tempfile
import warnings
from functools import partial
from types import SimpleNamespace

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR

import minippo
from minippo import PPOConfig, evaluate_actions, gather_logprobs


PPO = minippo.compute_advantages, minippo.ppo_loss


def refuse(wrong, message):
    if wrong:
        raise ValueError(message)


def base(model):  # below an adapter of peft
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def last_hidden(model, tokens, use_cache=False, **more):
    """What a head reads, (B, T, C). No dropout; gradient checkpoints where they are on."""
    for layer in model.modules():
        layer.training = torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False)
        for name in vars(layer):
            if "drop" in name and isinstance(vars(layer)[name], float):
                vars(layer)[name] = 0.0
    return base(model).base_model(tokens, use_cache=use_cache, **more).last_hidden_state


class Policy(torch.nn.Module):
    """What evaluate_actions asks for: lm_head, value_head, hidden(). bfloat16: of matrix products
    below the heads; the weights stay float32. reference: by default the policy at first train()."""

    def __init__(self, model, tokenizer, bfloat16=False):
        super().__init__()
        self.model, self.tokenizer, self.bfloat16, self.reference = model, tokenizer, bfloat16, None
        self.lm_head, eos = base(model).get_output_embeddings(), tokenizer.eos_token_id
        self.value_head = torch.nn.Linear(self.lm_head.weight.shape[1], 1, device=model.device)
        torch.nn.init.zeros_(self.value_head.weight)  # center_values() sets the bias
        self.config = SimpleNamespace(eos=eos)
        refuse(eos is None, "the tokenizer has no end token: set tokenizer.eos_token")
        if (ends := model.generation_config.eos_token_id) not in (None, eos, [eos]):
            warnings.warn(f"only token {eos} ends a response, not all of {ends}", stacklevel=2)

    def hidden(self, tokens, **more):
        with torch.autocast(tokens.device.type, torch.bfloat16, self.bfloat16):
            hidden = last_hidden(self.model, tokens, **more)
        return [hidden.to(head.weight.dtype) for head in (self.lm_head, self.value_head)]


def reference_of(policy):
    """A frozen copy; where there is an adapter, the same model without it."""
    if not hasattr(policy.model, "disable_adapter"):
        return minippo.frozen_copy(policy)
    off = policy.model.disable_adapter  # a context, and so a decorator
    with off():
        shared = any(p.requires_grad for p in base(policy.model).parameters())
    refuse(shared, "the reference is trained: freeze all but the adapter, bias='none'")
    hidden, lm_head = off()(policy.hidden), off()(policy.lm_head)
    return SimpleNamespace(hidden=hidden, lm_head=lm_head, value_head=policy.value_head)


def pad(rows, device):
    """B prompts and responses as ids -> tokens (B, T), mask (B, T-1)."""
    tokens = [torch.tensor(prompt + response) for prompt, response in rows]
    mask = [torch.tensor([False] * (len(a) - 1) + [True] * len(b)) for a, b in rows]
    return [pad_sequence(x, True).to(device) for x in (tokens, mask)]


def compare(policy, nats, logprobs):
    gap, half = (nats - logprobs).abs().mean().item(), policy.model.dtype.itemsize < 4
    why = "scaled or capped logits (Gemma-2, Cohere, Granite), dropout, prompt tuning, a wrapper"
    wrong = not gap < (0.05 if half or policy.bfloat16 else 1e-3)
    refuse(wrong, f"log pi is {gap:.2g} nats off: {why} or padding on the left")


@torch.no_grad()
def sample(policy, prompts, max_new_tokens, temperature=1.0):
    """minippo.generate for a Policy. Prompts are padded on the left; no generation_config acts."""
    rows = [torch.tensor(ids, device=policy.value_head.weight.device) for ids in prompts]
    new = pad_sequence(rows, True, padding_side="left")
    text = pad_sequence([torch.ones_like(x) for x in rows], True, padding_side="left")
    drawn, nats, inside = [], [], [torch.ones_like(text[:, 0]).bool()]
    cache = transformers.DynamicCache(config=base(policy.model).config)
    while len(drawn) < max_new_tokens and inside[-1].any():
        more = {"position_ids": (text.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]}
        more |= {"attention_mask": text, "use_cache": True, "cache": cache}
        logits = policy.lm_head(policy.hidden(new, **more)[0][:, -1]).float()
        drawn.append(minippo.draw(logits / temperature))
        nats.append(gather_logprobs(logits, drawn[-1], temperature))
        inside.append(inside[-1] & (drawn[-1] != policy.config.eos))
        new, text = drawn[-1][:, None], torch.cat([text, text[:, -1:]], 1)
    drawn, nats, inside = (torch.stack(x[: len(drawn)], 1) for x in (drawn, nats, inside))
    responses = [ids[keep].tolist() for ids, keep in zip(drawn, inside)]
    tokens, mask = pad([*zip(prompts, responses)], drawn.device)
    logprobs, values, _ = evaluate_actions(policy, tokens, mask, temperature)
    compare(policy, nats[inside], logprobs[mask])  # the ratio would not show it
    return tokens, mask, logprobs, values


def check(model, prompts, longest, new=False):
    """Before a training. new: the reference is the policy itself."""
    inner = model.model if isinstance(model, Policy) else model
    sizes = [p.dtype.itemsize for p in inner.parameters() if p.requires_grad]
    autocast = torch.is_autocast_enabled(inner.device.type)
    context = getattr(inner.config, "max_position_embeddings", longest)
    refuse(autocast, "leave torch.autocast: use Policy's bfloat16")
    refuse(not sizes, "no weight is trainable: use requires_grad_() or is_trainable=True")
    refuse(min(sizes) < 4, "small steps vanish in 16 bits: load with dtype=torch.float32")
    refuse(not all(prompts), "a prompt is empty: give it a token")
    refuse(longest > context, f"a row of {longest} tokens exceeds the context, {context}: cut it")
    if inner is model:
        return
    with tempfile.TemporaryDirectory() as folder:  # fails now, not after the training
        base(inner).generation_config.save_pretrained(folder)
    exact, prompts = copy.copy(model), [x[: 2 * i + 1] for i, x in enumerate(prompts[:8])]
    exact.bfloat16 = False
    tokens, mask, _, _ = sample(exact, prompts, 8)
    with torch.no_grad():
        nats = gather_logprobs(inner(tokens).logits[:, -tokens.shape[1] : -1], tokens[:, 1:])
    compare(exact, nats[mask], evaluate_actions(exact, tokens, mask)[0][mask])
    if model.reference:
        nats, ref = (evaluate_actions(x, tokens, mask)[0] for x in (model, model.reference))
        moved = new and (nats - ref).abs().max() > 1e-3
        refuse(moved, "the adapter is not new: model.merge_and_unload(), then a new one")


# Texts: the tokens that are trained and the text that the reward sees are what was sampled


def encode(tokenizer, prompt):
    """A text, a conversation or ids -> ids."""
    ids, bos = prompt, tokenizer.bos_token_id
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]  # with the token for the beginning
        if tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
            ids = ids[:-1]  # T5 adds an end
    elif prompt and isinstance(prompt[0], dict):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    refuse(ids[:2] == [bos, bos], f"token {bos} begins {prompt!r} twice: leave one out")
    return ids


def encode_rows(tokenizer, rows):
    """(prompt, completion, ...) -> the same as ids; a completion, a text, gets its end token."""
    plain, end = partial(tokenizer, add_special_tokens=False), tokenizer.eos_token_id

    def ids(text):
        for mark in "|a\n":  # at the beginning of a text, some tokenizers add a space
            a, b = plain(mark)["input_ids"], plain(mark + text)["input_ids"]
            if b[: len(a)] == a:
                return b[len(a) :] + [end] * (b[-1] != end)
        raise ValueError(f"{text!r} merges with a prompt: write its ids")

    return [(encode(tokenizer, prompt), *map(ids, texts)) for prompt, *texts in rows]


# Scores: score(tokens, mask) -> (B,), as minippo wants it


def text_score(tokenizer, prompts, reward):
    """reward(prompts, responses), B of these prompts as they are and B texts, gives B numbers."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    by_ids = {}
    for prompt in prompts:
        other = by_ids.setdefault(tuple(encode(tokenizer, prompt)), prompt) != prompt
        refuse(other, f"leave {prompt!r} out: another prompt has the same tokens")

    def score(tokens, mask):
        originals, texts = [], []
        for row, inside in zip(tokens, mask):
            ids = row[: inside.int().argmax() + 1].tolist()
            start = decode(ids)
            refuse(tuple(ids) not in by_ids, f"text_score() was not given {start!r}")
            originals.append(by_ids[tuple(ids)])
            ids += [i for i in row[1:][inside].tolist() if i != tokenizer.eos_token_id]
            texts.append(decode(ids)[len(start) :])  # a response alone may lose a space
        scores = torch.as_tensor(reward(originals, texts), dtype=torch.float32)
        wrong = scores.shape != (len(texts),) or not scores.isfinite().all()
        refuse(wrong, f"the reward should give {len(texts)} finite numbers, not {scores}")
        return scores.to(tokens.device)

    return score


def classifier_score(classifier):
    """Of a decoder with the policy's vocabulary and one label, at the last token."""
    wrong = classifier.config.num_labels != 1 or not hasattr(classifier, "score")
    refuse(wrong, "a classifier needs num_labels=1 and a head `score`")

    def score(tokens, mask):
        last = torch.arange(len(mask)), minippo.row_lengths(mask) - 1
        return classifier.score(last_hidden(classifier, tokens)[last]).squeeze(1).float()

    return score


def adam(groups, steps):
    """For (module, learning rate); the rates climb in 5 steps, then fall to 0."""
    groups = [{"params": module.parameters(), "lr": lr} for module, lr in groups]
    optimizer = torch.optim.Adam(groups, fused=True)
    return optimizer, LambdaLR(optimizer, lambda i: min((i + 1) / 5, 1 - i / steps))


def sft_loss(policy, rows):
    """(prompt, completion) as ids -> the mean of -log pi of the completions."""
    tokens, mask = pad(rows, policy.model.device)
    return -minippo.masked_mean(evaluate_actions(policy, tokens, mask)[0], mask)


def rm_loss(classifier, pairs):
    """(prompt, chosen, rejected) as ids -> the Bradley-Terry loss."""
    rows = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
    scores = classifier_score(classifier)(*pad(rows, classifier.device))
    return minippo.reward_model_loss(scores[::2], scores[1::2])[0]


def fit(model, rows, loss_of, lr, batch_size=16):
    """One pass over the rows in random order: of a Policy by sft_loss, a classifier by rm_loss."""
    check(model, [x for x, *_ in rows], max(len(x) + len(y) for x, *ys in rows for y in ys))
    batches = torch.utils.data.DataLoader(rows, batch_size, shuffle=True, collate_fn=list)
    optimizer, schedule = adam([(model, lr)], len(batches))
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        minippo.gradient_step(optimizer, 1.0)
        schedule.step()
        if step % 10 == 0:
            print(f"step {step + 1:4} of {len(batches)}  loss {loss.item():.3f}", flush=True)


def next_batch(policy, prompts, score, config, batch_size):
    """Responses to random prompts, config.k to each."""
    rows = [
        ids for ids in random.choices(prompts, k=batch_size // config.k) for _ in range(config.k)
    ]
    return minippo.rollout(policy, policy.reference, score, rows, config, sample)


def check_scale(policy, batch, config):
    """PPOConfig suits scores, before penalties, with standard deviation 1."""
    row, eos = (batch["tokens"], batch["mask"]), policy.config.eos
    scores = batch["scores"] - minippo.score_responses(lambda *_: 0, *row, config, eos)[0]
    if (std := scores.std().item()) > 1e-6 * scores.abs().max() and (
        power := round(math.log10(std))
    ):
        print(f"the standard deviation of the scores is {std:.2g}: divide the reward by 1e{power}")


def train(policy, prompts, score, config, lr, head_lr, steps=50, batch_size=64, algorithm=PPO):
    """PPO for some iterations, in place -> what minippo.batch_metrics says of each batch."""
    compute_advantages, loss, log = *algorithm, []
    wrong = batch_size % config.k or batch_size < max(config.k, config.minibatches)
    refuse(wrong, f"batch_size {batch_size}: take a multiple of k, and at least minibatches")
    if new := policy.reference is None:
        policy.reference = reference_of(policy)
    prompts = [encode(policy.tokenizer, prompt) for prompt in prompts]
    check(policy, prompts, max(map(len, prompts)) + config.max_new_tokens, new)
    optimizer, schedule = adam([(policy.model, lr), (policy.value_head, head_lr)], steps)
    batch = next_batch(policy, prompts, score, config, batch_size)
    check_scale(policy, batch, config)
    minippo.center_values(policy, batch)
    for step in range(steps):
        batch = next_batch(policy, prompts, score, config, batch_size)
        batch |= compute_advantages(batch, config)
        log.append(minippo.batch_metrics(batch, config))
        minippo.ppo_update(policy, optimizer, batch, config, loss)
        schedule.step()
        if step % 5 == 0 or step + 1 == steps:
            row = batch["tokens"][0, : minippo.row_lengths(batch["mask"])[0]]
            watch = "score {score:.2f}  kl {kl:.2f}".format(**log[-1])
            print(f"iteration {step + 1}  {watch}  {policy.tokenizer.decode(row)!r}", flush=True)
    return log


def main(seed=0):
    transformers.set_seed(seed)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # a token is a byte
    shape = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "eos_token_id": 1}
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **shape)
    model = transformers.LlamaForCausalLM(config)

    def reward(prompts, responses):
        return [sum("A" <= letter <= "Z" for letter in text) / 2 for text in responses]

    prompts, config = ["A bee", "What does a zebra eat?", "Hello"], PPOConfig(max_new_tokens=16)
    score = text_score(tokenizer, prompts, reward)
    return train(Policy(model, tokenizer), prompts, score, config, lr=3e-3, head_lr=3e-2)


if __name__ == "__main__":
    main()
