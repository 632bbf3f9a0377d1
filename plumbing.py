"""What the three scripts need and no reader of the algorithm does: flags, data folders, the log, stopping and going on."""

import argparse
import ctypes
import dataclasses
import itertools
import json
import math
import signal
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from minippo import Trunk, UserError, load_jsonl, option, read_file, write_file


@dataclass
class RunConfig:
    data: str = option("data/zoo", "folder with the JSON-lines files (data/README.md says which)")
    out: str = option("out", "folder for checkpoints and metrics")
    device: str = option("auto", "auto, cpu or cuda")
    dtype: str = option("float32", "float32, or bfloat16 for the matrix products inside the blocks; weights stay float32")
    grad_checkpoint: bool = option(False, "less memory for a third more time: recompute activations in the backward pass")
    seed: int = option(0, "seed of everything random: same seed, same result, to the last bit on a CPU", 0, 2**31)
    resume: bool = option(False, "go on where an interrupted run stopped")
    save_every: int = option(100, "steps between two saves of the state that --resume needs", 1)

    def __post_init__(self):
        self.data, self.out = Path(self.data), Path(self.out)
        if self.device not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device {self.device}: should be auto, cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: this PyTorch sees no CUDA GPU; use --device cpu")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"--dtype {self.dtype}: should be float32 or bfloat16")
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"


def prepare(run):
    """Seed everything, and tell the trunks how to compute."""
    torch.manual_seed(run.seed)
    if sys.platform == "linux" and run.device == "cpu" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # Keep freed memory for the next step. By default each large tensor is fetched anew from the system, page by page.
        libc.mallopt(-1, 2**31 - 1), libc.mallopt(-3, 2**25)  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    Trunk.autocast = torch.bfloat16 if run.dtype == "bfloat16" else None
    if run.device == "cuda" and Trunk.autocast:
        torch.set_float32_matmul_precision("high")  # for the heads, which stay float32: TF32
    Trunk.checkpointing = run.grad_checkpoint


def read_flags(doc, *settings, positional=""):
    """Settings with their defaults -> the same with what the command line says: each field is a flag, `--name value`.

    With `positional`, the name of what stands on the command line beside the flags, a list of that comes last.
    """

    def fail(message):
        raise UserError(f"{message} (-h explains the flags)")

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = fail
    fields = [(group, field) for group in settings for field in dataclasses.fields(group) if field.metadata]
    for group, field in fields:
        default = getattr(group, field.name)
        kind = {"action": "store_true"} if field.type is bool else {"type": field.type, "metavar": field.type.__name__}
        parser.add_argument(f"--{field.name}", default=default, help=f"{field.metadata['help']} ({default})", **kind)
    if positional:
        parser.add_argument("positional", metavar=positional, nargs="+")
    values = vars(parser.parse_intermixed_args())
    for _, field in fields:
        value, low, high = values[field.name], field.metadata["low"], field.metadata["high"]
        if field.type in (int, float) and not low <= value <= high:
            fail(f"--{field.name} {value}: should be between {low:g} and {high:g}")
    read = [dataclasses.replace(g, **{f.name: values[f.name] for owner, f in fields if owner is g}) for g in settings]
    return read + [values["positional"]] if positional else read


def run_script(main):
    """Call main(). What the user can put right ends in one line and status 2, Ctrl-C in one line and status 130."""
    for stream in filter(None, (sys.stdin, sys.stdout)):  # None: closed
        stream.reconfigure(errors="replace")  # what cannot be shown or read becomes a question mark instead of ending the run
    try:
        return main()
    except UserError as error:
        status, message = 2, error
    except OSError as error:
        status, message = 2, f"{error.filename or 'output'}: {error.strerror}"
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        status, message = 2, f"not enough memory ({str(error).splitlines()[0][:100]}); try a smaller batch, or --micro_batch"
    except KeyboardInterrupt as stop:
        status, message = 130, f"stopped; {str(stop) or 'files written before are whole'}"
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


