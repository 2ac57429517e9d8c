"""Train a small BERT to find a word in a sentence, with Hugging Face's Trainer."""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, set_seed

from paceline.integrations.transformers import Trainer, TrainingArguments

WORDS, LENGTH = 24, 12


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def sentences(count: int, seed: int) -> list[dict]:
    ids = torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int((row < 2).any())} for row in ids]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    options = parse()
    set_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        num_labels=2, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    args = TrainingArguments(
        options.out, num_train_epochs=options.epochs, per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate, learning_rate=0.02, warmup_steps=4, lr_scheduler_type="cosine",
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy",
        logging_steps=4, use_cpu=True, report_to=[],
    )  # fmt: skip
    trainer = Trainer(
        model=BertForSequenceClassification(config).double(),
        args=args,
        train_dataset=sentences(128, seed=1),
        eval_dataset=sentences(64, seed=2),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), f"{options.out}/model.pt")
        print(f"accuracy {trainer.evaluate()['eval_accuracy']:.2f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
