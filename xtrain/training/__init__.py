"""The loop behind `python -m xtrain.train`: from a configuration to a run folder."""
