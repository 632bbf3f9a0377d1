"""Pang and Lee's film review snippets as a data folder; the task: continue a review, favourably.

    python -m data.rt_polarity rt-polarity.pos rt-polarity.neg --out data/rt

The two files are the sentence polarity data set v1.0, one snippet a line, 5,331 of each kind:
https://www.cs.cornell.edu/people/pabo/movie-review-data/. The task is like that of Ziegler et al.
(arXiv:1909.08593), with labels from the reviews.

    sft      every snippet of at least 8 words, good and bad, cut after its fourth word
    pref     a good and a bad snippet that open with the same words, up to four: chosen and
             rejected are what follows
    prompts  the four-word openings of sft

The files are train files. (The opening of a pair may be shorter, so a snippet that is held out from
sft may be in a pair.) Within an opening, snippets are paired in the order of their length, so that
length tells little. Nobody compared the two; the label is that of the whole review.
"""

from collections import defaultdict
from pathlib import Path

from data.files import command
from data.rows import write_rows

OPENING, SHORTEST = 4, 8  # words


def cut(words, n):
    """-> the first n words, and the rest with its leading space."""
    return " ".join(words[:n]), " " + " ".join(words[n:])


def make_pairs(good, bad):
    """Snippets as lists of words -> rows. Longer openings first; a snippet serves once."""
    rows, free = [], (good, bad)
    for n in range(OPENING, 0, -1):
        groups = defaultdict(lambda: ([], []))
        for side, snippets in enumerate(free):
            for words in snippets:
                groups[tuple(words[:n])][side].append(words)
        free = ([], [])
        for chosen, rejected in groups.values():
            chosen.sort(key=len)
            rejected.sort(key=len)
            paired = 0
            # Nothing follows an opening that is a whole snippet; the shortest comes first.
            if all(side and len(side[0]) > n for side in (chosen, rejected)):
                paired = min(len(chosen), len(rejected))
            for a, b in zip(chosen[:paired], rejected[:paired]):
                rows.append((*cut(a, n), cut(b, n)[1]))
            free[0].extend(chosen[paired:])
            free[1].extend(rejected[paired:])
    return rows


def make_rows(*texts):
    """The texts of the good and the bad file -> {"sft": rows, "pref": rows, "prompts": rows}."""
    good, bad = ([line.split() for line in text.splitlines()] for text in texts)
    sft = [cut(words, OPENING) for words in good + bad if len(words) >= SHORTEST]
    prompts = list(dict.fromkeys((prompt,) for prompt, _ in sft))
    return {"sft": sft, "pref": make_pairs(good, bad), "prompts": prompts}


def read(path):
    data = Path(path).read_bytes()  # the original is Latin-1, some copies are UTF-8
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


FLAGS = {
    "good": {"help": "rt-polarity.pos"},
    "bad": {"help": "rt-polarity.neg"},
    "--out": {"type": Path, "required": True, "help": "folder"},
    "--overwrite": {"action": "store_true", "help": "replace files that are there"},
}


def main(args):
    for task, rows in make_rows(read(args.good), read(args.bad)).items():
        write_rows(args.out, task, "train", rows, args.overwrite)


if __name__ == "__main__":
    command(__doc__, FLAGS, main)
