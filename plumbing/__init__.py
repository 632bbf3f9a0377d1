"""What the scripts share and what teaches nothing about RLHF.

settings.py  flags, and errors in one line          text.py     the tokenizer, rows as ids
files.py     whole files, log and state of a run    batches.py  which rows form a batch
models.py    checkpoints, rewards of texts          watch.py    checks and messages of a PPO run
gpt2.py      GPT-2 in and out                       report.py   responses in numbers, the table
                                                    page.py     out/report.html
"""
