"""Making a record: of a model's forwards, and of a training run's steps.

forwards         record, record_prompts: what is called; one forward, or prompts decoded
recorded_model   MODEL and prompts, weights and their hashes
observe          runs the model's forward and hands on the result of every op
writing          takes the results by prompt and writes them; a folder is complete or absent
environment      everything outside model and inputs that can choose another kernel
record_format    what a record's files hold, and reading them
training_steps   the same of every N-th step of a training run
training_format  what its files hold, and reading them
tensors          tensors as bits: hashes, statistics, safetensors files

The formats and tensors need no torch.

Imports nothing of comparison/.
"""
