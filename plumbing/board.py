"""The metrics of a run for TensorBoard. Needs the package tensorboard; then `tensorboard --logdir out/tensorboard` shows them."""

import json
import time

from plumbing.settings import UserError
from plumbing.text import each


def need_tensorboard():
    """The class that writes for it, which comes with PyTorch."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(f"--tensorboard needs a package that is missing ({error}); pip install tensorboard")
    return SummaryWriter


class Board:
    """What a log says, for TensorBoard. When a run begins or goes on, TensorBoard is told to forget what was there, and gets the
    lines that the log has then: so the two say the same, whatever was interrupted, and whether or not the flag was given before."""

    def __init__(self, folder, lines):
        self.writer = need_tensorboard()(folder, purge_step=0)
        rows = [json.loads(line) for line in lines]
        self.began = time.time() - (rows[-1]["seconds"] if rows else 0.0)
        for row in each("lines of the log for TensorBoard", rows):
            self.add(row)

    def add(self, record):
        """One line of the log: its numbers, under their names, at its step and time."""
        for name, x in record.items():
            if name != "step" and isinstance(x, int | float):
                self.writer.add_scalar(name, x, record["step"], self.began + record["seconds"])
        self.writer.flush()