def random_state():
    """The states of PyTorch's generators, on which everything random in a training loop depends."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def set_random_state(states):
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states[1:])


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """How far a training run has come: its log, its clock, and the state from which --resume goes on.

    configs: the settings that must be the same when it goes on. made_from: the figures that came with the checkpoints that the run
    starts from, {"sft": ..., "rm": ...}, by which they are known again. parts: whatever has a state_dict() (model, optimizer).
    `values` holds the numbers that must survive an interruption.
    """

    def __init__(self, kind, run, configs, steps, made_from=None, **parts):
        self.state_path, log_path = run.out / f"{kind}_state.pt", run.out / f"{kind}.jsonl"
        self.run, self.steps, self.parts, self.values = run, steps, parts, {"step": 0, "seconds": 0.0}
        self.made_from = made_from or {}
        self.settings = {"data": str(run.data), "seed": run.seed, "dtype": run.dtype, "steps": steps}
        for config in configs:
            self.settings |= {name: x for name, x in dataclasses.asdict(config).items() if name not in ("models", "no_report")}
        if run.resume and not self.state_path.exists():
            print(f"--resume: {self.state_path} is not there, so this run starts at the beginning")
        elif run.resume:
            state = read_file(self.state_path, ("state",))
            was = state.get("settings", {})
            differ = [f"{name} = {was.get(name)}" for name, value in self.settings.items() if was.get(name) != value]
            if differ:
                raise UserError(f"{self.state_path} was saved with {', '.join(differ)}; repeat that, or leave --resume out")
            for name, facts in self.made_from.items():
                if state.get("made_from", {}).get(name) != facts:
                    raise UserError(f"{name}.pt has been made again since {self.state_path} was saved; leave --resume out")
            for name, part in parts.items():
                part.load_state_dict(state[name])
            set_random_state(state["random"])
            self.values = state["values"]
        else:
            self.state_path.unlink(missing_ok=True)  # of an earlier run: a later --resume must not mistake it for this one's
        run.out.mkdir(parents=True, exist_ok=True)
        logged = log_path.read_text().splitlines(True) if self.values["step"] else []
        log_path.write_text("".join(logged[: self.values["step"]]))  # one line a step; those after the last save are made again
        self.log, self.asked = open(log_path, "a"), []
        if self.values["step"] < steps:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.ask)
        self.began = self.shown = time.perf_counter() - self.values["seconds"]

    def ask(self, number, frame):
        """At the first Ctrl-C or SIGTERM the loop ends its step and saves; a second one kills."""
        self.asked.append(number)
        signal.signal(number, signal.SIG_DFL)

    def end_step(self, tokens, show, **metrics):
        """Log the metrics of a step, print those named in `show` every few seconds; save now and then, or when asked."""
        seconds = time.perf_counter() - self.began
        speed = tokens / (seconds - self.values["seconds"])
        step = self.values["step"] = self.values["step"] + 1
        self.values["seconds"] = seconds
        record = {"step": step, **metrics, "tokens_per_second": round(speed), "seconds": round(seconds, 2)}
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()
        if time.perf_counter() - self.shown > 4 or step == self.steps:
            self.shown = time.perf_counter()
            numbers = "  ".join(f"{name} {metrics[name]:.3g}" for name in show if name in metrics)
            times = f"{clock(seconds)}, {clock(seconds / step * (self.steps - step))} left"
            print(f"step {step:>4}/{self.steps}  {numbers}  {speed:,.0f} tokens/s  {times}", flush=True)
        if self.asked or step % self.run.save_every == 0 or step == self.steps:
            parts = {name: part.state_dict() for name, part in self.parts.items()}
            state = {"kind": "state", "settings": self.settings, "made_from": self.made_from, "values": self.values}
            write_file(self.state_path, state | {"random": random_state()} | parts)
        if self.asked:
            raise KeyboardInterrupt(f"step {step} is saved, --resume goes on from there")
        if step == self.steps:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on, Ctrl-C has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def adamw(model, lr, weight_decay=0.0):
    return torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)


def set_lr(optimizer, lr, step, steps, warmup):
    """Linear warm-up to lr, then a straight line down to 0 after the last step; returns what it set."""
    now = lr * min((step + 1) / (warmup + 1), (steps - step) / max(1, steps - warmup))
    for group in optimizer.param_groups:
        group["lr"] = now
    return now


def batches(rows, batch_size, seed):
    """Yield lists of row numbers for ever: in each pass over the data every row once, in random order."""
    for epoch in itertools.count():
        order = np.random.default_rng([seed, epoch]).permutation(rows)
        for batch in np.array_split(order, math.ceil(rows / batch_size)):  # sizes differ by one at most
            yield batch.tolist()


KEYS = {"sft": ("prompt", "completion"), "pref": ("prompt", "chosen", "rejected"), "prompts": ("prompt",)}


def read_rows(data, task, split):
    """The rows of a data folder for "sft", "pref" or "prompts", and "train" or "val", as tuples of strings; says what it read.

    What a folder lacks comes from what it has: without a val file, the train rows of one prompt in twenty, chosen by a
    hash, are held out; without sft files the chosen responses serve, without prompts files the prompts of the pairs.
    """

    def find(name):
        return next((path for path in (data / f"{name}.jsonl", data / f"{name}.jsonl.gz") if path.exists()), None)

    if not find(f"{task}_{split}") and not find(f"{task}_train") and find("pref_train"):
        rows = [pair[: len(KEYS[task])] for pair in read_rows(data, "pref", split)]  # (prompt, chosen) or (prompt,)
        print(f"no {task}_train.jsonl: {'chosen responses' if task == 'sft' else 'prompts of the pairs'} serve instead")
        return rows if task == "sft" else list(dict.fromkeys(rows))
    path, note = find(f"{task}_{split}"), ""
    if path and (split == "val" or find(f"{task}_val")):
        rows = load_jsonl(path, KEYS[task])
    else:
        path = find(f"{task}_train") or data / f"{task}_train.jsonl"
        rows = load_jsonl(path, KEYS[task])
        rows = [row for row in rows if (zlib.crc32(row[0].encode(errors="replace")) % 20 == 0) == (split == "val")]
        note = f" for {split}; there is no {task}_val.jsonl, so one prompt in twenty is held out"
        if not rows:
            raise UserError(f"{path}: too few prompts to hold any out; write a {task}_val.jsonl")
    print(f"read {path}: {len(rows):,} rows{note}")
    return rows


def encode_rows(rows, tokenizer, context):
    """Rows of a prompt and completions -> the same as lists of ids; says how many were skipped or cut.

    Prompt and completions are encoded apart, so that no token crosses the border; a completion gets its end token. A
    prompt that leaves no room in the context skips the row; a completion that does not fit is cut (and has no end).
    """
    encoded, cut = [], 0
    for prompt, *completions in rows:
        prompt = tokenizer.encode(prompt)
        if not 0 < len(prompt) < context:
            continue
        completions = [tokenizer.encode(completion) + [tokenizer.eot] for completion in completions]
        room = context - len(prompt)
        cut += any(len(ids) > room for ids in completions)
        encoded.append((prompt, *[ids[:room] for ids in completions]))
    if len(encoded) < len(rows):
        print(f"    {len(rows) - len(encoded):,} skipped: the prompt is empty or leaves no room in the context of {context} tokens")
    if cut:
        print(f"    {cut:,} cut at the end of the context of {context} tokens")
    if not encoded:
        raise UserError(f"no prompt leaves room in the context of {context} tokens; train with a larger --context")
    return encoded


def join_rows(parts):
    """Tuples of tensors (B,) or (B, T) -> one such tuple with all the rows; the narrower ones are padded on the right."""
    joined = []
    for pieces in zip(*parts):
        width = max(x.shape[-1] for x in pieces)
        joined.append(torch.cat([F.pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in pieces]))
    return joined


def printable(text):
    """The text with its control characters spelled out: what a model writes must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
