"""PEFT: LoRA on a causal language model with the Trainer."""

from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from tiny import sentences, tokenizer
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

tokens = tokenizer()
data = Dataset.from_dict({"text": sentences(200)})
data = data.map(lambda batch: tokens(batch["text"]), batched=True, remove_columns=["text"])
config = LlamaConfig(
    vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
lora = LoraConfig(
    task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
)
model = get_peft_model(LlamaForCausalLM(config), lora)
args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, num_train_epochs=1, report_to="none")
collator = DataCollatorForLanguageModeling(tokens, mlm=False)
Trainer(model=model, args=args, train_dataset=data, data_collator=collator).train()
