"""`python -m xtrain.explain MODEL`: what xtrain.compile finds in a model and does to its graph.

xtrain/subject.py builds MODEL, with the inputs of one forward.

command.py    flags and exit codes; no torch
capture.py    one training forward, watched: graphs before and after, every pass between
snapshot.py   a graph as plain data
changes.py    what became of each op: by which pass, replaced by what
text.py       the report for a terminal
page.py       the report as one HTML page;  page_style.py, page_script.py what it carries along
"""

from __future__ import annotations
