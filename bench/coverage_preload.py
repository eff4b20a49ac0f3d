"""What coverage.py's server process imports once, for all the children that are forked from it."""

from bench.coverage_check import warm_up

warm_up()
