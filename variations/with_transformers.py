"""RLHF of a causal language model of Hugging Face transformers: a file to copy beside minippo.py.

    python -m variations.with_transformers    a copy: python with_transformers.py

A tiny Llama with random weights learns to write lower-case letters in seconds. In main(), put
your own in place of

    model        AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float32).to("cuda")
    tokenizer    AutoTokenizer.from_pretrained("gpt2")
    prompts      texts; lists of ids; or conversations, [{"role": "user", "content": ...}]
    score        text_score(tokenizer, prompts, a function), or classifier_score(a classifier);
                 a standard deviation of about 1 suits PPOConfig's kl_coef 0.1
    lr, head_lr  of model and value head: for 135 million parameters 1e-4 and 3e-4; LoRA: 1e-3

then model.save_pretrained(folder). Scores are printed less PPOConfig's penalties: 1 if cut off.
The reference is the model at the first train(); a new Policy has a new one.

SFT           fit(policy, encode_rows(tokenizer, rows), sft_loss, 5e-5), one pass
Reward model  AutoModelForSequenceClassification.from_pretrained(the SFT model's folder,
              num_labels=1, pad_token_id=a token that no text has, dtype=torch.float32), then
              fit(classifier, encode_rows(tokenizer, pairs), rm_loss, 5e-5); score is then
              normalised(classifier_score(classifier), policy, prompts, max_new_tokens)
LoRA          a model of peft.get_peft_model(): the reference is the same model, adapter off
RLOO, GRPO    config = rloo.Settings(), algorithm=(rloo.compute_advantages, rloo.loss), after
              from variations import rloo; copy the folders variations and data too
Memory        bfloat16=True; PPOConfig's micro_batch; model.activation_checkpointing_enable()
Speed         model.base_model.compile(), not torch.compile(model); one GPU, without wrappers
"""

import inspect
import random
import warnings
from types import SimpleNamespace

import torch
import transformers

from minippo import (
    PPOConfig,
    batch_metrics,
    compute_advantages,
    draw,
    evaluate_actions,
    frozen_copy,
    gather_logprobs,
    gradient_step,
    masked_mean,
    ppo_loss,
    ppo_update,
    reward_model_loss,
    rollout,
    row_lengths,
)

PPO = compute_advantages, ppo_loss


class Policy(torch.nn.Module):
    """A causal language model with what evaluate_actions asks for: lm_head, value_head, hidden().
    It has no dropout. bfloat16: of matrix products; the weights that are trained stay float32."""

    def __init__(self, model, tokenizer, bfloat16=False):
        super().__init__()
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
        self.model, self.body, self.lm_head = model, inner.base_model, inner.get_output_embeddings()
        self.value_head = torch.nn.Linear(inner.config.hidden_size, 1, device=model.device)
        for parameter in self.value_head.parameters():
            torch.nn.init.zeros_(parameter)  # all values start at 0
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, bfloat16)
        self.tokenizer, self.reference, eos = tokenizer, None, tokenizer.eos_token_id
        self.config = SimpleNamespace(eos=eos)
        names = inspect.signature(inner.forward).parameters
        self.cache = "cache" if "cache" in names else "past_key_values"  # before transformers 5.24
        self.eval()
        if eos is None:
            raise ValueError("the tokenizer has no end token: set tokenizer.eos_token")
        if (ends := model.generation_config.eos_token_id) not in (None, eos, [eos]):
            warnings.warn(f"only token {eos} ends a response, not all of {ends}", stacklevel=2)

    def hidden(self, tokens, read):
        for layer in self.body.modules():  # its parts, with dropout, stay as they are
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = True
        with self.autocast:
            hidden = self.body(tokens, use_cache=False).last_hidden_state[read]
        return hidden, hidden.to(self.value_head.weight.dtype)


def reference_of(policy):
    """A frozen copy; where there is an adapter, the same model without it."""
    if not hasattr(policy.model, "disable_adapter"):
        return frozen_copy(policy)
    off = policy.model.disable_adapter  # a context, and so a decorator
    hidden, lm_head = off()(policy.hidden), off()(policy.lm_head)
    return SimpleNamespace(hidden=hidden, lm_head=lm_head, value_head=policy.value_head)


def encode(tokenizer, prompt):
    """A text, a conversation or ids -> ids."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]  # with the token that begins a text, if there is one
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids  # T5 adds an end, too
    if isinstance(prompt[0], dict):
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    return prompt


def encode_rows(tokenizer, rows):
    """(prompt, completion, ...) -> the same as ids; a completion, a text, gets its end token."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]

    return [(encode(tokenizer, prompt), *map(ids, texts)) for prompt, *texts in rows]


