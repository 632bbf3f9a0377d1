"""Flags from the fields of a dataclass, and error messages of one line."""

import argparse
import inspect
import io
import re
import sys
import typing
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import torch

from data.rows import UserError

NOT_COMPARED = "data", "models", "policy", "micro_batch", "sample_batch"  # by --resume


@dataclass
class RunConfig:
    """What every training script takes."""

    data: Path = Path("data/zoo")  # folder of the JSON-lines files, see docs/manual.md
    out: Path = Path("out")  # folder for checkpoints and logs
    device: str = "auto"  # auto, cpu, cuda or cuda:1
    seed: int = 0  # random seed; on a CPU, the same seed gives the same result
    resume: bool = False  # continue an interrupted run
    overwrite: bool = False  # replace an existing run

    def at_least(self, limit, *names):
        """UserError if one of these fields is below the limit."""
        for name in names:
            if not getattr(self, name) >= limit:  # nor NaN
                raise UserError(f"{name} ({getattr(self, name)}): should be at least {limit}")

    def prepare(self, stage):
        """Before a run: set the seed -> the device. UserError if a run is there already and
        neither --resume nor --overwrite is given."""
        if self.resume and self.overwrite:
            raise UserError("--resume continues a run, --overwrite replaces it: give one of them")
        for path in (self.out / f"{stage}_state.pt", self.out / f"{stage}.pt"):
            if path.exists() and not (self.resume or self.overwrite):
                hint = "--resume continues the run, --overwrite replaces it, another --out keeps it"
                raise UserError(f"{path}: exists already; {hint}")
        self.at_least(0, "seed")
        torch.manual_seed(self.seed)
        return find_device(self.device)

    def settings(self):
        """What is saved with a run: all fields but those of how and where it is run."""
        settings = vars(self) | {"data": str(self.data)}  # a file of torch holds no Path
        for name in ("out", "device", "resume", "overwrite"):
            del settings[name]
        return settings


def find_device(name):
    """auto, cpu, cuda, cuda:1 -> the device; UserError if PyTorch does not find it."""
    found = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    found += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "auto":
        return "cuda" if "cuda" in found else "cpu"
    if name not in found:
        raise UserError(f"--device {name}: PyTorch finds only {', '.join(found)} here")
    return name


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
    """The command line -> an instance of the dataclass. A field with a default is a flag, `--name
    value`; for a bool `--name` and `--no-name`. A field without one is positional, and a list takes
    the rest. The comment after a field is its help."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=doc, formatter_class=layout, allow_abbrev=False)
    types = typing.get_type_hints(config_class)
    texts = help_texts(config_class)
    for field in fields(config_class):
        kind = types[field.name]
        text = texts.get(field.name, "").replace("%", "%%")
        if kind is list:
            parser.add_argument(field.name, nargs="*", help=text)
        elif field.default is MISSING:
            parser.add_argument(field.name, type=kind, help=text)
        else:
            options = {"type": kind, "metavar": kind.__name__}
            if kind is bool:
                options = {"action": argparse.BooleanOptionalAction}
            if str(field.default):
                text += f" ({field.default})"
            parser.add_argument(f"--{field.name}", default=field.default, help=text, **options)
    values = vars(parser.parse_intermixed_args(arguments))
    try:
        return config_class(**values)
    except ValueError as error:  # of its __post_init__
        parser.error(str(error))


def printable(text, keep="\n\t\u200c\u200d\u00a0"):
    """The text with control characters spelled out, so that no model controls the terminal. (The
    joiners and the no-break space that some languages need are kept.)"""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def run_script(main, config_class, doc):
    """main(config) as a program: reads the flags. A mistake of the user ends it with one line and
    status 2, Ctrl-C with one line and status 130; a bug of ours shows a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # those of a notebook are not
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows question marks
    try:
        main(read_flags(config_class, doc))
        return
    except KeyboardInterrupt:
        message = "stopped (--resume continues a training run)"
        status = 130
    except FloatingPointError as error:
        message = f"{error}: start again with --overwrite and a smaller --lr"
        status = 2
    except (UserError, ModuleNotFoundError, OSError) as error:
        message = str(error)
        status = 2
    print(f"{Path(sys.argv[0]).name}: {printable(message, keep='')}", file=sys.stderr)
    sys.exit(status)
