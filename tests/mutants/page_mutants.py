"""Bugs of what shows a run: plumbing/recorder.py, page.py and token_table.py."""

from catalogue import Mutant

RECORDER, PAGE, TABLE = (
    "test_recorder.py::test_",
    "test_page.py::test_",
    "test_token_table.py::test_",
)
NUMBERS = RECORDER + "every_number_is_what_the_functions_of_minippo_give"

PAGE_MUTANTS = [
    Mutant(
        "tracked responses evaluated after the update",
        [
            ("        self.look_ahead(policy, ref, config)\n\n    def look", "\n    def look"),
            (
                "        self.step += 1\n",
                "        self.step += 1\n        self.step -= 1\n        self.look_ahead(policy, ref, config)\n        self.step += 1\n",
            ),
        ],
        "common, from evaluating when one records",
        "log pi and log old are the same, and every ratio is 1",
        NUMBERS,
        "plumbing/recorder.py",
    ),
    Mutant(
        "whitened over the tracked responses alone",
        [
            ("config, whiten=False)", "config, whiten=True)"),
            ('x | {"whitened": (x["advantages"] - line["mean"]) / line["std"]}', "x"),
        ],
        "any viewer that calls whiten() on what it shows",
        "the page shows pushes that no token has got",
        NUMBERS,
        "plumbing/recorder.py",
    ),
    Mutant(
        "KL against the policy after the update",
        [('numbers["kl"] = numbers["log_old"]', 'numbers["kl"] = numbers["log_pi"]')],
        "common, where there is one variable for old and new log-probabilities",
        "reward and KL of a token do not fit each other",
        NUMBERS,
        "plumbing/recorder.py",
    ),
    Mutant(
        "lines of an interrupted run twice",
        [('if line["step"] <= step]', 'if line["step"] <= step + 1]')],
        "logs that are appended to after --resume",
        "an iteration stands in the file twice",
        RECORDER
        + "what_is_beyond_the_step_of_a_resumed_run_goes_and_nothing_before_its_first_line",
        "plumbing/recorder.py",
    ),
    Mutant(
        "tracked responses lost at a resume",
        [('self.lines[-1].get("tracked", []) if self.lines else []', "[]")],
        "common: state that only the memory holds",
        "the page compares different responses",
        RECORDER + "a_run_that_goes_on_leaves_the_same_file",
        "plumbing/recorder.py",
    ),
    Mutant(
        "PPO's advantages for another algorithm",
        [('self.settings.get("algorithm", "PPO") in ("PPO", "")', "True")],
        "a viewer that knows one algorithm",
        "the page explains RLOO by numbers that RLOO never had",
        RECORDER + "another_algorithm_has_what_it_credits_and_tracks_nothing",
        "plumbing/recorder.py",
    ),
    Mutant(
        "a text can end the script",
        [('.replace("<", "\\\\u003c")', "")],
        "common: JSON pasted into a page",
        "a response runs as a script in the reader's browser",
        PAGE + "no_text_ends_the_script_and_no_number_is_beyond_json",
        "plumbing/page.py",
    ),
    Mutant(
        "the report of an earlier run",
        [('if report and report["seconds"].get("ppo") != ppo[-1].get("seconds"):', "if False:")],
        "common, where a run writes into a folder that was used before",
        "the page shows the result of another run",
        PAGE + "while_a_run_goes_on_its_page_can_be_written",
        "plumbing/page.py",
    ),
    Mutant(
        "the last lines of a long log dropped",
        [
            ("size = max(1, math.ceil(len(rows) / points))", "size = max(1, len(rows) // points)"),
            (
                "for i in range(0, len(rows), size)]",
                "for i in range(0, points * size, size) if rows[i:]]",
            ),
        ],
        "common, from cutting a list into equal parts",
        "the curves end before the run does",
        PAGE + "a_long_log_is_averaged_and_what_is_no_number_left_out",
        "plumbing/page.py",
    ),
    Mutant(
        "a response whitened with the others",
        [
            (
                "torch.cat([whiten(*row) for row in rows])",
                'whiten(batch["advantages"], batch["mask"])',
            )
        ],
        "whitening is written for a batch",
        "the numbers of a response change with the other samples",
        TABLE + "every_number_of_a_table_is_what_its_definition_gives",
        "plumbing/token_table.py",
    ),
]
