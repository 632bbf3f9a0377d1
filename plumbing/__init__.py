"""What the scripts share and what teaches nothing about RLHF.

settings.py  flags, and errors in one line        text.py   the tokenizer, rows as ids, batches
files.py     whole files, state and log of a run  watch.py  checks and messages of a PPO run
models.py    checkpoints, rewards of texts        gpt2.py   GPT-2 in and out
page.py      out/report.html, from page.html
"""
