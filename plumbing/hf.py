"""The bridge to the Hugging Face format: GPT-2 weights in, finished models out. Needs the package transformers.

    python train_sft.py --init gpt2 ...                 starts from GPT-2 (or gpt2-medium, -large, -xl, or a folder)
    python -m plumbing.hf export out/ppo.pt FOLDER               the policy as GPT2LMHeadModel, with its tokenizer
    python -m plumbing.hf export out/rm.pt FOLDER                the reward model as GPT2ForSequenceClassification with one label
    python sample.py FOLDER ...                                  samples from such a policy, or from any other GPT-2

A trunk of minippo is a GPT-2; only the names differ, and that GPT-2 keeps the weights of its linear layers transposed. The
tokenizer of an exported reward model appends the end token, which the score is read at. tokenizer(prompt, response) encodes
the two apart, as we do; tokenizer(prompt + response) gives the same ids, unless a token crosses the border.
"""

import json
import math
from pathlib import Path

import torch

from minippo import GPT, GPTConfig, RewardModel
from plumbing.checkpoints import load_checkpoint
from plumbing.settings import UserError, read_flags, run_script
from plumbing.text import Tokenizer

END = "<|endoftext|>"
NAMES = {  # ours: theirs, inside a block
    "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
    "norm2": "ln_2", "mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj",
}  # fmt: skip


def name_pairs(layers):
    """-> (name in our Trunk, name in their GPT2Model) of every weight."""
    yield from (
        ("token_embedding.weight", "wte.weight"),
        ("position_embedding.weight", "wpe.weight"),
    )
    yield from ((f"norm.{kind}", f"ln_f.{kind}") for kind in ("weight", "bias"))
    for i in range(layers):
        for ours, theirs in NAMES.items():
            yield from (
                (f"blocks.{i}.{ours}.{kind}", f"h.{i}.{theirs}.{kind}")
                for kind in ("weight", "bias")
            )


def turned(name, weight):
    """Their linear layers (Conv1D) hold (in, out), ours (out, in)."""
    return weight.T if name.endswith("weight") and ".c_" in name else weight


def need_transformers(bars=False):
    """The package; it keeps its warnings to itself, and unless `bars` its progress bars too."""
    try:
        import transformers
    except ImportError:
        raise UserError("the package transformers is missing; pip install transformers")
    transformers.logging.set_verbosity_error()
    if not bars:
        transformers.logging.disable_progress_bar()
    return transformers


# Byte-level BPE files spell each byte as a character that can be printed: itself, or one from U+0100 on.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHARACTERS = {b: chr(b) for b in PRINTED}
CHARACTERS |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in CHARACTERS)}
BYTES = {character: b for b, character in CHARACTERS.items()}


def spell(token):
    return "".join(CHARACTERS[b] for b in token)


def read_vocabulary(source, file):
    """What a tokenizer.json holds -> Tokenizer, and the id in that file of each of its tokens, the end token last.

    The file may number its tokens in any order. UserError unless it is byte-level BPE, cuts text as GPT-2 does, and has no
    further tokens.
    """
    model, cut = file["model"], file["pre_tokenizer"] or {}
    as_gpt2 = (
        model["type"] == "BPE"
        and cut.get("type") == "ByteLevel"
        and cut["use_regex"]
        and not cut["add_prefix_space"]
    )
    if not as_gpt2 or file["normalizer"]:
        raise UserError(
            f"{source}: its tokenizer does not cut text into bytes and words as GPT-2's does"
        )
    ids = model["vocab"] | {token["content"]: token["id"] for token in file["added_tokens"]}
    # tiktoken merges in the order of the ids. So our ids are those of the bytes, then of what the merges make, in their order.
    words = sorted(CHARACTERS.values(), key=lambda character: ids.get(character, 0))
    words = [*words, *dict.fromkeys(a + b for a, b in model["merges"]), END]
    rank = {word: i for i, word in enumerate(words)}
    odd = [f"{word} is missing" for word in words if word not in ids]
    odd += [
        f"{word} has the id {i}" for word, i in ids.items() if word not in rank or i >= len(words)
    ]
    odd += [
        f"{a + b} is merged before {a} or {b}"
        for a, b in model["merges"]
        if rank[a + b] < max(rank.get(a, 0), rank.get(b, 0))
    ]
    if odd:
        rule = f"should hold the 256 bytes, one token for each merge of earlier ones, and {END}"
        found = f"{', '.join(odd[:3])}{', ...' * (len(odd) > 3)}"
        raise UserError(
            f"{source}: its vocabulary (tokenizer.json, or vocab.json and merges.txt) {rule}; here {found}"
        )
    return Tokenizer([bytes(BYTES[character] for character in word) for word in words[:-1]]), [
        ids[word] for word in words
    ]


