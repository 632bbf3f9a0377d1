"""The bridge to the Hugging Face format: GPT-2 weights in, finished models out. Needs transformers.

    python train_sft.py --init gpt2 ...              starts from GPT-2, or from a folder
    python -m plumbing.hf export out/ppo.pt FOLDER   the policy: GPT2LMHeadModel and its tokenizer
    python -m plumbing.hf export out/rm.pt FOLDER    GPT2ForSequenceClassification with one label

As in minippo, no text is encoded as the end token. A reward model's tokenizer appends it, because
the score is read there, and encodes prompt and response separately if they are two arguments.
"""

from pathlib import Path

import torch

from data.files import UserError
from minippo import GPT, GPTConfig, RewardModel
from plumbing.models import load_checkpoint
from plumbing.settings import read_flags, script
from plumbing.text import Tokenizer

END = "<|endoftext|>"
# Their vocabularies show a byte as a character: itself if it can be printed, or one from U+0100 on.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = PRINTED + [byte for byte in range(256) if byte not in PRINTED]
CHARACTERS = dict(zip(BYTES, map(chr, PRINTED + [*range(256, 512)])))


def import_transformers():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@torch.no_grad()
def copy_trunk(source, target):
    """Our Trunk to their GPT2Model, or back: they list the same weights in the same order.

    The first two are embeddings. A linear layer of ours holds (out, in), one of theirs (in, out).
    """
    for i, (a, b) in enumerate(zip(source.parameters(), target.parameters(), strict=True)):
        b.copy_(a.T if i > 1 and a.dim() == 2 else a)


def read_vocabulary(theirs):
    """Their tokenizer -> ours, which merges in the order of the ids; ValueError if they differ."""
    ids, byte_of = theirs.get_vocab(), {character: byte for byte, character in CHARACTERS.items()}
    *words, end = sorted(ids, key=ids.get)
    if end != END:
        raise ValueError(f"the last token should be {END}")
    ours = Tokenizer([bytes(byte_of[character] for character in word) for word in words])
    texts = [token.decode(errors="ignore") for token in ours.tokens]
    text = "\n".join([*texts, "it's 12\n\n  e\u0301", END])
    if ours.encode(text) != theirs.encode(text, split_special_tokens=True):  # any text is text
        raise ValueError("its tokenizer splits text differently from GPT-2's")
    return ours


@torch.no_grad()
def read_gpt2(source):
    """A name or a local folder -> GPT, Tokenizer."""
    transformers = import_transformers()
    if not Path(source).is_dir():
        transformers.logging.enable_progress_bar()  # of a download
    try:
        theirs, info = transformers.GPT2LMHeadModel.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = read_vocabulary(transformers.AutoTokenizer.from_pretrained(source))
        c = theirs.config
        model = GPT(GPTConfig(c.vocab_size, c.n_positions, c.n_layer, c.n_head, c.n_embd))
        copy_trunk(theirs.transformer, model.trunk)
        tokens = torch.randint(c.vocab_size, (1, 9))
        gap = (theirs.eval()(tokens).logits - model(tokens)[0]).abs().max()
        if info["missing_keys"] or tokenizer.vocab_size != c.vocab_size or not gap <= 0.1:
            raise ValueError(f"weights or tokens are missing, or its logits are {gap:.2g} off")
    except Exception as error:  # each library has its own errors
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:140]
        hint = "give gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a folder with such a model"
        raise UserError(f"{source}: could not be read ({reason}); {hint}")
    return model, tokenizer


def write_tokenizer(tokenizer, folder, context, scorer):
    """tokenizer.json and its settings. scorer: of a reward model."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["".join(CHARACTERS[byte] for byte in token) for token in tokenizer.tokens]
    vocabulary = {word: i for i, word in enumerate(words)}
    # tiktoken joins any two neighbours that make a token, theirs only the pairs in its list.
    pairs = [(word[:i], word[i:]) for word in words for i in range(1, len(word))]
    merges = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    # Text that spells the end token is split into ordinary tokens.
    settings = {"model_max_length": context, "split_special_tokens": True, "eos_token": END}
    settings["model_input_names"] = ["input_ids", "attention_mask"]  # no types of tokens
    if scorer:
        settings["pad_token"] = "<|pad|>"
        ends = f"$A {END}", f"$A $B {END}", [(END, tokenizer.eos)]
        fast.post_processor = tokenizers.processors.TemplateProcessing(*ends)
    PreTrainedTokenizerFast(tokenizer_object=fast, **settings).save_pretrained(folder)


@torch.no_grad()
def export(path, folder):
    """Write a checkpoint in the Hugging Face format. A reward model gains a padding token and
    loses its score cap, which GPT2ForSequenceClassification cannot store."""
    transformers = import_transformers()
    model, tokenizer, _ = load_checkpoint(path, ("ppo", "sft", "rm"))
    c, trunk, scorer = model.config, model.trunk, isinstance(model, RewardModel)
    config = transformers.GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.context,
        n_embd=c.channels,
        n_layer=c.layers,
        n_head=c.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos,
        eos_token_id=tokenizer.eos,
    )
    kind = transformers.GPT2LMHeadModel
    if scorer:
        kind = transformers.GPT2ForSequenceClassification
        config.num_labels, config.problem_type = 1, "regression"  # a score, not its sigmoid
        config.vocab_size, config.pad_token_id = c.vocab_size + 1, c.vocab_size
    out = kind(config)
    if scorer:
        weight = trunk.token_embedding.weight
        weight.data = torch.nn.functional.pad(weight, (0, 0, 0, 1))
        # Their head has no bias: score = w . h. So w takes 1 / std, the last norm's bias the rest.
        w = model.score_head.weight[0] / model.std
        trunk.norm.bias += w * (model.score_head.bias - model.mean) / model.std / w.square().sum()
        out.score.weight.copy_(w[None])
    copy_trunk(trunk, out.transformer)
    out.save_pretrained(folder)
    write_tokenizer(tokenizer, folder, c.context, scorer)
    print(f"wrote {folder}: {kind.__name__}")


@script
def main():
    _, words = read_flags(__doc__, run=False, positional="export CHECKPOINT FOLDER")
    if len(words) != 3 or words[0] != "export":
        raise UserError("give three words: export CHECKPOINT FOLDER (-h explains them)")
    if Path(words[2]).exists():
        raise UserError(f"{words[2]}: already exists; give a new folder")
    export(*words[1:])


if __name__ == "__main__":
    main()
