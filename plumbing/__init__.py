"""Support code for the scripts. Of RLHF, it holds models.set_score_scale and run.adam. The first
line of each module says what is in it. Each imports only from those before it: settings, text,
models (which imports hf where it reads a GPT-2), page, run, report, hf.
"""
