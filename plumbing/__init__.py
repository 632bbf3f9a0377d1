"""Support code for the scripts; nothing here teaches RLHF. Seven modules, each of which imports
only from those above it (models imports hf where it reads a GPT-2):

settings   flags from the command line, and errors in one line
text       tokenizer, rows as token ids, padding
models     models in files, those that a stage starts from, rewards that are functions
page       what one sees of PPO while it trains: warnings, responses, a page for the browser
run        the optimizer, the steps of a run across interruptions, log, screen, best weights
report     a check before PPO, and the measurements at its end
hf         the bridge to the Hugging Face format
"""