def pad(rows, device):
    """B prompts and responses as ids -> tokens (B, T), mask (B, T-1)."""
    tokens = [torch.tensor(prompt + response) for prompt, response in rows]
    mask = [torch.tensor([False] * (len(a) - 1) + [True] * len(b)) for a, b in rows]
    return [torch.nn.utils.rnn.pad_sequence(x, True).to(device) for x in (tokens, mask)]


@torch.no_grad()
def sample(policy, prompts, max_new_tokens, temperature=1.0):
    """minippo.generate for a Policy: the same arguments, the same four tensors.

    Prompts are padded on the left, so that all responses begin in one column. No generation_config
    changes what is drawn. ValueError if evaluate_actions does not say the same as the model: the
    ratio would not show it.
    """
    if not all(prompts):
        raise ValueError("a prompt is empty: it needs a token, if only [tokenizer.eos_token_id]")
    eos, device = policy.eval().config.eos, policy.value_head.weight.device
    left = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    new = torch.tensor([[eos] * n + ids for n, ids in zip(left, prompts)], device=device)
    text = torch.tensor([[0] * n + [1] * len(x) for n, x in zip(left, prompts)], device=device)
    ended, lengths, nats, drawn = torch.zeros_like(text[:, 0]).bool(), 0, 0.0, []
    more = {policy.cache: transformers.DynamicCache(config=policy.body.config)}
    more |= {"use_cache": True, "logits_to_keep": 1}
    while len(drawn) < max_new_tokens and not ended.all():
        positions = (text.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        with policy.autocast:
            out = policy.model(new, attention_mask=text, position_ids=positions, **more)
        logits = out.logits[:, -1].float()
        token = draw(logits / temperature)
        nats += gather_logprobs(logits, token, temperature) * ~ended
        lengths += ~ended
        ended = ended | (token == eos)
        drawn.append(token)
        new, text = token[:, None], torch.cat([text, text[:, -1:]], 1)
    responses = zip(torch.stack(drawn, 1).tolist(), lengths.tolist())
    tokens, mask = pad([(x, ids[:n]) for x, (ids, n) in zip(prompts, responses)], device)
    logprobs, values, _ = evaluate_actions(policy, tokens, mask, temperature)
    gap = ((nats - logprobs.sum(1)) / lengths).abs().mean().item()
    if not gap < (1e-3 if out.logits.dtype.itemsize > 2 else 0.05):  # rounding is below that
        raise ValueError(
            f"log pi is {gap:.2g} nats off: the model changes logits after the head (as Gemma-2, "
            "Cohere, Granite), tunes a prompt, is wrapped (accelerate) or cannot pad on the left"
        )
    return tokens, mask, logprobs, values


# Scores: score(tokens, mask) -> (B,), as minippo wants it


def text_score(tokenizer, prompts, reward):
    """reward(prompts, responses), B of these prompts as they are and B texts, gives B numbers."""
    known = {}
    for prompt in prompts:
        if known.setdefault(tuple(encode(tokenizer, prompt)), prompt) != prompt:
            raise ValueError(f"another prompt has the same tokens as {prompt!r}")

    def score(tokens, mask):
        asked, texts = [], []
        for row, inside in zip(tokens, mask):
            asked.append(known[tuple(row[: inside.int().argmax() + 1].tolist())])
            texts.append(tokenizer.decode(row[1:][inside], skip_special_tokens=True))
        scores = torch.as_tensor(reward(asked, texts), dtype=torch.float32, device=tokens.device)
        if scores.shape != (len(texts),):
            raise ValueError(f"{len(texts)} responses need as many scores, not {scores.shape}")
        return scores

    return score


def classifier_score(classifier):
    """Of a sequence classifier with one label and the policy's vocabulary. It reads the last token
    that is not its config.pad_token_id; if that is the end token, the end is not scored."""
    pad_id = classifier.config.pad_token_id
    if classifier.config.num_labels != 1 or pad_id is None:
        raise ValueError("a classifier needs num_labels=1, and a token as config.pad_token_id")

    def score(tokens, mask):
        text = torch.arange(tokens.shape[1], device=tokens.device) < row_lengths(mask)[:, None]
        tokens = tokens.masked_fill(~text, pad_id)
        return classifier.eval()(tokens, attention_mask=text.long()).logits.squeeze(1).float()

    return score


@torch.no_grad()
def normalised(score, policy, prompts, max_new_tokens, answers=256, cap=0.99):
    """The score with mean 0 and standard deviation 1 over answers of the policy, and cut off where
    one in a hundred of them is higher."""
    asked = [encode(policy.tokenizer, x) for x in random.choices(prompts, k=answers)]
    parts = [sample(policy, asked[i : i + 32], max_new_tokens) for i in range(0, answers, 32)]
    scores = torch.cat([score(tokens, mask) for tokens, mask, _, _ in parts])
    mean, std, most = scores.mean(), scores.std().clamp(min=1e-6), scores.quantile(cap)
    return lambda tokens, mask: (score(tokens, mask).clamp(max=most) - mean) / std


# The three stages


def adam(parts, steps):
    """Adam for (module, learning rate); the rates climb in 5 steps, then they fall to 0."""
    groups = [{"params": [*module.parameters()], "lr": lr} for module, lr in parts]
    if any(p.requires_grad and p.dtype.itemsize < 4 for x in groups for p in x["params"]):
        raise ValueError("weights of 16 bits take no small steps: load with dtype=torch.float32")
    optimizer = torch.optim.Adam(groups, fused=True)
    share = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 5, 1 - i / steps))
    return optimizer, share


