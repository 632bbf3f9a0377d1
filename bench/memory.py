"""What the stages need of memory for GPT-2 small, medium, large and XL: computed, and measured.

    python -m bench.memory              prints the table of RESULTS.md
    python -m bench.memory --measure    some minutes; writes bench/results.json

--measure runs the three scripts on the CPU, on a GPT-2 small with random weights: four rows of 128
tokens in memory at once, and one of 900. It needs the package transformers.
"""

import itertools
import json
import os
import string
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench import parser
from bench.tables import ROOT, keep, load, tables
from minippo import GPT, GPTConfig
from plumbing.checkpoints import save_checkpoint
from plumbing.tokenizer import Tokenizer

# layers, heads, channels
SHAPES = {"GPT-2": (12, 12, 768), "GPT-2 medium": (24, 16, 1024)}
SHAPES |= {"GPT-2 large": (36, 20, 1280), "GPT-2 XL": (48, 25, 1600)}
CONTEXT, VOCABULARY = 1024, 50257
ROWS, PROMPT, NEW = 4, 64, 64  # rows in memory at once, tokens of each prompt and of each response
CASES = {
    f"{ROWS} rows of {PROMPT} + {NEW} tokens": (ROWS, PROMPT, NEW, "--no_report"),
    "1 row of 884 + 16 tokens": (1, 884, 16, "--report_prompts", 1),
}


def parameters(layers, channels):
    """Trunk and value head; each block has 12 C^2 weights and 13 C biases and norms."""
    blocks = layers * (12 * channels**2 + 13 * channels)
    return (VOCABULARY + CONTEXT + 3) * channels + 1 + blocks


def needed(layers, channels, rows=ROWS, prompt=PROMPT, new=NEW, stage="ppo", grad_checkpoint=False):
    """Bytes of each kind in a gradient step of a stage ("sft", "rm" or "ppo"), all models in fp32.
    rows: in memory at once, of `prompt` and `new` tokens; for "rm" they are pairs, whose prompts
    are computed once."""
    size, answers = 4 * parameters(layers, channels), rows * (2 if stage == "rm" else 1)
    tokens = rows * prompt + answers * new
    # What a block keeps for its backward pass, in units of C numbers a token: what the two norms
    # read (2) and give (2), q, k and v (3), what attention gives, before and after its heads are
    # put side by side (2), the MLP before and after GELU (8).
    block = 4 * tokens * 17 * channels
    kept = layers * 4 * tokens * channels + block if grad_checkpoint else layers * block
    return {
        "policy and critic": 4
        * size,  # weights, gradient, Adam's two moments; the critic is a head
        "reference": size * (stage == "ppo"),
        "reward model": size * (stage == "ppo"),
        "SFT model": size * (stage == "rm"),  # beside the reward model in training
        # Beside the gradient that earlier pieces have left: that of this piece from the head, that
        # from the input, and their sum.
        "tied embedding": 4 * VOCABULARY * channels * (1 if stage == "rm" else 3),
        "activations": kept,
        # log-softmax, its gradient, and that of the logits
        "logits": 3 * 4 * rows * new * VOCABULARY * (stage != "rm"),
    }


def empty_process():
    """Bytes that Python and PyTorch take before there is any model."""
    code = "import train_ppo, resource as r; print(r.getrusage(r.RUSAGE_SELF).ru_maxrss)"
    return 1024 * int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))


def computed(base, layers, channels):
    parts = needed(layers, channels)
    total, less = (
        base + sum(needed(layers, channels, grad_checkpoint=x).values()) for x in (False, True)
    )
    models = sum(parts[name] for name in ("policy and critic", "reference", "reward model"))
    row = {"parameters": parameters(layers, channels), "four_models": models}
    return row | {"total": total, "total_checkpointed": less}


def write_folder(folder, prompt, new):
    """A GPT-2 small with random weights in the Hugging Face format, a made-up vocabulary of its
    size, pairs, and prompts."""
    from plumbing import hf

    folder = Path(folder)

    single = [bytes([b]) for b in range(256)]
    double = (a + b for a, b in itertools.product(single, single))
    tokenizer = Tokenizer([*single, *itertools.islice(double, VOCABULARY - 1 - 256)])
    model = GPT(GPTConfig(VOCABULARY, CONTEXT, *SHAPES["GPT-2"]))
    save_checkpoint(folder / "random.pt", "sft", model, tokenizer)
    with torch.no_grad():
        hf.export(folder / "random.pt", folder / "gpt2")
    (folder / "random.pt").unlink()
    letters, count = string.ascii_letters, prompt + 4 * new
    words = [f" {letters[i * i % 52]}" for i in range(count)]  # each is a token

    def text(start, stop):
        return "".join(words[start:stop])

    for split in ("train", "val"):
        ends = {"chosen": prompt, "rejected": prompt + new}
        answers = {name: text(i, i + new - 1) for name, i in ends.items()}  # and the end token
        rows = [json.dumps({"prompt": text(i, prompt)} | answers) for i in range(8)]
        (folder / f"pref_{split}.jsonl").write_text("\n".join(rows))
        length = prompt if split == "train" else min(prompt, 100)  # those of the report are short
        rows = [json.dumps({"prompt": text(i, length)}) for i in range(8)]
        (folder / f"prompts_{split}.jsonl").write_text("\n".join(rows))


def peak_of(script, *flags):
    """Run a script; the largest resident memory of its process, in bytes."""
    process = subprocess.Popen([sys.executable, script, *map(str, flags)], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{script} failed"
    return 1024 * usage.ru_maxrss


def measure(rows, prompt, new, *report):
    """The three scripts on the CPU, a few steps of each with its validation -> {stage: peak memory
    of its process, in bytes}."""
    with tempfile.TemporaryDirectory() as folder:
        # In another process: this one, from which the scripts start, stays small.
        code = f"import bench.memory; bench.memory.write_folder({folder!r}, {prompt}, {new})"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        batch = max(2, rows)
        common = f"--data {folder} --out {folder}/out --device cpu --lr 1e-6"
        common = [*common.split(), "--batch_size", batch, "--micro_batch", rows]
        fit = [*common, "--max_steps", 2]
        sampled = ["--max_new_tokens", new]
        ppo = ["--steps", 2, "--minibatches", 1, "--rollout_batch", batch, *report]
        return {
            "sft": peak_of("train_sft.py", *fit, "--init", f"{folder}/gpt2"),
            "rm": peak_of("train_rm.py", *fit, *sampled, "--answers", 8),
            "ppo": peak_of("train_ppo.py", *common, *sampled, *ppo),
        }


def main():
    flags = parser(__doc__)
    flags.add_argument("--measure", action="store_true")
    args, base = flags.parse_args(), empty_process()
    shapes = {name: (layers, channels) for name, (layers, _, channels) in SHAPES.items()}
    rows = {name: computed(base, *shape) for name, shape in shapes.items()}
    result = {"memory": rows}
    for name, size in CASES.items() if args.measure else ():
        result.setdefault("memory_measured", {})[name] = {
            stage: [peak, base + sum(needed(*shapes["GPT-2"], *size[:3], stage).values())]
            for stage, peak in measure(*size).items()
        }
    print(tables(load() | result)["memory"])
    if args.measure:
        keep(result)


if __name__ == "__main__":
    main()
