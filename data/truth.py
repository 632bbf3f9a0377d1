"""What is known of the truth of the zoo: its judge's grades, and the limits no model can beat."""

import math

from data.files import UserError
from data.rows import load_rows
from data.zoo import PROMPTS, crowd, judge


def judge_of(folder):
    """The judge, if all prompts of the folder are the zoo's; else None."""
    try:
        files = [folder / f"prompts_{split}.jsonl" for split in ("train", "val")]
        zoo = all(prompt in PROMPTS for path in files for (prompt,) in load_rows(path, "prompts"))
    except UserError:  # a file is missing or faulty: these are other data
        return None
    return judge if zoo else None


def surprisals(rows):
    """Rows (prompt, completion) -> -log of the probability that the crowd gives each, in nats; None
    if it would never say one. Their sum over the number of tokens is the lowest loss of SFT that
    can be expected on these rows."""
    try:
        return [-math.log(crowd(prompt)[completion]) for prompt, completion in rows]
    except (KeyError, ValueError):
        return None


def margins(pairs):
    """Rows (prompt, chosen, rejected) -> for each the judge's grade of the chosen answer less that
    of the rejected one; None if it does not know a prompt. No reward model can be expected to
    have better score differences."""
    try:
        return [judge(prompt, chosen) - judge(prompt, other) for prompt, chosen, other in pairs]
    except ValueError:
        return None
