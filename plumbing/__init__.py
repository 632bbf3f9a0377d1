"""Support code for the scripts. Of RLHF's training, it holds set_score_scale and add_critic (models)
and adam (run). The first line of a module says what is in it. Each imports only from those before
it: settings, text, models (which imports hf where it reads a GPT-2), page, run, report, hf.
"""
