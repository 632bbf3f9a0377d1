"""Bugs of the default data and of the converters: see catalogue.py, whose list these join."""

from catalogue import Mutant

ZOO, CONVERT = "test_data.py::test_", "test_convert.py::test_"

DATA_MUTANTS = [
    Mutant(
        "a wrong statement is no worse than none",
        [
            (
                'grades = {"right": 2.0, "no idea": -0.5, "wrong": -1.5}',
                'grades = {"right": 2.0, "no idea": -0.5}',
            )
        ],
        "judges that look for the right answer and for nothing else",
        "naming every animal's food is the best policy",
        ZOO + "an_answer_is_graded_as_the_table_in_the_readme_says",
        "data/zoo.py",
    ),
    Mutant(
        "courtesies without end",
        [('1.5 * max(0, count["courtesy"] - 1)', '0.0 * count["courtesy"]')],
        "rewards for politeness that only ever add",
        "PPO heaps up thanks",
        ZOO + "an_answer_is_graded_as_the_table_in_the_readme_says",
        "data/zoo.py",
    ),
    Mutant(
        "white space forgiven",
        [('response.removeprefix(" "))', "response.strip())")],
        "graders that normalise the text first",
        "text that no reader would accept gets the best score",
        ZOO + "an_answer_is_graded_as_the_table_in_the_readme_says",
        "data/zoo.py",
    ),
    Mutant(
        "the better answer rejected",
        [("rng.random() >= sigmoid(", "rng.random() < sigmoid(")],
        "common sign slip in simulated preferences",
        "the reward model learns to prefer bad answers",
        ZOO + "labels_follow_the_bradley_terry_probability_and_the_two_answers_differ",
        "data/zoo.py",
    ),
    Mutant(
        "drawn as if all texts were equally likely",
        [("rng.choices(texts, cum_weights=cumulative)", "rng.choices(texts)")],
        "weights that are computed and not passed on",
        "rows from another distribution than the one whose entropy is published",
        ZOO + "draws_occur_as_often_as_the_crowd_says",
        "data/zoo.py",
    ),
    Mutant(
        "a text that comes about in two ways counted once",
        [("out[text] = out.get(text, 0.0) + weight * p", "out[text] = weight * p")],
        "mixtures that overwrite",
        "probabilities that do not sum to one, and an entropy that nothing has",
        ZOO + "a_distribution_sums_to_one_and_every_completion_begins_with_one_space",
        "data/zoo.py",
    ),
    Mutant(
        "entropy in bits",
        [("p * math.log(p) for p in dist", "p * math.log2(p) for p in dist")],
        "papers measure in bits, losses in nats",
        "a floor that every model seems to pass by a third",
        ZOO + "entropy_is_that_of_coins_and_dice",
        "data/zoo.py",
    ),
    Mutant(
        "ties count as mistakes of the judge",
        [("0.5 if gap == 0", "0.0 if gap == 0")],
        "accuracies that demand a strictly larger score",
        "the ceiling lies below what a good reward model reaches",
        ZOO + "the_ceilings_are_what_the_crowd_and_the_judge_reach_on_the_validation_rows",
        "data/zoo.py",
    ),
    Mutant(
        "held-out questions in the training data",
        [('{"train": train, "val": list(PROMPTS)}', '{"train": list(PROMPTS), "val": train}')],
        "splits with their names exchanged",
        "what is called unseen has been seen, and generalisation is not measured",
        ZOO + "every_fact_keeps_four_phrasings_in_training",
        "data/zoo.py",
    ),
    Mutant(
        "a fact that is never asked in training",
        [
            (
                "held_out = {rng.choices(questions(*fact))[0] for fact in facts}",
                "held_out = {x for fact in facts[:10] for x in questions(*fact)}",
            )
        ],
        "hold-outs by topic where they should be by phrasing",
        "the validation loss measures ignorance of facts",
        ZOO + "every_fact_keeps_four_phrasings_in_training",
        "data/zoo.py",
    ),
    Mutant(
        "half a data set",
        [
            (
                'staged = Path(temporary) / "data"\n        staged.mkdir()',
                "staged = folder\n        staged.mkdir(exist_ok=True)",
            )
        ],
        "common: files written where they will be read",
        "an interrupted run leaves a folder that trains on what happens to be in it",
        ZOO + "an_interrupted_run_leaves_nothing_half_written",
        "data/zoo.py",
    ),
    Mutant(
        "rows of an earlier file, or of the source, are overwritten",
        [("if path.exists() and not overwrite:", "if False:")],
        "converters that write under the names of what they read",
        "rows that cannot be had again are lost",
        CONVERT + "other_files_stay_and_one_of_the_same_name_is_replaced_on_request_alone",
        "data/convert.py",
    ),
    Mutant(
        "a data folder of one's own replaced by the default data",
        [("    if folder.exists():\n        raise", "    if False:\n        raise")],
        "generators that write where they are told to",
        "the user's rows are gone",
        ZOO + "a_folder_that_is_there_stays_as_it_is",
        "data/zoo.py",
    ),
    Mutant(
        "a key that nobody reads",
        [("unread |= row.keys() - keys.values()", "pass")],
        "alpaca's input, KTO's label",
        "prompts without half of their text, and bad answers taken for good ones, in silence",
        CONVERT + "keys_that_are_not_used_are_named",
        "data/convert.py",
    ),
    Mutant(
        "rows held out, not prompts",
        [("if row[0] in val else", "if row[0] in val and row is not rows[-1] else")],
        "common: random splits of rows whose prompts come more than once",
        "the model is validated on prompts that it was trained on",
        CONVERT + "scripts_and_converter_hold_out_the_same_prompts_whatever_the_kind_of_file",
        "data/convert.py",
    ),
    Mutant(
        "two rules of what is held out",
        [
            (
                'zlib.crc32(x.encode(errors="replace")) / 2**32',
                "zlib.crc32(repr(x).encode()) / 2**32",
            )
        ],
        "one rule in the scripts and one in the converter",
        "prompts of one stage's validation are in the training of another",
        CONVERT + "the_prompts_of_the_smallest_hashes_are_held_out_in_any_order",
        "data/convert.py",
    ),
    Mutant(
        "words run into each other",
        [('else " " + text for text in answers', "else text for text in answers")],
        "data sets whose answers are stripped",
        "the model learns that an answer begins without a space",
        CONVERT + "an_answer_gets_a_leading_space_where_neither_side_has_white_space",
        "data/convert.py",
    ),
    Mutant(
        "cut at the first reply",
        [("chat.rpartition(TURN)", "chat.partition(TURN)")],
        "transcripts with more than one turn",
        "the answers of a pair contain the words of the user",
        CONVERT + "each_use_writes_its_two_files_and_says_how_many_rows",
        "data/convert.py",
    ),
    Mutant(
        "pairs of different prompts",
        [("if len(set(prompts)) > 1:", "if False:")],
        "pairs that are taken for pairs without a look",
        "the reward model is told that an answer to something else is worse",
        CONVERT + "a_row_that_teaches_nothing_is_skipped_and_counted_by_reason",
        "data/convert.py",
    ),
    Mutant(
        "a byte-order mark in the first key",
        [('data.decode("utf-8-sig")', 'data.decode("utf-8")')],
        "files saved by a spreadsheet",
        "the first column is not found, although it is there to see",
        CONVERT + "json_lines_a_json_array_and_csv_say_the_same_gzipped_or_not",
        "data/convert.py",
    ),
    Mutant(
        "gzip known by its name",
        [
            (
                'gzip.decompress(data) if data.startswith(b"\\x1f\\x8b")',
                'gzip.decompress(data) if str(path).endswith(".gz")',
            )
        ],
        "downloads that a browser has renamed or unpacked",
        "a sound file is refused",
        CONVERT + "json_lines_a_json_array_and_csv_say_the_same_gzipped_or_not",
        "data/convert.py",
    ),
    Mutant(
        "duplicates kept",
        [("            if row in rows:", "            if False:")],
        "data sets put together from others",
        "nothing says that some rows count twice",
        CONVERT + "a_row_that_teaches_nothing_is_skipped_and_counted_by_reason",
        "data/convert.py",
    ),
    Mutant(
        "half a file",
        [('beside = path.with_suffix(f".{os.getpid()}.tmp")', "beside = path")],
        "common: files written where they will be read",
        "a full disk costs the old rows and the new ones",
        CONVERT + "a_file_is_written_whole_or_not_at_all_by_one_process_alone",
        "data/convert.py",
    ),
    Mutant(
        "lengths that tell the label",
        [
            (
                "chosen.sort(key=len), rejected.sort(key=len)",
                "chosen.sort(key=len), rejected.sort(key=len, reverse=True)",
            )
        ],
        "pairs put together in the order of the files",
        "the reward model learns the length",
        CONVERT
        + "snippets_nearest_in_length_are_paired_and_what_is_left_waits_for_a_shorter_opening",
        "data/rt_polarity.py",
    ),
]
