"""The trainer behind `python -m xtrain.train`: from a configuration to a run folder.

loop.py reads from top to bottom and calls the others in this order:

choices.py     what the configuration leaves open: device, sizes, defaults of the preset, paths
signals.py     Ctrl-C and SIGTERM: at once, or after the step and a checkpoint
run_folder.py  the folder of a run: its name, its lock, its files
saving.py      what a checkpoint holds, and how a run goes on from one
loader.py      which samples a step holds, cut by rank and into micro-batches, one step ahead
update.py      the optimiser step: learning rate, forwards, backwards, clipping, guard, AdamW
console.py     what is shown: log lines, the progress bar, loss.png, the last words
"""
