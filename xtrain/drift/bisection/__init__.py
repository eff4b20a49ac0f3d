"""Which setting moves the numbers: runs of `record`, or of ops alone, each in its own process.

bisect      runs the plan, says which factor does it, at which op; one package at a time
factors     settings with several values, the child process that runs under one of each; which runs
            there are, and what their equality says about each factor and each pair
single_ops  ops: each op alone under two settings, as a picture
"""
