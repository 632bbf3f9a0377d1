"""Support code: no PPO here. Each module imports only from those above it.

errors        what a user can put right, and how a script ends
flags         settings from the command line, and the machine
tokenizer     text to token ids and back
rows          rows of text as rows of token ids: encoding, padding, batches
checkpoints   models in files
packing       the networks of minippo.py without computing padding
hf            the bridge to the Hugging Face format
models        the models that stage 3 needs; a reward model, or a function of texts
training      optimizer, learning rate, work in pieces where memory is short, validation
state         the log of a run, stopping and going on
page          the run as a page for the browser (page.html is its template)
watch         what follows an iteration of PPO: warnings, a few responses token by token
report        what train_ppo.py ends with
reading       minippo.py with its numbers beside it
"""
