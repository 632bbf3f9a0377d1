"""Flags from dataclasses, the machine that a run computes on, and errors that a user can put right."""

import argparse
import ctypes
import dataclasses
import functools
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from plumbing import fast

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class UserError(ValueError):
    """Something the user can put right. The scripts print it on one line and exit with status 2."""


# The range that each number must lie in; up to infinity where there is no second figure.
LIMITS = {
    "vocab_size": (257, 1_000_000), "context": (8,), "layers": (1,), "heads": (1,), "channels": (1,), "dropout": (0, 0.9),
    "steps": (1,), "epochs": (0,), "batch_size": (1,), "minibatches": (1,), "micro_batch": (0,), "rollout_batch": (0,),
    "lr": (0,), "critic_lr": (0,), "head_lr": (0,), "adam_eps": (0, 1),
    "warmup": (0,), "weight_decay": (0,), "max_grad_norm": (0,), "save_every": (1,),
    "max_steps": (1,), "answers": (2,), "report_prompts": (0,),
    "max_new_tokens": (1,), "temperature": (0.01,), "top_k": (0,), "n": (1,), "seed": (0, 2**31),
    "kl_coef": (0, 1e6), "kl_target": (1e-6,), "kl_horizon": (1,), "kl_loss_coef": (0, 1e6), "gamma": (0, 1), "lam": (0, 1),
    "clip_eps": (0,), "value_clip": (0,), "vf_coef": (0,), "entropy_coef": (0,), "length_penalty": (0, 1e6),
    "missing_eos_penalty": (0, 1e6), "ref_update_every": (0,),
    "k": (2,), "watch": (1,), "penalty": (0,), "target": (0,), "members": (1,), "rounds": (1,), "pairs": (1,),  # of variations/
}  # fmt: skip
# Flags that would be ignored in silence: those without another one, and those that another one replaces.
NEEDS = {"kl_target": "kl_horizon", "critic_lr": "separate_critic"}
REPLACED = {
    "init": ("vocab_size", "context", "layers", "heads", "channels"), "epochs": ("max_steps",), "no_report": ("report_prompts",),
}  # fmt: skip


@dataclass
class RunConfig:
    data: str = "data/zoo"  # folder with the JSON-lines files (data/README.md says which)
    out: str = "out"  # folder for checkpoints and metrics
    device: str = "auto"  # auto, cpu or cuda
    dtype: str = "float32"  # float32, or bfloat16 for the matrix products inside the blocks
    grad_checkpoint: bool = False  # less memory for a third more time: compute activations again in the backward pass
    seed: int = 0  # of everything random: the same seed gives the same result, on one machine with one number of threads
    resume: bool = False  # go on where an interrupted run stopped
    overwrite: bool = False  # begin again, although an interrupted run is there
    save_every: int = 100  # steps between two saves of the state that --resume needs; it is saved by time too
    tensorboard: bool = False  # write the metrics for TensorBoard too, into the folder tensorboard of --out

    def __post_init__(self):
        self.data, self.out = Path(self.data), Path(self.out)
        if self.device not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device {self.device}: should be auto, cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: this PyTorch sees no CUDA GPU; use --device cpu")
        if self.resume and self.overwrite:
            raise UserError("--resume goes on with an interrupted run, --overwrite begins again: give one of them")
        if self.tensorboard:
            from plumbing.board import need_tensorboard  # which needs UserError from here

            need_tensorboard()
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"--dtype {self.dtype}: should be float32 or bfloat16")
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def explanations(settings):
    """What the comments behind the fields of a settings class say: {field: text}. They are what -h prints."""
    fields = re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(settings), re.M)
    return {name: text for name, text in fields if name in {field.name for field in dataclasses.fields(settings)}}


