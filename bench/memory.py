"""What PPO needs of memory for GPT-2 small, medium, large and XL: computed, and measured for one of them.

    python -m bench.memory              prints the table of the README
    python -m bench.memory --measure    also runs three PPO iterations of a GPT-2 small with random weights on the CPU, through
                                        the scripts, and writes both into bench/results.json (needs transformers)
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from minippo import GPT, GPTConfig, RewardModel
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.text import Tokenizer

ROOT = Path(__file__).parents[1]
SHAPES = {"GPT-2": (12, 12, 768), "GPT-2 medium": (24, 16, 1024), "GPT-2 large": (36, 20, 1280), "GPT-2 XL": (48, 25, 1600)}
CONTEXT, VOCABULARY = 1024, 50257
ROWS, PROMPT, NEW = 4, 64, 64  # rows in memory at once in a gradient step, tokens of each prompt and of each response
GB = 1e9


def parameters(layers, channels):
    """Trunk and value head; each block has 12 C^2 weights and 13 C biases and norms."""
    return (VOCABULARY + CONTEXT + 3) * channels + 1 + layers * (12 * channels**2 + 13 * channels)


def needed(layers, channels, rows=ROWS, grad_checkpoint=False):
    """Bytes of each kind in a gradient step of PPO, all four models in fp32."""
    size, tokens = 4 * parameters(layers, channels), rows * (PROMPT + NEW)
    # What a block keeps for its backward pass, in units of C numbers a token: what the two norms read (2) and give (2), q, k and v
    # (3), what attention gives, before and after its heads are put side by side (2), the MLP before and after GELU (8).
    block = 4 * tokens * 17 * channels
    kept = layers * 4 * tokens * channels + block if grad_checkpoint else layers * block
    return {
        "policy and critic": 4 * size,  # weights, gradient, and Adam's two moments; the critic is a head
        "reference": size,
        "reward model": size,
        "tied embedding": 4 * VOCABULARY * channels,  # its gradient arrives twice, from the head and from the input
        "activations": kept,
        "logits": 3 * 4 * rows * NEW * VOCABULARY,  # of the response tokens: log-softmax, its gradient, and that of the logits
    }


def own_memory():
    """Bytes that Python and PyTorch take before there is any model."""
    code = "import train_ppo, resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    return 1024 * int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))


def rows_of_table(base):
    rows = []
    for name, (layers, _, channels) in SHAPES.items():
        parts, less = needed(layers, channels), needed(layers, channels, grad_checkpoint=True)
        four_models = sum(parts[part] for part in ("policy and critic", "reference", "reward model"))
        row = {"model": name, "parameters": parameters(layers, channels), "four_models": four_models}
        row |= {part: parts[part] for part in ("activations", "logits")}
        rows.append(row | {"total": base + sum(parts.values()), "total_checkpointed": base + sum(less.values())})
    return rows


def write_folder(folder):
    """A GPT-2 small with random weights in the Hugging Face format, and a made-up vocabulary of its size."""
    from plumbing import hf

    single = [bytes([b]) for b in range(256)]
    pairs = (a + b for a, b in itertools.product(single, single))
    tokenizer = Tokenizer([*single, *itertools.islice(pairs, VOCABULARY - 1 - 256)])
    layers, heads, channels = SHAPES["GPT-2"]
    model = GPT(GPTConfig(VOCABULARY, CONTEXT, layers, heads, channels))
    save_checkpoint(folder / "random.pt", "sft", model, tokenizer)
    with torch.no_grad():
        hf.export(folder / "random.pt", folder / "gpt2")
    (folder / "random.pt").unlink()
    text = "".join(chr(33 + i % 90) + chr(33 + i // 90) for i in range(2 * max(PROMPT, NEW)))  # one pair is one token
    rows = [text[2 * i : 2 * i + 2 * PROMPT] for i in range(8)]
    for split in ("train", "val"):
        lines = [json.dumps({"prompt": row, "chosen": row[:20], "rejected": row[20:40]}) for row in rows]
        (folder / f"pref_{split}.jsonl").write_text("\n".join(lines))


def write_reward_model(folder):
    sft, tokenizer, _ = load_checkpoint(folder / "sft.pt", ["sft"])
    save_checkpoint(folder / "rm.pt", "rm", RewardModel(sft), tokenizer)


def run_python(code):
    """Not in this process, which is to stay small."""
    subprocess.run([sys.executable, "-c", f"from bench.memory import *; {code}"], cwd=ROOT, check=True)


def peak_of(script, *flags):
    """Run a script; the largest resident memory of its process, in bytes."""
    process = subprocess.Popen([sys.executable, script, *map(str, flags)], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{script} failed"
    return 1024 * usage.ru_maxrss


def measure():
    """Three PPO iterations of four responses on the CPU, by the scripts -> peak memory of train_ppo.py, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        run_python(f"write_folder(Path({str(folder)!r}))")
        common = ["--data", folder, "--out", folder / "out", "--device", "cpu"]
        peak_of("train_sft.py", *common, "--init", folder / "gpt2", "--batch_size", ROWS, "--lr", 1e-6)
        run_python(f"write_reward_model(Path({str(folder / 'out')!r}))")  # train_rm.py samples 2,048 answers first: too long here
        ppo = ["--steps", 3, "--batch_size", ROWS, "--minibatches", 1, "--max_new_tokens", NEW, "--lr", 1e-6, "--no_report"]
        return peak_of("train_ppo.py", *common, *ppo)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    args = parser.parse_args()
    base = own_memory()
    result = {"rows": rows_of_table(base), "base": base}
    for row in result["rows"]:
        print(f"{row['model']:<14}" + "".join(f"  {name} {x / GB:.2f}" for name, x in row.items() if name != "model"))
    if args.measure:
        predicted, measured = result["rows"][0]["total"], measure()
        result["measured"] = measured
        print(f"measured {measured / GB:.2f} GB, predicted {predicted / GB:.2f} GB: {measured / predicted - 1:+.1%}")
        path = ROOT / "bench" / "results.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"memory": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
