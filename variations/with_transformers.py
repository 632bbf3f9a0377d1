"""PPO on a GPT-2 of Hugging Face transformers: a file to copy beside minippo.py, and to change.

    python -m variations.with_transformers    a copy: python with_transformers.py

As it stands, a tiny model with random weights learns to write lower-case letters in half a minute.
In main(), put your own in place of

    gpt2         GPT2LMHeadModel.from_pretrained("gpt2").to("cuda"); its weights stay in float32
    tokenizer    AutoTokenizer.from_pretrained("gpt2")
    prompts      texts; a prompt and max_new_tokens together must fit into the context
    score        text_score(a function of prompts and responses), or classifier_score(a classifier)

and give train() smaller learning rates: lr 3e-6 and head_lr (of the value head) 1e-4 may do for a
GPT-2. If memory is short, lower micro_batch for the update, and batch_size for sampling too;
bfloat16=True helps both.

Scores with a spread of about 1 suit kl_coef 0.1. For a given KL instead of a given price, change
kl_coef by minippo.adapt_kl_coef after each iteration. Do not wrap the policy for several GPUs:
evaluate_actions calls hidden(), past the wrapper's forward(), so gradients would not be shared.
"""

import random
import warnings
from types import SimpleNamespace

import torch
import transformers

from minippo import (
    PPOConfig,
    batch_metrics,
    compute_advantages,
    evaluate_actions,
    frozen_copy,
    gather_logprobs,
    gradient_step,
    ppo_loss,
    response_mask,
    rollout,
    row_lengths,
)


class Policy(torch.nn.Module):
    """A GPT-2 with what evaluate_actions asks for: lm_head, value_head and hidden()."""

    def __init__(self, gpt2, eos):
        super().__init__()
        self.gpt2, self.lm_head = gpt2, gpt2.lm_head
        self.value_head = torch.nn.Linear(gpt2.config.n_embd, 1)
        torch.nn.init.zeros_(self.value_head.weight)  # all values start at 0
        torch.nn.init.zeros_(self.value_head.bias)
        self.config = SimpleNamespace(eos=eos)

    def hidden(self, tokens):
        hidden = self.gpt2.transformer(tokens).last_hidden_state
        return hidden, hidden


@torch.no_grad()
def sample(policy, prompts, max_new_tokens, temperature=1.0):
    """minippo.generate by transformers: the same arguments, the same four tensors.

    ValueError if generate() drew from another distribution than the one that is trained. (Nothing
    else would show it: the old log-probabilities are computed afresh, so the ratio starts at 1
    whatever was sampled.)
    """
    if not all(prompts):
        raise ValueError("a prompt is empty: it needs a token, if only the end token")
    eos, device = policy.config.eos, policy.lm_head.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(lengths.max())
    left = [[eos] * (width - len(prompt)) + prompt for prompt in prompts]  # as generate() wants it
    out = policy.gpt2.generate(
        torch.tensor(left, device=device),
        attention_mask=torch.arange(width, device=device) >= width - lengths[:, None],
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=eos,
        do_sample=True,
        temperature=temperature,
        top_k=0,  # by default it is 50
        top_p=1.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    responses = out.sequences[:, width:]
    ended = responses == eos  # the first end token belongs to the response
    new = torch.where(ended.any(1), ended.int().argmax(1) + 1, responses.shape[1])
    rows = [row[width - n :] for row, n in zip(out.sequences, lengths.tolist())]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=eos)
    mask = response_mask(lengths, lengths + new, tokens.shape[1])
    logprobs, values, _ = evaluate_actions(policy, tokens, mask, temperature, with_entropy=False)

    # out.scores are the logits that the tokens were drawn by: (B, V) for each new token
    drawn = [gather_logprobs(*step) for step in zip(out.scores, responses.T)]
    inside = torch.arange(responses.shape[1], device=device) < new[:, None]
    gap = (torch.stack(drawn, 1)[inside] - logprobs[mask]).abs().mean().item()
    if gap > (0.05 if torch.is_autocast_enabled(device.type) else 1e-3):  # rounding is below that
        settings = policy.gpt2.generation_config.to_diff_dict()
        raise ValueError(
            f"log pi of a sampled token is {gap:.2g} nats off on average: take out what changes the "
            f"distribution (min_p, typical_p, repetition_penalty, ..., dropout); here {settings}"
        )
    return tokens, mask, logprobs, values