def read_flags(doc, *settings, positional="", without=()):
    """Settings with their defaults -> the same with what the command line says: each field is a flag, `--name value`.

    With `positional`, the name of what stands on the command line beside the flags, a list of that comes last. Fields
    named in `without` are no flags.
    """

    def fail(message):
        raise UserError(f"{message} (-h explains the flags)")

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = fail
    fields = [(group, field) for group in settings for field in dataclasses.fields(group) if field.name not in without]
    for group, field in fields:
        default, text = getattr(group, field.name), explanations(type(group))[field.name]
        kind = {"action": "store_true"} if field.type is bool else {"type": field.type, "metavar": field.type.__name__}
        say = f"{text} ({default})".replace("%", "%%")
        parser.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=say, **kind)
    if positional:
        parser.add_argument("positional", metavar=positional, nargs="+")
    given = vars(parser.parse_intermixed_args())
    values = {field.name: getattr(group, field.name) for group, field in fields} | given
    for name, other in NEEDS.items():
        if name in given and other not in given:
            fail(f"--{name} has no effect without --{other}")
    for name, others in REPLACED.items():
        for other in others if given.get(name) else ():
            if other in given:
                fail(f"--{other} has no effect with --{name}; leave it out")
    for _, field in fields:
        if field.name in LIMITS:
            value, (low, high) = values[field.name], (*LIMITS[field.name], float("inf"))[:2]
            if not low <= value <= high:
                fail(f"--{field.name} {value}: should be between {low:g} and {high:g}")
    try:
        read = [dataclasses.replace(g, **{f.name: values[f.name] for owner, f in fields if owner is g}) for g in settings]
    except ValueError as error:  # what minippo.py says of numbers that do not go together
        fail(error)
    return read + [values["positional"]] if positional else read


AT_ERROR = []  # functions of an error that save what there is when a run fails, and return a few words about it
LOCKS = []  # open files; the lock on a folder lasts as long as its file is open


def run_script(main):
    """Call main(). What the user can put right ends in one line and status 2, Ctrl-C in one line and status 130."""
    for stream in filter(None, (sys.stdin, sys.stdout)):  # None: closed
        stream.reconfigure(errors="replace")  # what cannot be shown or read becomes a question mark instead of ending the run
    try:
        return main()
    except Exception as error:
        status, message = 2, explain(error)
        saved = "; ".join(filter(None, (save(error) for save in AT_ERROR)))
        if not message:  # a mistake of ours: its traceback is wanted
            print(saved, file=sys.stderr)
            raise
        message += f"; {saved}" if saved else ""
    except KeyboardInterrupt as stop:
        status, message = 130, f"stopped; {str(stop) or 'files written before are whole'}"
    finally:
        AT_ERROR.clear()
        while LOCKS:
            LOCKS.pop().close()
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


def explain(error):
    """One line for the user; nothing for an error that is none of theirs."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, FloatingPointError):
        return f"{text}; begin again with --overwrite and a smaller --lr"
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror}"
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", text):
        smaller = "in training, --micro_batch 1 (train_ppo.py: --rollout_batch 8 too) needs less, also with --resume"
        return f"not enough memory ({text[:100]}); {smaller}"
    return ""


def lock(folder):
    """UserError if another process has locked this folder. The system takes the lock away when a process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    LOCKS.append(open(folder / ".lock", "w"))
    if fcntl:
        try:
            fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another run is writing there; wait for it, or give another --out")
        except OSError:  # a file system without locks
            pass


def prepare(run):
    """Lock the folder of the run, seed everything, and let minippo's networks be computed fast (plumbing/fast.py)."""
    lock(run.out)
    torch.manual_seed(run.seed)
    if sys.platform == "linux" and run.device == "cpu" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # Keep freed memory for the next step. By default each large tensor is fetched anew from the system, page by page.
        libc.mallopt(-1, 2**31 - 1), libc.mallopt(-3, 2**25)  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    if run.device == "cuda" and run.dtype == "bfloat16":
        torch.set_float32_matmul_precision("high")  # for the heads, which stay float32: TF32
    fast.install(torch.bfloat16 if run.dtype == "bfloat16" else None, run.grad_checkpoint)
