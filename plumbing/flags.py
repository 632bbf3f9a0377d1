"""Settings: dataclasses whose fields are the flags of a script, and the machine a run computes on.

The comment behind a field is its help text; an interval at its end, as in [0, 1], is the range that
read_flags() allows. So the same line tells a reader, a user and the check.
"""

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

from data.files import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@dataclass
class RunConfig:
    data: str = "data/zoo"  # folder with the JSON-lines files (data/README.md says which)
    out: str = "out"  # folder for checkpoints and metrics
    device: str = "auto"  # auto, cpu or cuda
    dtype: str = "float32"  # float32, or bfloat16 for the matrix products inside the blocks
    grad_checkpoint: bool = False  # less memory, a third more time: compute activations twice
    seed: int = 0  # of all that is random; on a CPU, the same seed repeats a run [0, 2147483648]
    resume: bool = False  # go on where an interrupted run stopped
    overwrite: bool = False  # begin again, although a run is there, finished or not
    tensorboard: bool = False  # write the metrics for TensorBoard too, into out/tensorboard

    def __post_init__(self):
        if not str(self.out):
            raise UserError("--out is empty; . means this folder")
        self.data, self.out = Path(self.data), Path(self.out)
        if self.device not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device {self.device}: should be auto, cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: this PyTorch sees no CUDA GPU; use --device cpu")
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.resume and self.overwrite:
            both = "--resume goes on with an interrupted run, --overwrite begins again"
            raise UserError(f"{both}: give one of them")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"--dtype {self.dtype}: should be float32 or bfloat16")


@functools.cache  # reading the source takes a while
def explanations(settings):
    """The comments behind the fields of a settings class -> {field: (text, lowest, highest)}."""
    texts = {field.name: ("", None, None) for field in dataclasses.fields(settings)}
    for part in reversed(settings.__mro__[:-1]):
        for name, text in re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(part), re.M):
            interval = re.search(r" \[(\S+), (\S+)\]$", text)
            texts[name] = text, *(map(float, interval.groups()) if interval else (None, None))
    return texts


def fail(message):
    raise UserError(f"{message} (-h explains the flags)")


def read_flags(doc, *settings, positional="", without=()):
    """Settings with their defaults -> the same with what the command line says.

    Each field is a flag, `--name value`; a bool that is true by default is `--no_name`. With
    `positional`, the name of what stands on the command line beside the flags, a list of that comes
    last. Fields named in `without` are no flags.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = fail
    for group in settings:
        texts = explanations(type(group))
        for field in dataclasses.fields(group):
            if field.name in without:
                continue
            default, text = getattr(group, field.name), texts[field.name][0]
            flag, kind = f"--{field.name}", {"type": field.type, "metavar": field.type.__name__}
            if field.type is bool:
                flag = f"--no_{field.name}" if default else flag
                kind = {"action": "store_false" if default else "store_true", "dest": field.name}
                text = f"switch off: {text}" if default else text
            text = f"{text} ({default})".replace("%", "%%")
            parser.add_argument(flag, default=default, help=text, **kind)
    if positional:
        parser.add_argument("positional", metavar=positional, nargs="+")
    given = vars(parser.parse_intermixed_args())
    read = []
    for group in settings:
        names = [field.name for field in dataclasses.fields(group) if field.name in given]
        for name in names:
            _, low, high = explanations(type(group))[name]
            if low is not None and not low <= given[name] <= high:
                fail(f"--{name} {given[name]}: should be between {low:g} and {high:g}")
        try:
            read.append(dataclasses.replace(group, **{name: given[name] for name in names}))
        except ValueError as error:  # what a settings class says of numbers that do not go together
            fail(error)
    return read + [given["positional"]] if positional else read


def peek(name, default):
    """The value of a flag that decides which other flags there are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = fail
    parser.add_argument(f"--{name}", default=default)
    return vars(parser.parse_known_args()[0])[name]


LOCKS = []  # open files; the lock on a folder lasts as long as its file is open


def lock(folder):
    """UserError if another process has locked this folder. The system takes the lock away when a
    process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    while LOCKS:  # of an earlier run in this process
        LOCKS.pop().close()
    LOCKS.append(open(folder / ".lock", "w"))
    try:
        if fcntl:
            fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        wait = "another run is writing there; wait for it, or give another --out"
        raise UserError(f"{folder}: {wait}")
    except OSError:  # a file system without locks
        pass


def prepare(run):
    """Lock the folder of the run, seed everything, and set up the machine."""
    lock(run.out)
    torch.manual_seed(run.seed)
    libc = ctypes.CDLL(None) if sys.platform == "linux" and run.device == "cpu" else None
    if hasattr(libc, "mallopt"):
        # Keep freed memory for the next step. By default each large tensor is fetched anew from the
        # system, page by page: an iteration of PPO then takes 6 to 12 % longer.
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_mmap_threshold, 2**25)
    # float32 means float32, whatever the environment says; with bfloat16, the heads use TF32.
    half = run.device != "cpu" and run.dtype == "bfloat16"
    torch.set_float32_matmul_precision("high" if half else "highest")
    # cuDNN's attention plans anew for each new shape, and nearly every batch has one.
    torch.backends.cuda.enable_cudnn_sdp(False)
