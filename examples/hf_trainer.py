"""Fine-tune a Hugging Face causal LM with transformers.Trainer, whole or by LoRA adapters (PEFT).

    python examples/hf_trainer.py
    python examples/hf_trainer.py --lora
    torchrun --nproc-per-node 2 examples/hf_trainer.py --batch 2

Trainer gets the CompiledModel in the place of the model. It inspects the forward's signature and
the model's class, wraps the model for several processes, and saves it by save_pretrained; all of
this reaches the model inside. The callback names step and rows of each forward; leave it out and
masks are still new at each forward, but depend on how the batch is cut.
"""

from __future__ import annotations

import argparse
import sys

import torch
from accelerate import PartialState
from common import Outcome, SiteCounter, build_model, check_saved, load_rows, output_folder, parser
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import xtrain
from xtrain.command_line import exit_codes
from xtrain.compiler import CompiledModel


class NameRows(TrainerCallback):
    """Call set_step before each training forward: Trainer deals whole batches to ranks in turn."""

    def __init__(self, compiled: CompiledModel):
        self.compiled = compiled
        self.micro = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.micro = 0
        self._name(args, state)

    def on_substep_end(self, args, state, control, **kwargs):
        self.micro += 1
        self._name(args, state)

    def _name(self, args, state):
        place = self.micro * args.world_size + args.process_index
        first = place * args.per_device_train_batch_size
        self.compiled.set_step(state.global_step, first_sample=first)


def settings(arguments: argparse.Namespace) -> TrainingArguments:
    """Return Trainer's settings: the rows in order, at a constant learning rate, unclipped."""
    return TrainingArguments(
        output_dir=str(output_folder(arguments, "hf_trainer")),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=arguments.batch,
        gradient_accumulation_steps=arguments.accumulate,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=arguments.seed,
    )


def examples(rows: Tensor) -> list[dict[str, Tensor]]:
    """Return the rows as Trainer's collator takes them."""
    return [{"input_ids": row, "labels": row} for row in rows]


def load_saved(arguments: argparse.Namespace, folder) -> PreTrainedModel | PeftModel:
    """Load what Trainer saved: a whole model, or adapters on top of the model they began from."""
    if arguments.lora:
        return PeftModel.from_pretrained(build_model(arguments), folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def run(arguments: argparse.Namespace) -> Outcome:
    """Train, evaluate twice, save and load again."""
    model = build_model(arguments)
    if arguments.lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    compiled = xtrain.compile(
        model, dropout=arguments.dropout, seed=arguments.seed, backend=arguments.backend
    )
    sites = SiteCounter(compiled)
    args = settings(arguments)
    rows, held_out = load_rows(arguments, args.world_size)
    trainer = Trainer(
        model=compiled,
        args=args,
        train_dataset=examples(rows),
        eval_dataset=examples(held_out),
        callbacks=[NameRows(compiled)],
    )
    trainer.remove_callback(PrinterCallback)

    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluations = [trainer.evaluate()["eval_loss"] for _ in range(2)]

    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # the first rank writes, all read
    folder = output_folder(arguments, "hf_trainer")
    saved = check_saved(model, load_saved(arguments, folder), folder)
    return Outcome(losses, evaluations, sites, len(compiled.report().sites), folder, [saved])


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print on the first rank."""
    flags = parser("Fine-tune a Hugging Face causal LM with transformers.Trainer.")
    flags.add_argument("--lora", action="store_true", help="train LoRA adapters alone (PEFT)")
    arguments = flags.parse_args(argv)
    with exit_codes() as status:
        outcome = run(arguments)
        if PartialState().is_main_process:
            print(outcome)
    return status.code


if __name__ == "__main__":
    sys.exit(main())
