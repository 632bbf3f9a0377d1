"""What the scripts need and no reader of the algorithm does.

text         tokenizer, JSON lines, data folders, rows of token ids
settings     flags from dataclasses, the machine, errors that a user can put right
files        files written whole or not at all; logs
checkpoints  models in files
training     optimizer, learning rate, batches, sampling in pieces
progress     the steps of a run: its length, its log, its best model, stopping and going on
fast         the same networks with less work: no padding, shared beginnings once, a cache
watch        what train_ppo.py looks at: does the start make sense, does the KL?
rewards      a reward model, or a function of texts, as what rollout() calls
report       what train_ppo.py ends with
tracing      what sample.py --trace shows of each token
plot         the curves of runs as a picture
board        the same for TensorBoard
traces       a few responses token by token, recorded while it trains
page         the run as a page for the browser (page.html is its template)
hf           the bridge to the Hugging Face format
"""
