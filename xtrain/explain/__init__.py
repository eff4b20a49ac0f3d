"""`python -m xtrain.explain MODEL`: what xtrain.compile finds in a model and does to its graph.

xtrain/subject.py builds MODEL, with the inputs of one forward.

__main__.py   flags and exit codes; no torch
capture.py    one training forward, watched: graphs before and after, every pass between
graphs.py     a graph as plain data; what became of each op: by which pass, replaced by what
output.py     tables, and these as text, JSON and one HTML page (page.html, on xtrain/report/)
"""

from __future__ import annotations
