"""What the scripts need and no reader of the algorithm does. Each floor imports from those above it.

errors        what a user can put right, and how a script ends
files         files that are whole, and logs
tokenizer     text to token ids and back
rows          data folders, rows of token ids, padding
checkpoints   models in files
fast          the networks of minippo.py with less work: no padding, shared beginnings once, a cache
settings      flags from dataclasses, and the machine
hf            the bridge to the Hugging Face format
training      optimizer, batches, and work in pieces where memory is short
models        the models that stage 3 needs; a reward model, or a function of texts
state         the log of a run, stopping and going on, how long it lasts
report        what train_ppo.py ends with
recorder      a few responses token by token, recorded while it trains
page          the run as a page for the browser (page.html is its template)
watch         what train_ppo.py looks at: does the start make sense, does the KL?
token_table   what sample.py --trace shows of each token
reading       minippo.py with its numbers beside it
"""
