"""What a user sets and reads: flags from the command line, and errors in one line."""

import argparse
import dataclasses
import functools
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from data.files import UserError, printable


@dataclass
class RunConfig:
    data: Path = Path("data/zoo")  # folder with the JSON-lines files (docs/using.md says which)
    out: Path = Path("out")  # folder for checkpoints and metrics
    device: str = "auto"  # auto, cpu or cuda
    seed: int = 0  # random seed; on a CPU, the same seed reproduces a run
    resume: bool = False  # go on where an interrupted run stopped
    overwrite: bool = False  # start over, even if a run exists, finished or not
    tensorboard: bool = False  # write the metrics for TensorBoard too, into out/tensorboard


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (-h explains the flags)")


def read_flags(doc, *classes, run=True, positional="", **defaults):
    """Dataclasses -> one object with all their fields, and, for a run, those of RunConfig, as the
    command line says.

    Each field is a flag, `--name value`, and the comment behind the field is its help text; a bool
    that is true by default is `--no_name`. No number may be below 0, and no integer below 1 unless
    its default is 0 (or it is the warm-up). `positional` names the arguments that are not flags;
    then a list of them is returned too.
    """
    bases = (*classes, RunConfig) if run else classes
    settings = dataclasses.make_dataclass("Settings", [], bases=bases)
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=doc, formatter_class=form, allow_abbrev=False)
    fields, texts = dataclasses.fields(settings), explanations(settings)
    for field in fields:
        default = defaults.get(field.name, field.default)
        flag, kind = f"--{field.name}", {"type": field.type, "metavar": field.type.__name__}
        text = texts[field.name] + (f" ({default})" if default != "" else "")
        if field.type is bool and default:
            flag, kind = f"--no_{field.name}", {"action": "store_false", "dest": field.name}
            text = f"switch off: {texts[field.name]}"
        elif field.type is bool:
            kind, text = {"action": "store_true"}, texts[field.name]
        parser.add_argument(flag, default=default, help=text.replace("%", "%%"), **kind)
    if positional:
        parser.add_argument("words", metavar=positional, nargs="+")
    values = vars(parser.parse_intermixed_args())
    words = values.pop("words", None)
    for field in fields:
        lowest = int(field.type is int and field.default != 0 and field.name != "warmup")
        if field.type in (int, float) and not values[field.name] >= lowest:
            parser.error(f"--{field.name} {values[field.name]}: should be at least {lowest}")
    try:
        config = settings(**values)
    except ValueError as error:  # what a settings class says of numbers that are nonsense
        parser.error(str(error))
    if run:
        prepare(config)
    return (config, words) if positional else config


def explanations(settings):
    """The comments behind the fields of a dataclass and its bases -> {field: text}."""
    texts = {}
    for part in reversed(settings.__mro__[1:-1]):
        texts |= dict(re.findall(r"(?m)^    (\w+): .*?  # (.+)$", inspect.getsource(part)))
    return texts


def prepare(config):
    """The folders, the device, the seed."""
    if config.resume and config.overwrite:
        raise UserError("--resume continues a run, --overwrite starts over: give one of them")
    config.out.mkdir(parents=True, exist_ok=True)
    if hasattr(config, "models"):
        config.models = models_folder(config, config.out)
    config.device = device_of(config)
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("highest")  # some containers switch to TF32, too coarse


def models_folder(config, folder):
    """The folder of sft.pt: --models, or, if that is empty, this folder or the one above it."""
    beside = folder if (folder / "sft.pt").exists() else folder.parent
    return Path(config.models or beside)


def device_of(config):
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if config.device not in ("auto", *devices):
        raise UserError(
            f"--device {config.device}: PyTorch finds only {' and '.join(devices)} here"
        )
    return devices[0] if config.device == "auto" else config.device


def script(main):
    """Run main() as a program. An error that the user can fix ends it with one line and status 2,
    Ctrl-C with one line and status 130; only our own bugs show a traceback."""

    @functools.wraps(main)
    def program(*args, **more):
        for stream in (sys.stdin, sys.stdout):
            if hasattr(stream, "reconfigure"):  # not if it is closed, or a notebook's
                stream.reconfigure(errors="replace")  # what cannot be shown becomes a question mark
        try:
            return main(*args, **more)
        except KeyboardInterrupt as stop:
            status, message = 130, str(stop) or "stopped; files written before are whole"
        except Exception as error:
            status, message = 2, explain(error)
            if not message:
                raise
        message = printable(message, keep="")  # it may quote a file
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(status)

    return program


def explain(error):
    """One line for the user; nothing for an error that the user cannot put right."""
    text = str(error).partition("\n")[0]
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        return f"the package {package} is missing; pip install {package}"
    if isinstance(error, FloatingPointError):
        return f"{text}; in training, start over with --overwrite and a smaller --lr"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the output'}: {error.strerror}"
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", text):
        return f"not enough memory ({text[:100]}); in training, try --micro_batch 1, even to resume"
    return ""
