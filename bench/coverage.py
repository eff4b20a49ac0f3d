"""Walk every causal language model of transformers and say what xtrain.compile does to it.

python bench/coverage.py --jobs 2                 # all of them; at most 3 hours on two cores
python bench/coverage.py --only llama,gpt2        # these, again
python bench/coverage.py --quick --jobs 2         # sites and masks of those not measured yet
python bench/coverage.py --report-only            # docs/coverage.md from what was measured
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the repository's root is not on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.coverage import main

if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0]))
