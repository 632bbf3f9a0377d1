"""GPT-2 small's shape on a GPU: PPO iterations, beside transformers and the rate of matrix
products.

    python -m bench.gpu        needs a CUDA GPU and transformers; writes bench/results.json
    python -m bench.gpu --try  a tiny model on whatever there is, to see that it works

Random weights, 64 and 256 prompts of 16 to 64 tokens, 64 new tokens each, 4 epochs x 4 minibatches,
bfloat16 for the matrix products, with the second scoring that train_ppo.py does then.
"""

import statistics

import torch
import torch.nn.functional as F

from bench import parser
from bench.speed import Workload, operations, seconds_of
from bench.tables import keep
from plumbing.errors import UserError, run_script
from plumbing.settings import RunConfig, prepare
from plumbing.training import adamw

GPT2 = {"vocab_size": 50257, "context": 1024, "layers": 12, "heads": 12, "channels": 768}
GPT2 |= {"prompt": (16, 64), "new": 64}
TINY = {"vocab_size": 300, "context": 128, "layers": 2, "heads": 2, "channels": 32}
TINY |= {"prompt": (2, 8), "new": 8}


def matrix_rate(device, size):
    """Floating-point operations a second of a large bfloat16 product."""
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds_of(lambda: a @ b, 20)


def ours(work):
    """Medians of three iterations, in seconds; operations of the update; the most memory, in GB."""
    work.iteration()
    runs = [work.iteration() for _ in range(3)]
    row = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
    if torch.cuda.is_available():
        row["memory"] = torch.cuda.max_memory_allocated() / 1e9
    return row | {"operations": operations(work.products()["update"])}


def theirs(size, work, device):
    """The same sampling by transformers' generate(), and as many training steps of its model on the
    same tokens, in seconds. Its vocabulary head is in bfloat16 and sees all positions; minippo's is
    in TF32 and sees the responses."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": "layers", "n_head": "heads", "n_embd": "channels"}
    shape |= {"n_positions": "context", "vocab_size": "vocab_size"}
    shape = {name: size[key] for name, key in shape.items()}
    shape |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = GPT2Config(bos_token_id=0, eos_token_id=None, **shape)
    model = GPT2LMHeadModel(config).to(device).eval()
    width = max(map(len, work.prompts))
    padding = [[0] * (width - len(prompt)) for prompt in work.prompts]  # on the left
    prompts = torch.tensor([a + b for a, b in zip(padding, work.prompts)], device=device)
    lengths = torch.tensor([*map(len, work.prompts)], device=device)
    inside = torch.arange(width, device=device) >= width - lengths[:, None]
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16)
    settings = {"do_sample": True, "top_k": 0, "attention_mask": inside.long()}
    settings |= {"max_new_tokens": size["new"], "min_new_tokens": size["new"]}
    with autocast, torch.no_grad():
        sampling = seconds_of(lambda: model.generate(prompts, **settings), 3)
    optimizer, tokens, mask = adamw(model, 1e-6), work.batch["tokens"], work.batch["mask"]

    def steps():
        for _ in range(work.config.epochs):
            parts = work.config.minibatches
            for rows, read in zip(tokens.chunk(parts), mask.chunk(parts)):
                with autocast:
                    logits = model(rows[:, :-1]).logits[read]
                    loss = F.cross_entropy(logits.float(), rows[:, 1:][read])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return {"generate": sampling, "training": seconds_of(steps, 3)}


def main():
    flags = parser(__doc__)
    flags.add_argument("--try", dest="tiny", action="store_true")
    tiny = flags.parse_args().tiny
    if not (tiny or torch.cuda.is_available()):
        raise UserError("no CUDA GPU; --try runs a tiny model on the CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prepare(RunConfig(device=device, dtype="bfloat16"))
    size, rate = TINY if tiny else GPT2, matrix_rate(device, 512 if tiny else 8192)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}: {rate / 1e12:.1f} T operations/s in a large bfloat16 product")
    result = {"device": {"name": name, "rate": rate}}
    for batch in (64, 256):
        work = Workload(size | {"batch": batch}, device, recompute_logprobs=True)
        row = ours(work)
        share = row["operations"] / row["update"] / rate
        row |= theirs(size, work, device)
        result[f"{batch} prompts"] = row
        print(f"{batch} prompts, {share:.0%} of that rate in the update: {row}", flush=True)
    if not tiny:
        keep({"gpu": result})


if __name__ == "__main__":
    run_script(main)
