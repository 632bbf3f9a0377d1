"""RLHF of a causal language model of Hugging Face transformers: a file to copy beside minippo.py.

    pip install "transformers>=5.24" peft        (peft: for LoRA)
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
Memory        bfloat16=True; PPOConfig's micro_batch; model.gradient_checkpointing_enable()
RLOO          in train(), variations/rloo.py's functions; PPOConfig(k=4)
Resuming      policy.reference = reference_of(Policy(the SFT model, tokenizer)), or, with LoRA,
              reference_of(policy)
"""

import random
from functools import partial
from types import SimpleNamespace

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR

import minippo
from minippo import PPOConfig, evaluate_actions, gather_logprobs


def refuse(wrong, message):
    if wrong:
        raise ValueError(message)


# The policy: what minippo.generate and evaluate_actions ask for


class Trunk(torch.nn.Module):
    """The model below its heads, as minippo.Trunk: tokens (B, T) -> hidden states (B, T, C).
    bfloat16: of its matrix products; the weights stay float32."""

    def __init__(self, model, bfloat16=False):
        super().__init__()
        self.model, self.bfloat16 = model, bfloat16
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
        self.body = inner.base_model

    def forward(self, tokens, cache=None, start=0):
        for layer in self.model.modules():  # no dropout, but checkpoints work in training mode
            checkpoints = getattr(layer, "gradient_checkpointing", False)
            layer.training = checkpoints and torch.is_grad_enabled()
        past = None if cache is None else transformers.DynamicCache([x for x in cache if x])
        with torch.autocast(tokens.device.type, torch.bfloat16, self.bfloat16):
            hidden = self.body(tokens, cache=past, use_cache=past is not None).last_hidden_state
        if past is not None:
            cache[:] = [(layer.keys, layer.values) for layer in past.layers]
        return hidden.to(self.model.dtype)


class Policy(torch.nn.Module):
    """reference: by default the policy as it is at the first train()."""

    def __init__(self, model, tokenizer, bfloat16=False):
        super().__init__()
        self.model, self.tokenizer, self.reference = model, tokenizer, None
        self.trunk, self.lm_head = Trunk(model, bfloat16), model.get_output_embeddings()
        self.value_head = torch.nn.Linear(self.lm_head.weight.shape[1], 1, device=model.device)
        torch.nn.init.zeros_(self.value_head.weight)  # center_values() sets the bias
        eos, ends = tokenizer.eos_token_id, model.generation_config.eos_token_id
        context = getattr(model.config, "max_position_embeddings", 10**9)
        layers = model.config.get_text_config().num_hidden_layers
        self.config = SimpleNamespace(eos=eos, context=context, layers=layers)
        refuse(eos is None, "the tokenizer has no end token: set tokenizer.eos_token")
        if ends not in (None, eos, [eos]):
            print(f"only {eos}, tokenizer.eos_token, ends a response, not all of {ends}")

    def hidden(self, tokens):
        hidden = self.trunk(tokens)
        return hidden, hidden.float()


def reference_of(policy):
    """A frozen copy; where there is an adapter, the same model without it."""
    if not hasattr(policy.model, "disable_adapter"):
        return minippo.frozen_copy(policy)
    off = policy.model.disable_adapter  # a context, and so a decorator
    with off():
        shared = any(p.requires_grad for p in policy.model.parameters())
    refuse(shared, "the reference is trained: freeze all but the adapter, bias='none'")
    hidden, lm_head = off()(policy.hidden), off()(policy.lm_head)
    return SimpleNamespace(hidden=hidden, lm_head=lm_head, value_head=policy.value_head)


def draw(logits):  # in float32, as evaluate_actions reads them
    return minippo.draw(logits.float())


sample = partial(minippo.generate, draw=draw)


