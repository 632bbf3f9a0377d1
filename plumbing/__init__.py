"""Support code for the scripts; nothing here teaches RLHF. The first line of each module says what
is in it. Each imports only from those before it: settings, text, models (which imports hf where it
reads a GPT-2), page, run, report, hf.
"""
