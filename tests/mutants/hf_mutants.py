"""Bugs of the bridge to the Hugging Face format, of checkpoints, and of how files are written and read.

catalogue.py explains what a Mutant holds.
"""

from catalogue import Mutant

HF, CHECKPOINTS, FILES = "test_hf.py::test_", "test_checkpoints.py::test_", "test_files.py::test_"

HF_MUTANTS = [
    Mutant(
        "square layers not transposed",
        [("if i > 1 and a.dim() == 2", "if a.shape != b.shape")],
        "common in converters of GPT-2, which is transposed: the shapes show it in all layers but one",
        "the output layer of every attention is mirrored, and nothing says so",
        HF + "an_imported_gpt2_gives_the_logits_and_ids_of_transformers",
        "plumbing/hf.py",
    ),
    Mutant(
        "tokens renumbered without their embeddings",
        [("weight.data.copy_(weight[ids])", "weight.data.copy_(weight)")],
        "a vocabulary whose special tokens come first, read by code that puts them last",
        "every word has the embedding of another word",
        HF + "an_imported_gpt2_gives_the_logits_and_ids_of_transformers",
        "plumbing/hf.py",
    ),
    Mutant(
        "weights that are missing are drawn at random",
        [
            (
                "for kind, names in info.items() for name in names]",
                'for kind in info for name in info["unexpected_keys"]]',
            )
        ],
        "from_pretrained(), which only warns",
        "a part of the model is noise",
        HF + "what_is_no_gpt2_is_refused_and_named",
        "plumbing/hf.py",
    ),
    Mutant(
        "a head of its own is dropped",
        [
            (
                "if not torch.equal(theirs.lm_head.weight, theirs.transformer.wte.weight):",
                "if False:",
            )
        ],
        "tied weights taken for granted",
        "the logits are those of another model",
        HF + "what_is_no_gpt2_is_refused_and_named",
        "plumbing/hf.py",
    ),
    Mutant(
        "only one way to make a token",
        [("for i in range(1, len(token))]", "for i in [len(token) - 1] if i]")],
        "exports of tiktoken's vocabularies, which hold no list of merges",
        "transformers cuts text into smaller tokens than those that the model was trained on",
        HF + "a_random_vocabulary_gives_the_same_ids_over_random_texts_and_comes_back",
        "plumbing/hf.py",
    ),
    Mutant(
        "padding with the end token",
        [('special["pad_token"] = "<|pad|>"', 'special["pad_token"] = END')],
        "common: pad = eos; transformers' classifiers read at the last token that is no padding",
        "the score of a padded row is read behind its end",
        HF + "an_exported_reward_model_gives_our_scores_of_texts_alone_or_padded",
        "plumbing/hf.py",
    ),
    Mutant(
        "text that spells the end ends an exported model's text",
        [('"split_special_tokens": True', '"split_special_tokens": False')],
        "tokenizers of transformers parse special tokens in user text unless they are told not to",
        "whoever types the end token closes the document, under transformers alone",
        HF + "a_random_vocabulary_gives_the_same_ids_over_random_texts_and_comes_back",
        "plumbing/hf.py",
    ),
    Mutant(
        "an export over another model",
        [
            (
                "if Path(folder).is_dir() and any(Path(folder).iterdir()) and not overwrite:",
                "if False:",
            )
        ],
        "save_pretrained(), which writes over what is there",
        "the model that a run began with is gone",
        HF + "a_model_that_is_there_is_replaced_on_request_alone",
        "plumbing/hf.py",
    ),
    Mutant(
        "a reward model's text without its end",
        [('f"$A $B {END}"', '"$A $B"')],
        "common: tokenizers of transformers append no end token to GPT-2's texts",
        "the score is read at a token at which it was never trained",
        HF + "an_exported_reward_model_gives_our_scores_of_texts_alone_or_padded",
        "plumbing/hf.py",
    ),
    Mutant(
        "an exported reward model without its mean",
        [("(model.score_head.bias - model.mean)", "model.score_head.bias")],
        "normalisation kept in a buffer that the other format has no place for",
        "all scores are off by a constant: no ranking shows it, every reward has it",
        HF + "an_exported_reward_model_gives_our_scores_of_texts_alone_or_padded",
        "plumbing/hf.py",
    ),
    Mutant(
        "a checkpoint that runs code",
        [("weights_only=True", "weights_only=False")],
        "torch.load() before version 2.6",
        "whoever sends a model can do anything on the machine that looks at it",
        CHECKPOINTS + "a_checkpoint_that_would_run_code_is_refused_and_does_not",
        "plumbing/checkpoints.py",
    ),
    Mutant(
        "dropout in a model that was loaded",
        [("model.to(device).eval()", "model.to(device)")],
        "common: eval() forgotten after loading",
        "scores and references are noisy",
        CHECKPOINTS + "a_checkpoint_brings_back_the_same_outputs_the_tokenizer_and_the_facts",
        "plumbing/checkpoints.py",
    ),
    Mutant(
        "a file written in place",
        [('open(beside, "wb")', 'open(path, "wb")'), ("        os.replace(beside, path)\n", "")],
        "torch.save() straight into the checkpoint",
        "a full disk, or a kill during a save, costs the old version and the new one",
        FILES + "a_file_that_cannot_be_written_leaves_the_old_one_as_it_was",
        "plumbing/files.py",
    ),
    Mutant(
        "renamed before it is on the disk",
        [("            os.fsync(file.fileno())\n", "")],
        "programs that wrote their settings on ext4, 2009: empty files after a power failure",
        "the new version is empty, and the old one is gone",
        FILES + "a_file_is_written_whole_beside_its_place_by_one_process_alone",
        "plumbing/files.py",
    ),
    Mutant(
        "one temporary file for all processes",
        [(".{os.getpid()}.tmp", ".tmp")],
        "common",
        "two runs that save at the same moment make one file of both",
        FILES + "a_file_is_written_whole_beside_its_place_by_one_process_alone",
        "plumbing/files.py",
    ),
    Mutant(
        "half a line ends the reading of a log",
        [("            continue\n", "            break\n")],
        "readers that take the first bad line for the end",
        "all that a resumed run has logged behind it is lost",
        FILES + "a_log_is_read_without_the_lines_that_are_none",
        "plumbing/files.py",
    ),
]