def check_gpt2(source, theirs, info):
    """UserError unless their model computes what ours does, and has all its weights from the files."""
    c = theirs.config
    plain = (
        not (c.scale_attn_by_inverse_layer_idx or c.reorder_and_upcast_attn)
        and c.scale_attn_weights
    )
    if (
        c.activation_function != "gelu_new"
        or c.n_inner not in (None, 4 * c.n_embd)
        or c.layer_norm_epsilon != 1e-5
        or not plain
    ):
        raise UserError(
            f"{source}: a GPT-2 with another activation, width or scaling than OpenAI's"
        )
    odd = [
        *info["missing_keys"],
        *info["unexpected_keys"],
        *(name for name, *_ in info["mismatched_keys"]),
    ]
    odd = sorted(
        name for name in odd if not name.endswith("attn.masked_bias")
    )  # a constant in old files
    if odd:
        wanted = "those of a GPT-2 language model, as config.json describes it"
        raise UserError(
            f"{source}: its weights are not {wanted}; missing, unknown or of another size: {', '.join(odd)[:120]}"
        )
    if not torch.equal(theirs.lm_head.weight, theirs.transformer.wte.weight):
        raise UserError(
            f"{source}: lm_head has weights of its own; here it shares those of the token embedding, wte, as in GPT-2"
        )


def read_gpt2(source, dropout=0.0):
    """A name (gpt2, gpt2-medium, gpt2-large, gpt2-xl) or a local folder -> GPT in train mode, Tokenizer."""
    transformers = need_transformers(bars=not Path(source).is_dir())  # a download takes long
    try:
        kind = transformers.GPT2LMHeadModel
        theirs, info = kind.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True
        )
        file = json.loads(
            transformers.AutoTokenizer.from_pretrained(source).backend_tokenizer.to_str()
        )
    except Exception as error:  # a missing file, a broken download, a wrong format: each library has its own errors
        reason = str(error).strip().partition("\n")[0][:120]
        hint = "without a network, give a folder that holds config.json, model.safetensors and the vocabulary"
        raise UserError(f"{source}: could not be read ({type(error).__name__}: {reason}); {hint}")
    check_gpt2(source, theirs, info)
    tokenizer, ids = read_vocabulary(source, file)
    c, weights = theirs.config, theirs.transformer.state_dict()
    if c.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{source}: weights for {c.vocab_size} tokens, a vocabulary of {tokenizer.vocab_size}"
        )
    weights["wte.weight"] = weights["wte.weight"][ids]
    model = GPT(
        GPTConfig(c.vocab_size, c.n_positions, c.n_layer, c.n_head, c.n_embd, dropout=dropout)
    )
    model.trunk.load_state_dict(
        {ours: turned(name, weights[name]) for ours, name in name_pairs(c.n_layer)}
    )
    return model, tokenizer


def write_tokenizer(tokenizer, folder, context, scorer):
    """As a fast tokenizer: tokenizer.json and its settings. For a reward model it pads, and ends what it encodes."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ranks = {token: rank for rank, token in enumerate(tokenizer.tokens)}
    # tiktoken joins any two neighbours that spell a token, Hugging Face's BPE only the pairs in its list: so list them all.
    halves = [(token[:i], token[i:]) for token in tokenizer.tokens for i in range(1, len(token))]
    merges = [
        (spell(a), spell(b))
        for a, b in halves
        if ranks.get(a, math.inf) < ranks[a + b] > ranks.get(b, math.inf)
    ]
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    fast = Fast(models.BPE(vocab=vocabulary, merges=merges))
    fast.pre_tokenizer, fast.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = {"eos_token": END, "bos_token": END, "unk_token": END}
    if scorer:
        special["pad_token"] = "<|pad|>"
        ends = {
            "single": f"$A {END}",
            "pair": f"$A $B {END}",
            "special_tokens": [(END, tokenizer.eos)],
        }
        fast.post_processor = processors.TemplateProcessing(**ends)
    PreTrainedTokenizerFast(
        tokenizer_object=fast, model_max_length=context, **special
    ).save_pretrained(folder)


def export(path, folder):
    """Write a checkpoint in the Hugging Face format. A reward model gets one more token, for padding behind the end token."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise UserError(f"{folder}: a file; should be a folder, new or not")
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
    out, weights = kind(theirs), model.trunk.state_dict()
    if scorer:
        padded = torch.cat([weights["token_embedding.weight"], torch.zeros(1, config.channels)])
        weights["token_embedding.weight"] = padded
        # Their head has no bias: score = w . h. So w takes 1 / std, and the constant goes into the last norm's bias.
        w = model.score_head.weight[0] / model.std
        constant = (model.score_head.bias - model.mean) / model.std
        weights["norm.bias"] = weights["norm.bias"] + w * constant / w.square().sum()
        out.score.weight.data.copy_(w[None])
    state = {
        name: turned(name, weights[ours]).contiguous() for ours, name in name_pairs(config.layers)
    }
    out.transformer.load_state_dict(state)
    out.save_pretrained(folder)
    write_tokenizer(tokenizer, folder, config.context, scorer)
    print(
        f"wrote {folder}: {kind.__name__}, {sum(p.numel() for p in out.parameters()) / 1e6:.2f} M parameters"
    )


def read_scorer(folder):
    """An exported reward model as a function of B prompts and B responses that have ended -> B floats."""
    transformers = need_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.no_grad()
    def score(prompts, responses):
        rows = tokenizer(
            prompts, responses, padding=True, return_tensors="pt"
        )  # it appends the end token
        return model(rows["input_ids"], attention_mask=rows["attention_mask"]).logits[:, 0].tolist()

    return score


def main():
    (words,) = read_flags(__doc__, positional="export CHECKPOINT FOLDER")
    if len(words) != 3 or words[0] != "export":
        raise UserError("wanted are three words: export CHECKPOINT FOLDER (-h explains them)")
    export(*words[1:])


if __name__ == "__main__":
    run_script(main)
