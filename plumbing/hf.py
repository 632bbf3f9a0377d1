"""The bridge to the Hugging Face format: GPT-2 weights in, finished models out. Needs the package transformers.

    python train_sft.py --init gpt2 ...                 starts from GPT-2 (or gpt2-medium, -large, -xl, or a folder)
    python -m plumbing.hf export out/ppo.pt FOLDER               the policy as GPT2LMHeadModel, with its tokenizer
    python -m plumbing.hf export out/rm.pt FOLDER                the reward model as GPT2ForSequenceClassification with one label

A trunk of minippo is a GPT-2; only the names differ, and that GPT-2 keeps the weights of its linear layers transposed.
"""

import argparse
import json
import math
from pathlib import Path

import tiktoken
import torch

from minippo import GPT, GPTConfig, RewardModel
from plumbing.checkpoints import load_checkpoint
from plumbing.settings import UserError, run_script
from plumbing.text import Tokenizer

END = "<|endoftext|>"
NAMES = {  # ours: theirs, inside a block
    "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
    "norm2": "ln_2", "mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj",
}  # fmt: skip


def name_pairs(layers):
    """-> (name in our Trunk, name in their GPT2Model) of every weight."""
    yield from (("token_embedding.weight", "wte.weight"), ("position_embedding.weight", "wpe.weight"))
    yield from ((f"norm.{kind}", f"ln_f.{kind}") for kind in ("weight", "bias"))
    for i in range(layers):
        for ours, theirs in NAMES.items():
            yield from ((f"blocks.{i}.{ours}.{kind}", f"h.{i}.{theirs}.{kind}") for kind in ("weight", "bias"))


def turned(name, weight):
    """Their linear layers (Conv1D) hold (in, out), ours (out, in)."""
    return weight.T if name.endswith("weight") and ".c_" in name else weight


def need_transformers():
    try:
        import transformers
    except ImportError:
        raise UserError("the package transformers is missing; pip install transformers")
    return transformers


# Byte-level BPE files spell each byte as a character that can be printed: itself, or one from U+0100 on.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHARACTERS = {b: chr(b) for b in PRINTED}
CHARACTERS |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in CHARACTERS)}
BYTES = {character: b for b, character in CHARACTERS.items()}


def spell(token):
    return "".join(CHARACTERS[b] for b in token)


def read_vocabulary(folder):
    """tokenizer.json, or vocab.json and merges.txt, of a folder -> Tokenizer. UserError unless it is a GPT-2 vocabulary."""
    folder = Path(folder)
    try:
        if (folder / "vocab.json").exists():
            ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
            lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
            merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        else:
            model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
            ids = model["vocab"]
            merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        words = {i: word for word, i in ids.items() if word not in (END, "<|pad|>")}
        tokens = [bytes(BYTES[c] for c in words[i]) for i in range(len(words))]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{folder}: no GPT-2 vocabulary ({error!r}); wanted are vocab.json and merges.txt, or tokenizer.json")
    # tiktoken merges in the order of the ids, so that order must be the order of the merges.
    made = list(dict.fromkeys(ids.get(a + b) for a, b in merges))
    if made != list(range(256, len(tokens))) or ids.get(END, len(tokens)) != len(tokens):
        raise UserError(f"{folder}: the ids of this vocabulary are not in the order of its merges, with {END} last, as GPT-2's are")
    return Tokenizer(tokens)


