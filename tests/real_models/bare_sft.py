"""Full fine-tuning by TRL's SFTTrainer alone, without this project.

Python bare_sft.py BASE ROWS OUT.

The recipe of test_real_training.py: batches of 2 in micro-batches of 1, 2 steps. OUT gets the
weights and history.json.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

base, data, out = map(Path, sys.argv[1:4])
tokenizer = AutoTokenizer.from_pretrained(base)
rows = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    }
    for row in map(json.loads, data.read_text(encoding="utf-8").splitlines())
]
# the order of the rows: shuffled by the seed; within a step the shorter first
shuffled = [
    rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
]
lengths = {
    str(row): len(
        tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=True)["input_ids"]
    )
    for row in rows
}
steps = [sorted(shuffled[at : at + 2], key=lambda row: lengths[str(row)]) for at in (0, 2)]

set_seed(0)
args = SFTConfig(
    output_dir=str(out),
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    max_steps=2,
    seed=0,
    learning_rate=1e-5,
    adam_beta2=0.99,
    weight_decay=0.1,
    max_grad_norm=1.0,
    lr_scheduler_type="linear",
    max_length=256,
    bf16=False,
    use_cpu=True,
    activation_checkpointing=False,
    train_sampling_strategy="sequential",
    save_strategy="no",
    report_to="none",
    logging_steps=1,
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
    args=args,
    train_dataset=Dataset.from_list(sum(steps, [])),
    processing_class=tokenizer,
)
trainer.train()
trainer.model.save_pretrained(out)
(out / "history.json").write_text(json.dumps(trainer.state.log_history))
