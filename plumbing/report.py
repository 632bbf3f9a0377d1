"""Responses with their numbers, and the table that evaluate.py prints."""

import torch

from data.zoo import judge_of
from minippo import kl_per_response
from plumbing.batches import chunks, rollout_in_pieces
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


def report_text(report):
    """The table, and responses to be wary of."""
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
    suspects = report["suspects"]
    lines.append(
        "optimality: 0 is the SFT model, 1 about the best possible policy\n"
        f"reward hacking? {suspects['count']:,} responses have a high KL and a score above all of "
        f"the SFT model, on the {suspects['prompts']:,} prompts where these are below the cap"
    )
    for row in suspects["examples"]:
        texts = f"{row['prompt'][:200].strip()} -> {row['text'][:200].strip()}"
        lines.append(f"    {printable(texts)}   (score {row['score']:.2f}, KL {row['kl']:.2f})")
    return "\n".join(lines)