def text_score(tokenizer, reward):
    """reward(prompts, responses), B texts each -> B numbers; as minippo wants it: score(tokens,
    mask) -> (B,)."""

    def score(tokens, mask):
        first = mask.int().argmax(1) + 1  # the column where the response begins
        rows = zip(tokens.tolist(), first.tolist(), row_lengths(mask).tolist())
        rows = [(ids[:start], ids[start:end]) for ids, start, end in rows]
        prompts, responses = (
            [tokenizer.decode(ids, skip_special_tokens=True) for ids in part] for part in zip(*rows)
        )
        return torch.tensor(reward(prompts, responses), device=tokens.device).float()

    return score


def classifier_score(classifier):
    """The same for a GPT2ForSequenceClassification that has the policy's vocabulary, one label and
    a pad_token_id. It reads the score at the last token that is not pad_token_id.
    """
    classifier = frozen_copy(classifier)

    def score(tokens, mask):
        padding = torch.arange(tokens.shape[1], device=tokens.device) >= row_lengths(mask)[:, None]
        tokens = tokens.masked_fill(padding, classifier.config.pad_token_id)
        return classifier(tokens, attention_mask=~padding).logits.squeeze(1).float()

    return score


def update(policy, optimizer, batch, config, micro_batch, autocast):
    """minippo.ppo_update with at most micro_batch rows in memory. The loss of a piece is a mean
    over its tokens, so it counts by their number."""
    mask = batch["mask"]
    for _ in range(config.epochs):
        for rows in torch.randperm(len(mask)).tensor_split(min(config.minibatches, len(mask))):
            optimizer.zero_grad()
            for piece in rows.split(micro_batch):
                part = {name: x[piece] for name, x in batch.items()}
                with autocast:  # anew: it caches weights in 16 bits, and each step changes them
                    loss, stats = ppo_loss(policy, part, config)
                (loss * stats["count"] / mask[rows].sum()).backward()
            gradient_step(optimizer, config.max_grad_norm)


def train(
    gpt2,
    tokenizer,
    prompts,
    score,
    config,
    steps=50,
    batch_size=64,
    micro_batch=64,
    lr=3e-3,
    head_lr=3e-2,
    bfloat16=False,
):
    """PPO for some iterations, in place -> what minippo.batch_metrics says of each batch."""
    device = gpt2.device
    policy = Policy(gpt2, tokenizer.eos_token_id).to(device).eval()  # for good: no dropout
    ref = frozen_copy(policy)
    head = {"params": policy.value_head.parameters(), "lr": head_lr}
    optimizer = torch.optim.Adam([{"params": gpt2.parameters()}, head], lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
    prompts, log = tokenizer(prompts, add_special_tokens=False)["input_ids"], []
    for step in range(steps):
        with autocast:
            some_prompts = random.choices(prompts, k=batch_size)
            batch = rollout(policy, ref, score, some_prompts, config, sample)
        spread = batch["scores"].std().item()
        if step == 0 and not 0.3 < spread < 3:
            warnings.warn(
                f"the scores have a spread of {spread:.2g}; about 1 suits kl_coef 0.1", stacklevel=2
            )
        batch |= compute_advantages(batch, config, config.kl_coef)
        update(policy, optimizer, batch, config, micro_batch, autocast)
        schedule.step()
        log.append(batch_metrics(batch, config.kl_coef))
        if step % 10 == 0 or step + 1 == steps:
            watch = "  ".join(f"{name} {log[-1][name]:6.2f}" for name in ("score", "kl", "entropy"))
            text = tokenizer.decode(batch["tokens"][0], skip_special_tokens=True)
            print(f"iteration {step + 1:3}  {watch}  {text!r}")
    return log


def main():
    torch.manual_seed(0), random.seed(0)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # a token is a byte
    eos = tokenizer.eos_token_id
    shape = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 64, "n_layer": 2}
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, n_head=2, bos_token_id=eos, eos_token_id=eos)
    )

    def reward(prompts, responses):
        return [sum("a" <= letter <= "z" for letter in text) / 2 for text in responses]

    prompts = ["A bee", "What does a zebra eat?", "Hello"]
    train(gpt2, tokenizer, prompts, text_score(tokenizer, reward), PPOConfig(max_new_tokens=16))


if __name__ == "__main__":
    main()
