"""Comparing two records, or two training runs: NumPy alone, no torch, no model.

two_records   compare: the steps in order, the verdict
comparable    is it one model on the same inputs, and under which names
pairing       which op of one forward is which of the other
differences   how far results that belong together are apart; what cannot both be true
flip          can a shift of the logits change the token; margins by step
two_runs      the same of two training runs
drift_report  the result as text, JSON and page

Imports recording.record_format, training_format and tensors.
"""
