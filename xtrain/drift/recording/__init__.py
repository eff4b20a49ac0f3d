"""Making a record: of a model's forwards, and of a training run's steps.

recorder         record, record_prompts: what is called; one forward, or prompts decoded
subject          MODEL and prompts, weights and their hashes
observe          runs the model's forward and hands on the result of every op
writing          takes the results by prompt and writes them; a folder is complete or absent
environment      everything outside model and inputs that can choose another kernel
format           what a record's files hold, and reading them
training         the same of every N-th step of a training run
training_folder  what its files hold, and reading them
tensors          tensors as bits: hashes, statistics, safetensors files

format, training_folder and tensors need no torch.

Imports nothing of comparison/ and bisection/.
"""
