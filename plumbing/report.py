"""What a report shows: responses with their numbers, an iteration of PPO, the table."""

import copy

import torch

from data.zoo import judge_of
from minippo import center_values, compute_advantages, evaluate_actions
from minippo import kl_per_response, ppo_update, set_lr
from plumbing.batches import chunks, prompt_batch, rollout_in_pieces, take
from plumbing.settings import printable
from plumbing.text import responses_of


def sample(policy, n, prompts, ref, score, tokenizer, config):
    """-> for each of P prompts a list of n responses: dicts with texts and numbers."""
    copies = [prompt for prompt in prompts for _ in range(n)]
    print(f"       sampling {len(copies):,} responses", flush=True)
    judge = judge_of(config.data)
    responses = []
    for piece in chunks(copies, config.sample_batch):
        batch = rollout_in_pieces(policy, ref, score, piece, config)
        mask = batch["mask"]
        kl = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
        for i, ids in enumerate(responses_of(batch["tokens"], mask)):
            response = {"prompt": piece[i].row["prompt"], "text": tokenizer.decode(ids)}
            if judge:
                response["judge"] = judge(response["prompt"], response["text"])
            response["score"] = batch["scores"][i].item()
            response["kl"] = kl[i].item()
            response["eos_rate"] = batch["ended"][i].item()
            response["response_length"] = len(ids)
            responses.append(response)
    return chunks(responses, n)


def numbers_of(groups):
    """P lists of M responses -> {name: (P, M)}."""
    names = [name for name in groups[0][0] if name not in ("prompt", "text")]
    rows = {name: [[response[name] for response in group] for group in groups] for name in names}
    return {name: torch.tensor(rows[name]).double() for name in names}


def distinct(groups):
    """(P,): the share of different texts among the first 16 responses to a prompt."""
    texts = [[response["text"] for response in group[:16]] for group in groups]
    return torch.tensor([len(set(group)) / len(group) for group in texts]).double()


@torch.no_grad()
def rivals(before, after, tokens, mask, config, spell):
    """For each action of a response, tokens (T,) and mask (T-1,): the three likeliest tokens before
    an update, and the action itself -> lists of (text, probability before, probability after)."""
    logits = [model(tokens[None, :-1], mask[None])[0] for model in (before, after)]
    chances = (torch.stack(logits, 2) / config.temperature).softmax(1)  # (N, V, 2)
    likely = chances[:, :, 0].topk(3).indices.tolist()
    lists = []
    for ids, action, rows in zip(likely, tokens[1:][mask].tolist(), chances):
        lists.append([(spell(i), *rows[i].tolist()) for i in dict.fromkeys([*ids, action])])
    return lists


def one_iteration(policy, prompts, ref, score, tokenizer, config):
    """An iteration of PPO, with a copy of the policy -> six of its responses, token by token."""
    policy = copy.deepcopy(policy)
    prompts = prompt_batch(prompts, 0, config)
    if not policy.value_head.weight.any():  # not trained: begin as train_ppo.py does
        center_values(policy, rollout_in_pieces(policy, ref, score, prompts, config))
    batch = rollout_in_pieces(policy, ref, score, prompts, config)
    batch |= compute_advantages(batch, config)
    after = copy.deepcopy(policy).requires_grad_()
    groups = [
        {"params": after.trunk.parameters(), "peak": config.lr},  # lm_head shares its weights
        {"params": after.value_head.parameters(), "peak": config.value_lr},
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    set_lr(optimizer, 0, config.steps, config.warmup)
    ppo_update(after, optimizer, batch, config)

    by_score = batch["scores"].argsort(descending=True).tolist()
    shown = take(by_score, min(6, len(by_score)))
    batch = {name: tensor[shown] for name, tensor in batch.items()}
    tokens, mask = batch["tokens"], batch["mask"]
    with torch.no_grad():
        batch["logprobs"], _ = evaluate_actions(after, tokens, mask, config.temperature)
    batch["d"] = batch["old_logprobs"] - batch["ref_logprobs"]
    batch["ratio"] = (batch["logprobs"] - batch["old_logprobs"]).exp()

    def spell(token):
        return printable(tokenizer.spell(token), keep="")

    responses = []
    for i, prompt in enumerate(prompts[place] for place in shown):
        response = {
            "prompt": prompt.row["prompt"],
            "score": batch["scores"][i].item(),
            "tokens": [spell(token) for token in tokens[i, 1:][mask[i]].tolist()],
            "rivals": rivals(policy, after, tokens[i], mask[i], config, spell),
        }
        for name, numbers in batch.items():
            if numbers.shape == mask.shape:
                response[name] = numbers[i][mask[i]].tolist()
        responses.append(response)
    return responses


def report_text(report):
    """The table, and the responses furthest from the reference."""
    rows = {"SFT": report["sft"]}
    rows |= {f"best of {n}": row for n, row in report["best_of_n"].items()}
    rows |= {"policy": report["policy"], "policy, unseen": report["unseen"]}
    names = [name for name in report["policy"] if not name.endswith("_se")]
    lines = ["".join(name.rjust(16) for name in ["", *names])]
    for label, row in rows.items():
        line = label.ljust(16)
        for name in names:
            digits = 3 if name == "optimality" else 2
            error = f" ± {row[f'{name}_se']:.{digits}f}" if f"{name}_se" in row else ""
            cell = f"{row[name]:z.{digits}f}{error}" if name in row else "-"
            line += cell.rjust(16)
        lines.append(line)
    lines.append("optimality: 0 is the SFT model, 1 about the best possible policy")
    lines.append("the policy's responses with the highest KL (read them: is it reward hacking?)")
    for row in report["furthest"]:
        texts = f"{row['prompt'][:200].strip()} -> {row['text'][:200].strip()}"
        lines.append(f"    {printable(texts)}   (score {row['score']:.2f}, KL {row['kl']:.2f})")
    return "\n".join(lines)
