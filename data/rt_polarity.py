"""Pang and Lee's film review snippets as a data folder: write on, and prefer the favourable continuation.

    python data/rt_polarity.py rt-polarity.pos rt-polarity.neg --out data/rt

The two files are the sentence polarity data set v1.0 of https://www.cs.cornell.edu/people/pabo/movie-review-data/ (ACL 2005), one
snippet a line, lower case, 5,331 of each kind. It is the task of Ziegler et al. (arXiv:1909.08593), with labels from the reviews.

    sft      every snippet of at least 8 words, good and bad, cut after its fourth word
    pref     a good and a bad snippet that open with the same words, up to four: chosen and rejected are what follows
    prompts  the four-word openings of sft

A fixed twentieth of the openings, by hash, makes the val files. Within an opening, snippets nearest in length are paired, so that
length tells little. No person compared the two: the label is the polarity of the whole review.
"""

import argparse
import json
import zlib
from collections import defaultdict
from pathlib import Path

OPENING, SHORTEST = 4, 8  # words


def cut(words, n):
    """-> the first n words, and the rest with its leading space."""
    return " ".join(words[:n]), " " + " ".join(words[n:])


def pairs(good, bad):
    """Lists of snippets as words -> rows. Longer common openings first; every snippet serves once."""
    rows, free = [], (good, bad)
    for n in range(OPENING, 0, -1):
        groups = defaultdict(lambda: ([], []))
        for side, snippets in enumerate(free):
            for words in snippets:
                groups[tuple(words[:n])][side].append(words)
        free = ([], [])
        for chosen, rejected in groups.values():
            chosen.sort(key=len), rejected.sort(key=len)
            if len(chosen[0] if chosen else ()) <= n or len(rejected[0] if rejected else ()) <= n:
                free[0].extend(chosen), free[1].extend(rejected)
                continue
            for a, b in zip(chosen, rejected):
                prompt, a_rest = cut(a, n)
                rows.append({"prompt": prompt, "chosen": a_rest, "rejected": cut(b, n)[1]})
            free[0].extend(chosen[len(rejected) :]), free[1].extend(rejected[len(chosen) :])
    return rows


def is_val(prompt):
    return zlib.crc32(prompt.encode()) % 20 == 0


def make(good_text, bad_text):
    """The two files' texts -> {name of the file: rows}."""
    good, bad = ([line.split() for line in text.splitlines() if line.split()] for text in (good_text, bad_text))
    sft = [dict(zip(("prompt", "completion"), cut(words, OPENING))) for words in good + bad if len(words) >= SHORTEST]
    prompts = [{"prompt": prompt} for prompt in dict.fromkeys(row["prompt"] for row in sft)]
    tasks = {"sft": sft, "pref": pairs(good, bad), "prompts": prompts}
    return {f"{task}_{split}": [row for row in rows if is_val(row["prompt"]) == (split == "val")]
            for task, rows in tasks.items() for split in ("train", "val")}  # fmt: skip


def read(path):
    data = Path(path).read_bytes()  # the original is Latin-1, some copies are UTF-8
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("good", help="rt-polarity.pos")
    parser.add_argument("bad", help="rt-polarity.neg")
    parser.add_argument("--out", default="data/rt", help="folder to write into (default: %(default)s)")
    args = parser.parse_args()
    out = Path(args.out)
    try:
        rows = make(read(args.good), read(args.bad))
        out.mkdir(parents=True, exist_ok=True)
        for name, part in rows.items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            (out / f"{name}.jsonl").write_text(lines, encoding="utf-8", newline="\n")
            print(f"{out / f'{name}.jsonl'}: {len(part):,} rows")
    except OSError as error:
        parser.exit(2, f"rt_polarity.py: {error}\n")


if __name__ == "__main__":
    main()
