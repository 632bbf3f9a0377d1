"""Anthropic's published dialogues as a data folder:

    python data/hh_rlhf.py train.jsonl.gz test.jsonl.gz --out data/hh

The files are at https://github.com/anthropics/hh-rlhf (MIT licence; heed the publisher's warning, much of the text is upsetting).
Each row has two whole transcripts, `chosen` and `rejected`, that differ in the assistant's last reply. The prompt is what both
share up to and including the last "\\n\\nAssistant:", the replies are what follows. Rows where that does not hold, or where a reply
is empty, are left out and counted; nothing is repaired by guessing.

Only pref files are written: train_sft.py then imitates the chosen replies, and train_ppo.py takes its prompts from the pairs.
"""

import argparse
import gzip
import json
from pathlib import Path

TURN = "\n\nAssistant:"


def pair(chosen, rejected):
    """Two transcripts -> prompt, chosen reply, rejected reply, without white space at the end; else ValueError."""
    begins = [text.rfind(TURN) + len(TURN) for text in (chosen, rejected)]
    prompt = chosen[: begins[0]]
    if TURN not in chosen or rejected[: begins[1]] != prompt:
        raise ValueError("the prompts differ")
    replies = [text[begin:].rstrip() for text, begin in zip((chosen, rejected), begins)]
    if not all(replies):
        raise ValueError("a reply is empty")
    return prompt, *replies


def convert(path):
    """A published file -> rows of {"prompt", "chosen", "rejected"}, and how many rows were left out: {reason: count}."""
    rows, left_out = [], {}
    with gzip.open(path, "rt", encoding="utf-8") if str(path).endswith(".gz") else open(path, encoding="utf-8") as lines:
        for line in lines:
            transcripts = json.loads(line)
            try:
                rows.append(dict(zip(("prompt", "chosen", "rejected"), pair(transcripts["chosen"], transcripts["rejected"]))))
            except ValueError as reason:
                left_out[str(reason)] = left_out.get(str(reason), 0) + 1
    return rows, left_out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="a published train.jsonl.gz")
    parser.add_argument("val", nargs="?", help="the test.jsonl.gz beside it; without it, train_*.py hold out a share by themselves")
    parser.add_argument("--out", default="data/hh", help="folder to write into (default: %(default)s)")
    args = parser.parse_args()
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for split, path in (("train", args.train), ("val", args.val)):
            if path:
                rows, left_out = convert(path)
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (out / f"pref_{split}.jsonl").write_text(lines, encoding="utf-8", newline="\n")
                print(f"{out / f'pref_{split}.jsonl'}: {len(rows):,} rows; left out: {left_out or 'none'}")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        parser.exit(2, f"hh_rlhf.py: {path}: {error!r}; should be a file of hh-rlhf, one object with chosen and rejected a line\n")


if __name__ == "__main__":
    main()
