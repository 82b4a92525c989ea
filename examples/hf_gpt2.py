"""GPT-2 models of Hugging Face's transformers, with random weights, on two devices that are too small for them.

Needs `pip install transformers`; nothing is downloaded: the text is the documentation that comes with Python.

python examples/hf_gpt2.py
hydra-tune search examples/hf_gpt2.py:build --trials 2 --devices 2xcpu --device-memory 24MiB
hydra-tune plan examples/hf_gpt2.py:build --trials 2 --devices 2xcpu --device-memory 24MiB

A candidate takes 40 to 95 MiB with its gradients, optimizer state and activations. The planner chooses strategy
`shard`: each candidate is cut into 3 to 6 shards that take turns on a device of 24 MiB. The model's code is that of
transformers, unchanged, and the losses are those of `--strategy whole` on larger devices.
"""

from functools import partial
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import hydra_tune as ht

CHARACTERS, LENGTH, HELD_OUT = 10_000, 64, 16
"""Characters of text, characters in a row, and rows at the end of the text for validation."""


def text() -> tuple[torch.Tensor, int]:
    """The text as rows of character codes, and the number of different characters."""
    source = "\n".join(topics[topic] for topic in sorted(topics))[:CHARACTERS]
    vocabulary = {character: code for code, character in enumerate(sorted(set(source)))}
    codes = torch.tensor([vocabulary[character] for character in source])
    return codes[: len(codes) // LENGTH * LENGTH].view(-1, LENGTH), len(vocabulary)


class Rows(Dataset):
    """Rows of text as GPT-2 takes them: a dict is passed as `model(**inputs)`."""

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> tuple[dict[str, torch.Tensor], int]:
        # The model compares its outputs with the labels itself, and moves them by one place: there are no targets.
        return {"input_ids": self.codes[row], "labels": self.codes[row]}, 0


def rows(part: str) -> Rows:
    codes, _ = text()
    return Rows(codes[:-HELD_OUT] if part == "train" else codes[-HELD_OUT:])


def loss_of_model(outputs, targets):
    return outputs.loss


def build(trial):
    heads = trial.suggest_int("heads", 2, 3)
    dropout = trial.suggest_float("dropout", 0.0, 0.2)
    config = GPT2Config(
        vocab_size=text()[1],
        n_positions=LENGTH,
        n_embd=64 * heads,
        n_head=heads,
        n_layer=trial.suggest_int("layers", 6, 8),
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return ht.Candidate(
        model=GPT2LMHeadModel(config),
        loss=loss_of_model,
        optimizer=partial(torch.optim.AdamW, lr=trial.suggest_float("lr", 1e-4, 3e-3, log=True)),
        train=partial(rows, "train"),
        valid=partial(rows, "valid"),
        batch_size=4,
        epochs=2,
    )


if __name__ == "__main__":
    result = ht.search(build, trials=2, devices="2xcpu", device_memory="24MiB", seed=0)
    for trial in result.trials:
        print(f"trial {trial.number}: loss {trial.value:.3f}, {trial.shards} shards ({trial.strategy}), {trial.params}")