def sft_loss(policy, rows):
    """(prompt, completion) as ids -> the mean of -log pi over the completions' tokens."""
    tokens, mask = pad(rows, policy.model.device)
    return -masked_mean(evaluate_actions(policy, tokens, mask)[0], mask)


def rm_loss(classifier, pairs):
    """(prompt, chosen, rejected) as ids -> the Bradley-Terry loss."""
    rows = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
    scores = classifier_score(classifier)(*pad(rows, classifier.device))
    return reward_model_loss(*scores.view(-1, 2).unbind(1))[0]


def fit(model, rows, loss_of, lr, batch_size=16):
    """One pass over the rows in random order: of a Policy by sft_loss, a classifier by rm_loss."""
    batches = torch.utils.data.DataLoader(rows, batch_size, shuffle=True, collate_fn=list)
    optimizer, schedule = adam([(model, lr)], len(batches))
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        gradient_step(optimizer, 1.0)
        schedule.step()
        if step % 10 == 0:
            print(f"step {step + 1:4} of {len(batches)}  loss {loss.item():.3f}", flush=True)


def train(policy, prompts, score, config, lr, head_lr, steps=50, batch_size=64, algorithm=PPO):
    """PPO for some iterations, in place -> what minippo.batch_metrics says of each batch. The
    reference is the model as it was at the first call."""
    compute_advantages, loss, log = *algorithm, []
    if first := policy.reference is None:
        policy.reference = reference_of(policy)
    prompts = [encode(policy.tokenizer, prompt) for prompt in prompts]
    longest = max(map(len, prompts)) + config.max_new_tokens
    if longest > getattr(policy.body.config, "max_position_embeddings", longest):
        raise ValueError(f"{longest} tokens of a prompt and its response exceed the context")
    sample(Policy(policy.model, policy.tokenizer), prompts[:8], 8)  # the check, in float32
    optimizer, schedule = adam([(policy.model, lr), (policy.value_head, head_lr)], steps)
    k = getattr(config, "k", 1)  # responses to each prompt
    for step in range(steps):
        asked = [x for x in random.choices(prompts, k=batch_size // k) for _ in range(k)]
        batch = rollout(policy, policy.reference, score, asked, config, sample)
        batch |= compute_advantages(batch, config)
        log.append(batch_metrics(batch, config))
        if first and step == 0 and log[0]["kl_k3"] > 1e-3:
            raise ValueError(
                "the adapter is not new: model = model.merge_and_unload(), then add one"
            )
        ppo_update(policy, optimizer, batch, config, loss)
        schedule.step()
        if step % 5 == 0 or step + 1 == steps:
            watch = "  ".join(f"{x} {log[-1][x]:.2f}" for x in ("score", "kl", "eos_rate"))
            text = policy.tokenizer.decode(batch["tokens"][0], skip_special_tokens=True)
            print(f"iteration {step + 1}  {watch}  {text!r}", flush=True)
    return log


def main(seed=0):
    transformers.set_seed(seed)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # a token is a byte
    shape = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "eos_token_id": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))

    def reward(prompts, responses):
        return [sum("a" <= letter <= "z" for letter in text) / 2 for text in responses]

    prompts = ["A bee", "What does a zebra eat?", "Hello"]
    policy, score = Policy(model, tokenizer), text_score(tokenizer, prompts, reward)
    return train(policy, prompts, score, PPOConfig(max_new_tokens=16), lr=3e-3, head_lr=3e-2)


if __name__ == "__main__":
    main()
