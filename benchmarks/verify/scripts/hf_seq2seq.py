"""Hugging Face Seq2SeqTrainer: T5 on pairs of sentences of different lengths."""

from datasets import Dataset
from tiny import sentences, tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

tokens = tokenizer()
data = Dataset.from_dict({"source": sentences(200, 0), "target": sentences(200, 1)})
data = data.map(lambda batch: tokens(batch["source"], text_target=batch["target"]), batched=True)
data = data.remove_columns(["source", "target"])
config = T5Config(
    vocab_size=len(tokens), d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, decoder_start_token_id=0
)
model = T5ForConditionalGeneration(config)
args = Seq2SeqTrainingArguments(
    output_dir="out", per_device_train_batch_size=4, num_train_epochs=1, optim="adafactor", report_to="none"
)
collator = DataCollatorForSeq2Seq(tokens, model=model)
Seq2SeqTrainer(model=model, args=args, train_dataset=data, data_collator=collator).train()
