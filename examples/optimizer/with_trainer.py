"""Hugging Face Trainer: pass the optimizer in; its layers tell the axes of a transformer."""

from tempfile import mkdtemp

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from fedzmg.optim import ZeroMeanSGD

LR, DECAY = 0.1, 5e-4
torch.manual_seed(0)
tokens = torch.randint(1, 20, (640, 8))
labels = (tokens[:, 0] > 9).long()
data = [{"input_ids": t, "labels": label} for t, label in zip(tokens, labels, strict=True)]
model = BertForSequenceClassification(
    BertConfig(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
               intermediate_size=32, max_position_embeddings=8)
)  # fmt: skip


def sums() -> Tensor:
    """Over the vocabulary of the embedding, and over the inputs of a linear layer."""
    bert = model.bert
    words, linear = bert.embeddings.word_embeddings.weight, bert.encoder.layer[0].output.dense
    return torch.cat([words.detach().sum(0), linear.weight.detach().sum(1)])


before = sums()
settings = TrainingArguments(mkdtemp(), save_strategy="no", report_to=[], logging_steps=10,
    per_device_train_batch_size=16, num_train_epochs=3, use_cpu=True)  # fmt: skip
optimizer = ZeroMeanSGD(model, lr=LR, momentum=0.9, weight_decay=DECAY)
constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
trainer = Trainer(model, settings, train_dataset=data, optimizers=(optimizer, constant))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
drift = (sums() - before * (1 - LR * DECAY) ** trainer.state.global_step).abs().max()
print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")
print(f"sums over inputs differ from decay alone by {drift:.1e}")