def check(policy, prompts):
    """Before training: is log pi that of the model itself, with gradients and token by token?"""
    tokens, mask, _, _ = sample(policy, [ids[:16] for ids in prompts[:8]], 8)
    logprobs, cache = evaluate_actions(policy, tokens, mask)[0], []
    half = policy.trunk.bfloat16 or policy.model.dtype.itemsize < 4
    limit, why = 0.05 if half else 1e-3, "dropout? scaled or capped logits (Gemma-2, Granite)?"
    with torch.no_grad():
        hidden = torch.cat([policy.trunk(column, cache) for column in tokens.split(1, 1)], 1)
        for logits in policy.model(tokens).logits, policy.lm_head(hidden):
            nats = gather_logprobs(logits[:, :-1], tokens[:, 1:])
            gap = (nats - logprobs)[mask].abs().mean().item()
            refuse(not gap < limit, f"log pi is {gap:.2g} nats off: {why}")


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
    """reward: B of these prompts, unchanged, and B responses, texts -> B numbers."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    by_ids = {tuple(encode(tokenizer, prompt)): prompt for prompt in prompts}

    def score(tokens, mask):
        originals, texts = [], []
        for row, inside in zip(tokens, mask):
            ids = row[: inside.int().argmax() + 1].tolist()
            response = [i for i in row[1:][inside].tolist() if i != tokenizer.eos_token_id]
            originals.append(by_ids[tuple(ids)])
            texts.append(decode(ids + response)[len(decode(ids)) :])  # alone, it may lose a space
        scores = torch.as_tensor(reward(originals, texts), dtype=torch.float32)
        wanted = (len(texts),)
        refuse(scores.shape != wanted, f"the reward should have the shape {wanted}: {scores}")
        return scores.to(tokens.device)

    return score


def classifier_score(classifier):
    """Scores from a decoder with the policy's vocabulary and one label, read at the last token."""
    refuse(classifier.config.num_labels != 1, "a classifier needs num_labels=1")
    trunk = Trunk(classifier)

    def score(tokens, mask):
        last = torch.arange(len(mask)), minippo.row_lengths(mask) - 1
        return classifier.score(trunk(tokens)[last]).squeeze(1).float()

    return score


# The three stages


def adam(groups, steps):
    """For (module, learning rate); the rates climb in 5 steps, then fall to 0."""
    trained = [[p for p in module.parameters() if p.requires_grad] for module, _ in groups]
    refuse(not all(trained), "no weight is trainable: load the adapter with is_trainable=True")
    half = any(p.dtype.itemsize < 4 for params in trained for p in params)
    refuse(half, "small steps vanish in 16 bits: load with dtype=torch.float32")
    groups = [{"params": params, "lr": lr} for params, (_, lr) in zip(trained, groups)]
    optimizer = torch.optim.Adam(groups, fused=True)
    return optimizer, LambdaLR(optimizer, lambda i: min((i + 1) / 5, 1 - i / steps))


def pad(rows, device):
    """B prompts and responses as ids -> tokens (B, T), mask (B, T-1)."""
    tokens = [torch.tensor(prompt + response) for prompt, response in rows]
    mask = [torch.tensor([False] * (len(a) - 1) + [True] * len(b)) for a, b in rows]
    return [pad_sequence(x, True).to(device) for x in (tokens, mask)]


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
    if isinstance(model, Policy):
        check(model, [prompt for prompt, _ in rows])
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
    chosen = random.choices(prompts, k=batch_size // config.k)
    rows = [ids for ids in chosen for _ in range(config.k)]
    return minippo.rollout(policy, policy.reference, score, rows, config, sample)


def train(policy, prompts, score, config, lr, head_lr, steps=50, batch_size=64):
    """PPO for some iterations, in place -> what minippo.batch_metrics says of each batch."""
    prompts, log = [encode(policy.tokenizer, prompt) for prompt in prompts], []
    check(policy, prompts)
    optimizer, schedule = adam([(policy.model, lr), (policy.value_head, head_lr)], steps)
    if first := policy.reference is None:
        policy.reference = reference_of(policy)
    batch = next_batch(policy, prompts, score, config, batch_size)
    moved = first and (batch["old_logprobs"] - batch["ref_logprobs"]).abs().max() > 1e-3
    refuse(moved, "the adapter is not new: model.merge_and_unload(), then a new one")
    print(f"scores: standard deviation {batch['scores'].std():.2g}; PPOConfig suits 1")
    minippo.center_values(policy, batch)
    for step in range(steps):
        batch = next_batch(policy, prompts, score, config, batch_size)
        batch |= minippo.compute_advantages(batch, config)
        log.append(minippo.batch_metrics(batch, config))
        minippo.ppo_update(policy, optimizer, batch, config)
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
