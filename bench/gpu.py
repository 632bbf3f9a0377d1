"""GPT-2 small's shape on a GPU: PPO iterations, beside transformers on the same GPU and the rate of its matrix products.

    python -m bench.gpu        needs a CUDA GPU and transformers; prints, and writes bench/results.json
    python -m bench.gpu --try  a tiny model on whatever there is, to see that it works; writes nothing

Random weights, 64 and 256 prompts of 64 tokens, 64 new tokens each, 4 epochs x 4 minibatches, bfloat16 for the matrix products.
"""

import argparse
import json

import torch
import torch.nn.functional as F

from bench.speed import GPT2, ROOT, Workload, seconds_of
from plumbing.settings import RunConfig, UserError, prepare, run_script
from plumbing.training import adamw

TINY = {"layers": 2, "heads": 2, "channels": 32, "vocab_size": 300, "context": 128, "prompt": (8, 8), "new": 8}


def matrix_rate(device, size):
    """Floating-point operations a second of a large bfloat16 product."""
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds_of(lambda: a @ b, 20)


def iteration(work):
    """Medians of three iterations, in seconds; the operations of the update; the most memory held, in GB."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    work.iteration()
    runs = [work.iteration() for _ in range(3)]
    operations = sum(2 * t * b * m * k * n for t, b, m, k, n in work.products()["update"])
    memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    return {phase: sorted(run[phase] for run in runs)[1] for phase in runs[0]} | {"operations": operations, "memory": memory}


def transformers_model(size, device):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": size["layers"], "n_head": size["heads"], "n_embd": size["channels"], "n_positions": size["context"]}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(vocab_size=size["vocab_size"], bos_token_id=0, eos_token_id=None, **shape, **no_dropout)
    return GPT2LMHeadModel(config).to(device).eval()


def others(size, work, device):
    """The same sampling by transformers' generate(), and as many plain training steps of its model on the same tokens.

    Its vocabulary head is in bfloat16 and sees all positions; minippo's is in TF32 and sees the responses.
    """
    model = transformers_model(size, device)
    prompts = torch.tensor(work.prompts, device=device)
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": size["new"], "min_new_tokens": size["new"]}
    with autocast, torch.no_grad():
        sampling = seconds_of(lambda: model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings), 3)
    optimizer, tokens = adamw(model, 1e-6), work.batch["tokens"]

    def steps():
        for _ in range(work.config.epochs):
            for rows in tokens.chunk(work.config.minibatches):
                with autocast:
                    logits = model(rows[:, :-1]).logits[:, work.batch["mask"].int().argmax(1)[0] :]
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, -logits.shape[1] :].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return {"generate": sampling, "training": seconds_of(steps, 3)}


def measure(size, device):
    """All figures of one batch size."""
    work = Workload("gpt2", size.items(), device)
    return {"eager": iteration(work), "transformers": others(size, work, device)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="tiny", action="store_true")
    tiny = parser.parse_args().tiny
    if not (tiny or torch.cuda.is_available()):
        raise UserError("no CUDA GPU; --try runs a tiny model on the CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prepare(RunConfig(device=device, dtype="bfloat16"))
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UserError("bench.gpu compares with transformers: pip install transformers") from None
    size, path = TINY if tiny else GPT2, ROOT / "bench" / "results.json"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    result = {"name": name, "rate": matrix_rate(device, 512 if tiny else 8192), "batches": {}}
    print(f"{name}: {result['rate'] / 1e12:.1f} T operations/s in a large bfloat16 product")
    for batch in (64, 256):
        row = result["batches"][batch] = measure(size | {"batch": batch}, device)
        eager = row["eager"]
        share = eager["operations"] / eager["update"] / result["rate"]
        phases = ", ".join(f"{phase} {eager[phase]:.3f} s" for phase in ("rollout", "scoring", "update"))
        print(f"{batch} prompts, eager: {phases}; the update at {100 * share:.0f} % of the rate of products")
        theirs = row["transformers"]
        print(f"    transformers: generate() {theirs['generate']:.3f} s, training {theirs['training']:.3f} s", flush=True)
        if not tiny:
            path.write_text(json.dumps(json.loads(path.read_text()) | {"gpu": result}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
