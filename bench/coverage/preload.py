"""What the server of coverage.py's children imports once, before it forks them."""

from bench.coverage.check import warm_up

warm_up()
