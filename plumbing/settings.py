"""Flags from the fields of a dataclass, and error messages of one line."""

import argparse
import inspect
import re
import sys
import typing
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from data.rows import UserError

PACKAGES = "peft", "regex", "tiktoken", "transformers", "trl"  # named as the modules they bring


PATHS = "data", "out", "models", "policy", "device", "resume", "overwrite"
MEMORY = "micro_batch", "sample_batch"


@dataclass
class RunConfig:
    """What every script takes."""

    data: Path = Path("data/zoo")  # folder of the JSON-lines files, see docs/manual.md
    out: Path = Path("out")  # folder for checkpoints and logs
    device: str = "auto"  # auto, cpu, cuda or cuda:1
    seed: int = 0  # random seed; on a CPU, the same seed gives the same result
    resume: bool = False  # continue an interrupted run
    overwrite: bool = False  # replace an existing run

    def at_least_1(self, *names):
        """For __post_init__: ValueError unless these fields are 1 or more."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}): should be at least 1")

    def prepare(self, stage):
        """Before a run: set the seed -> the device. UserError if a run is there already and
        neither --resume nor --overwrite is given."""
        if self.resume and self.overwrite:
            raise UserError("--resume continues a run, --overwrite replaces it: give one of them")
        for path in (self.out / f"{stage}_state.pt", self.out / f"{stage}.pt"):
            if path.exists() and not (self.resume or self.overwrite):
                hint = "--resume continues the run, --overwrite replaces it"
                raise UserError(f"{path}: exists already; {hint}")
        torch.manual_seed(self.seed)
        return find_device(self.device)

    def settings(self):
        """What --resume compares: all fields but paths, the device and limits of memory."""
        names = [field.name for field in fields(self) if field.name not in PATHS + MEMORY]
        return {name: getattr(self, name) for name in names}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (-h explains the flags)")


def help_texts(config_class):
    """The comments after the fields of a dataclass and of its bases -> {field: text}."""
    texts = {}
    for base in reversed(config_class.__mro__[:-1]):
        texts |= re.findall(r"(?m)^    (\w+): .*?  # (.+)$", inspect.getsource(base))
    return texts


def read_flags(config_class, doc, arguments=None):
    """The command line -> an instance of the dataclass. Each field is a flag `--name value`; a bool
    is `--name`, or `--no_name` if it is true by default; the field `words`, if there is one, takes
    what is not a flag. The comment after a field is its help."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=doc, formatter_class=layout, allow_abbrev=False)
    types, texts = typing.get_type_hints(config_class), help_texts(config_class)
    for field in fields(config_class):
        kind, text = types[field.name], texts.get(field.name, "").replace("%", "%%")
        if field.name == "words":
            parser.add_argument("words", nargs="*", help=text)
            continue
        if kind is bool and field.default:
            flag, options = f"--no_{field.name}", {"action": "store_false", "dest": field.name}
            text = f"switch off: {text}"
        elif kind is bool:
            flag, options = f"--{field.name}", {"action": "store_true"}
        else:
            flag, options = f"--{field.name}", {"type": kind, "metavar": kind.__name__}
            text += f" ({field.default})" if str(field.default) else ""
        parser.add_argument(flag, default=field.default, help=text, **options)
    values = vars(parser.parse_intermixed_args(arguments))
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = value.expanduser()
    try:
        return config_class(**values)
    except ValueError as error:  # a number that makes no sense
        parser.error(str(error))


def find_device(name):
    """auto, cpu, cuda, cuda:1 -> the device; UserError if PyTorch does not find it."""
    torch.set_float32_matmul_precision("highest")  # some machines switch to TF32: too coarse
    found = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    found += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "auto":
        return "cuda" if "cuda" in found else "cpu"
    if name not in found:
        raise UserError(f"--device {name}: PyTorch finds only {', '.join(found)} here")
    return name


def printable(text, keep="\n\t\u200c\u200d\u00a0"):
    """The text with control characters spelled out, so that no model controls the terminal. (The
    joiners and the no-break space that some languages need are kept.)"""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def run_script(main, config_class, doc):
    """main(config) as a program: reads the flags. A mistake of the user ends it with
    one line and status 2, Ctrl-C with one line and status 130; only our own bugs show a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal without Unicode shows question marks
    try:
        main(read_flags(config_class, doc))
        return
    except KeyboardInterrupt:
        message, status = "stopped (--resume continues a training run)", 130
    except Exception as error:
        message, status = explain(error), 2
        if not message:
            raise
    print(f"{Path(sys.argv[0]).name}: {printable(message, keep='')}", file=sys.stderr)
    sys.exit(status)


def explain(error):
    """One line for the user, or nothing if the user cannot put it right."""
    text = str(error).partition("\n")[0]
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        return f"the package {error.name} is missing: pip install {error.name}"
    if isinstance(error, FloatingPointError):
        return f"{text}: in training, start again with --overwrite and a smaller --lr"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'output'}: {error.strerror}"
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", text):
        return f"not enough memory ({text[:100]}): try --micro_batch 1, also with --resume"
    return ""