def read_gpt2(source):
    """A name (gpt2, gpt2-medium, gpt2-large, gpt2-xl) or a local folder -> GPT in train mode, Tokenizer."""
    transformers = need_transformers()
    try:
        theirs = transformers.GPT2LMHeadModel.from_pretrained(source)
        if Path(source).is_dir():
            tokenizer = read_vocabulary(source)
        else:
            ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
            tokenizer = Tokenizer(sorted(ranks, key=ranks.get))
    except UserError:
        raise
    except Exception as error:  # a missing file, a broken download, a wrong format: each library has its own errors
        reason = str(error).strip().splitlines()[0][:120]
        hint = "without a network, give a folder that holds config.json, model.safetensors and the vocabulary"
        raise UserError(f"--init {source}: could not be read ({type(error).__name__}: {reason}); {hint}")
    c = theirs.config
    plain = not (c.scale_attn_by_inverse_layer_idx or c.reorder_and_upcast_attn) and c.scale_attn_weights
    if c.activation_function != "gelu_new" or c.n_inner not in (None, 4 * c.n_embd) or c.layer_norm_epsilon != 1e-5 or not plain:
        raise UserError(f"--init {source}: a GPT-2 with another activation, width or scaling than OpenAI's")
    if c.vocab_size != tokenizer.vocab_size:
        raise UserError(f"--init {source}: weights for {c.vocab_size} tokens, a vocabulary of {tokenizer.vocab_size}")
    model = GPT(GPTConfig(c.vocab_size, c.n_positions, c.n_layer, c.n_head, c.n_embd))
    weights = theirs.transformer.state_dict()
    model.trunk.load_state_dict({ours: turned(name, weights[name]) for ours, name in name_pairs(c.n_layer)})
    return model, tokenizer


def write_tokenizer(tokenizer, folder, pad):
    """As a fast tokenizer: tokenizer.json and its settings. With `pad`, one more token for padding."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ranks = {token: rank for rank, token in enumerate(tokenizer.tokens)}
    # tiktoken joins any two neighbours that spell a token, Hugging Face's BPE only the pairs in its list: so list them all.
    halves = [(token[:i], token[i:]) for token in tokenizer.tokens for i in range(1, len(token))]
    merges = [(spell(a), spell(b)) for a, b in halves if ranks.get(a, math.inf) < ranks[a + b] > ranks.get(b, math.inf)]
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    fast = Fast(models.BPE(vocab=vocabulary, merges=merges))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"eos_token": END, "bos_token": END, "unk_token": END} | ({"pad_token": "<|pad|>"} if pad else {})
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **special)
    wrapped.save_pretrained(folder)


def export(path, folder):
    """Write a checkpoint in the Hugging Face format. A reward model gets one more token, for padding behind the end token."""
    transformers = need_transformers()
    model, tokenizer, _ = load_checkpoint(path, ("ppo", "sft", "rm"))
    config, scorer = model.config, isinstance(model, RewardModel)
    theirs = transformers.GPT2Config(
        vocab_size=config.vocab_size + scorer, n_positions=config.context, n_embd=config.channels, n_layer=config.layers,
        n_head=config.heads, resid_pdrop=config.dropout, embd_pdrop=config.dropout, attn_pdrop=config.dropout,
        bos_token_id=tokenizer.eos, eos_token_id=tokenizer.eos,
        **({"num_labels": 1, "pad_token_id": config.vocab_size} if scorer else {}),
    )  # fmt: skip
    kind = transformers.GPT2ForSequenceClassification if scorer else transformers.GPT2LMHeadModel
    out, weights = kind(theirs).eval(), model.trunk.state_dict()
    if scorer:
        padded = torch.cat([weights["token_embedding.weight"], torch.zeros(1, config.channels)])
        weights["token_embedding.weight"] = padded
        # Their head has no bias: score = w . h. So w takes 1 / std, and the constant goes into the last norm's bias.
        w = model.score_head.weight[0] / model.std
        constant = (model.score_head.bias - model.mean) / model.std
        weights["norm.bias"] = weights["norm.bias"] + w * constant / w.square().sum()
        out.score.weight.data.copy_(w[None])
    state = {name: turned(name, weights[ours]).contiguous() for ours, name in name_pairs(config.layers)}
    out.transformer.load_state_dict(state, strict=False)
    out.save_pretrained(folder)
    write_tokenizer(tokenizer, folder, pad=scorer)
    print(f"wrote {folder}: {kind.__name__}, {sum(p.numel() for p in out.parameters()) / 1e6:.2f} M parameters")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["export"])
    parser.add_argument("checkpoint")
    parser.add_argument("folder")
    args = parser.parse_args()
    with torch.no_grad():
        export(args.checkpoint, args.folder)


if __name__ == "__main__":
    run_script(main)
