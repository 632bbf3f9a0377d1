"""What the stages need of memory for GPT-2 small, medium, large and XL: computed, and measured for the small one.

    python -m bench.memory                  prints the table of RESULTS.md
    python -m bench.memory --measure        also runs the three scripts on a GPT-2 small with random weights on the CPU, four rows
                                            of 128 tokens in memory at once, and writes it into bench/results.json
    python -m bench.memory --measure_long   the same with one row of 900 tokens, and a small report (some minutes)

The measurements need the package transformers.
"""

import argparse
import itertools
import json
import os
import string
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from minippo import GPT, GPTConfig
from plumbing.checkpoints import save_checkpoint
from plumbing.text import Tokenizer

ROOT = Path(__file__).parents[1]
SHAPES = {"GPT-2": (12, 12, 768), "GPT-2 medium": (24, 16, 1024), "GPT-2 large": (36, 20, 1280), "GPT-2 XL": (48, 25, 1600)}
CONTEXT, VOCABULARY = 1024, 50257
ROWS, PROMPT, NEW = 4, 64, 64  # rows in memory at once in a gradient step, tokens of each prompt and of each response
GB = 1e9


def parameters(layers, channels):
    """Trunk and value head; each block has 12 C^2 weights and 13 C biases and norms."""
    return (VOCABULARY + CONTEXT + 3) * channels + 1 + layers * (12 * channels**2 + 13 * channels)


def needed(layers, channels, rows=ROWS, prompt=PROMPT, new=NEW, stage="ppo", grad_checkpoint=False):
    """Bytes of each kind in a gradient step of a stage ("sft", "rm" or "ppo"), all models in fp32. rows: in memory at once, of
    `prompt` and `new` tokens; for "rm" they are pairs, whose prompts are computed once."""
    size, answers = 4 * parameters(layers, channels), rows * (2 if stage == "rm" else 1)
    tokens = rows * prompt + answers * new
    # What a block keeps for its backward pass, in units of C numbers a token: what the two norms read (2) and give (2), q, k and v
    # (3), what attention gives, before and after its heads are put side by side (2), the MLP before and after GELU (8).
    block = 4 * tokens * 17 * channels
    kept = layers * 4 * tokens * channels + block if grad_checkpoint else layers * block
    parts = {
        "policy and critic": 4 * size,  # weights, gradient, and Adam's two moments; the critic is a head
        "reference": size * (stage == "ppo"),
        "reward model": size * (stage == "ppo"),
        "SFT model": size * (stage == "rm"),  # beside the reward model in training, which has the first row
        # Beside the gradient that earlier pieces have left: that of this piece from the head, that from the input, and their sum.
        "tied embedding": 4 * VOCABULARY * channels * (1 if stage == "rm" else 3),
        "activations": kept,
        "logits": 3 * 4 * rows * new * VOCABULARY * (stage != "rm"),  # log-softmax, its gradient, and that of the logits
    }
    return {name: x for name, x in parts.items() if x}


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


def write_folder(folder, prompt=PROMPT, new=NEW, asked=PROMPT):
    """A GPT-2 small with random weights in the Hugging Face format, a made-up vocabulary of its size, and pairs. The prompts of the
    report have `asked` tokens."""
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
    text = "".join(f" {string.ascii_letters[i * i % 52]}" for i in range(prompt + 4 * new))  # a word is a token
    chosen, rejected = (text[2 * i : 2 * i + 2 * (new - 1)] for i in (prompt, prompt + new))  # the end token is one more
    for split in ("train", "val"):
        rows = [{"prompt": text[2 * i : 2 * prompt], "chosen": chosen, "rejected": rejected} for i in range(8)]
        (folder / f"pref_{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for split, length in (("train", prompt), ("val", asked)):
        rows = [{"prompt": text[2 * i : 2 * length]} for i in range(8)]
        (folder / f"prompts_{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def run_python(code):
    """Not in this process, which is to stay small."""
    subprocess.run([sys.executable, "-c", f"from bench.memory import *; {code}"], cwd=ROOT, check=True)


def peak_of(script, *flags):
    """Run a script; the largest resident memory of its process, in bytes."""
    process = subprocess.Popen([sys.executable, script, *map(str, flags)], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{script} failed"
    return 1024 * usage.ru_maxrss


def measure(rows, prompt, new, asked, *report):
    """The three scripts on the CPU, a few steps of each with its validation -> {stage: peak memory of its process, in bytes}."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        run_python(f"write_folder(Path({str(folder)!r}), {prompt}, {new}, {asked})")
        common = ["--data", folder, "--out", folder / "out", "--device", "cpu", "--batch_size", max(2, rows), "--lr", 1e-6]
        fit, small = ["--max_steps", 2, "--micro_batch", rows], ["--micro_batch", rows, "--rollout_batch", max(2, rows)]
        ppo = ["--steps", 2, "--minibatches", 1, "--max_new_tokens", new, *small, *report]
        return {
            "sft": peak_of("train_sft.py", *common, *fit, "--init", folder / "gpt2"),
            "rm": peak_of("train_rm.py", *common, *fit, "--answers", 8, "--max_new_tokens", new),
            "ppo": peak_of("train_ppo.py", *common, *ppo),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--measure_long", action="store_true")
    args = parser.parse_args()
    base = own_memory()
    result = {"rows": rows_of_table(base), "base": base}
    for row in result["rows"]:
        print(f"{row['model']:<14}" + "".join(f"  {name} {x / GB:.2f}" for name, x in row.items() if name != "model"))
    layers, _, channels = SHAPES["GPT-2"]
    measured = {}
    if args.measure:
        measured["short"] = (ROWS, PROMPT, NEW, PROMPT, "--no_report")
    if args.measure_long:
        measured["long"] = (1, 884, 16, 100, "--report_prompts", 1)
    for name, (rows, prompt, new, *rest) in measured.items():
        peaks = measure(rows, prompt, new, *rest)
        for stage, peak in peaks.items():
            predicted = base + sum(needed(layers, channels, rows, prompt, new, stage).values())
            print(f"{name} rows, {stage}: measured {peak / GB:.2f} GB, predicted {predicted / GB:.2f}: {peak / predicted - 1:+.1%}")
            result.setdefault(f"measured_{name}", {})[stage] = {"peak": peak, "predicted": predicted}
    if measured:
        path = ROOT / "bench" / "results.json"
        results = json.loads(path.read_text())
        path.write_text(json.dumps(results | {"memory": results["memory"] | result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
