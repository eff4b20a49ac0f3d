"""Comparing two records, or two training runs: NumPy alone, no torch, no model.

records         compare: the steps in order, the verdict; assert_no_drift
comparable      is it one model on the same inputs, and under which names
contradictions  what two places say that cannot both be true
pairing         which op of one forward is which of the other
differences     how far results that belong together are apart
flip            can a shift of the logits change the token
report          the result as text, JSON and page
training        the same of two training runs

Imports recording.format and recording.tensors; assert_no_drift also records.
"""
