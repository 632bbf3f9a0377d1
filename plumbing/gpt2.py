"""GPT-2 in, and out again. Needs transformers.

python train_sft.py --init gpt2 ...                       or a folder with a GPT-2
python -m plumbing.gpt2 out/gpt2/ppo.pt gpt2 FOLDER       the trained policy, with gpt2's tokenizer
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from data.rows import UserError
from minippo import GPT, GPTConfig
from plumbing.models import load_checkpoint
from plumbing.settings import run_script
from plumbing.text import Tokenizer

# Their vocabularies show a byte as a character: itself if it can be printed, or one from U+0100 on.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = PRINTED + [byte for byte in range(256) if byte not in PRINTED]
BYTE_OF = dict(zip(map(chr, PRINTED + [*range(256, 512)]), BYTES))


@torch.no_grad()
def copy_trunk(source, target):
    """Our Trunk to their GPT2Model, or back: both list the same weights in the same order. A linear
    layer of ours holds (out, in), one of theirs (in, out)."""
    pairs = zip(source.parameters(), target.parameters(), strict=True)
    for i, (ours, theirs) in enumerate(pairs):
        embedding = i < 2
        theirs.copy_(ours.T if ours.dim() == 2 and not embedding else ours)


def load_theirs(source):
    """A name or a folder -> GPT2LMHeadModel, their tokenizer, ours."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    try:
        model = GPT2LMHeadModel.from_pretrained(source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
        ids = tokenizer.get_vocab()
        *words, end = sorted(ids, key=ids.get)
        ours = Tokenizer([bytes(BYTE_OF[character] for character in word) for word in words])
        if end != "<|endoftext|>":
            raise ValueError(f"the last token is {end!r}")
    except Exception as error:  # each library has its own errors
        raise UserError(f"{source}: not a GPT-2 ({type(error).__name__}: {str(error)[:100]})")
    return model.eval(), tokenizer, ours


@torch.no_grad()
def read_gpt2(source, bfloat16=False):
    """A name or a folder -> GPT, Tokenizer. It brings its own size and vocabulary."""
    theirs, _, tokenizer = load_theirs(source)
    c = theirs.config
    size = c.vocab_size, c.n_positions, c.n_layer, c.n_head, c.n_embd
    model = GPT(GPTConfig(*size))
    copy_trunk(theirs.transformer, model.trunk)
    tokens = torch.randint(c.vocab_size, (1, 9))
    logits, _ = model(tokens, torch.ones_like(tokens).bool())
    gap = (theirs(tokens).logits[0] - logits).abs().max()
    if tokenizer.vocab_size != c.vocab_size or not gap <= 0.1:
        raise UserError(f"{source}: not a plain GPT-2; its logits are {gap:.2g} off")
    model.config.bfloat16 = bfloat16
    return model, tokenizer


@dataclass
class Config:
    checkpoint: Path
    source: str  # the GPT-2 that it began as: a name or a folder
    folder: Path  # a new one, for the model


def main(config):
    if config.folder.exists():
        raise UserError(f"{config.folder}: exists already; give a new folder")
    policy, tokenizer, _ = load_checkpoint(config.checkpoint, ["ppo", "sft"])
    theirs, their_tokenizer, ours = load_theirs(config.source)
    if ours.tokens != tokenizer.tokens:
        raise UserError(f"{config.checkpoint}: did not begin as {config.source}: other vocabulary")
    copy_trunk(policy.trunk, theirs.transformer)
    theirs.save_pretrained(config.folder)
    their_tokenizer.save_pretrained(config.folder)
    print(f"wrote {config.folder}")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
