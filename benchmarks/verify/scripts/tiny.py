"""A tokenizer and texts that need no download, for the scripts beside this file."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = [
    *("the", "a", "small", "large", "red", "green", "old", "new", "cat", "dog"),
    *("bird", "fox", "runs", "sleeps", "jumps", "sees", "over", "under", "with", "near"),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer():
    """Return a tokenizer whose vocabulary is `WORDS`."""
    found = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="[CLS]", eos_token="[SEP]", **names)


def sentences(number, seed=0):
    """Return sentences of 4 to 20 random words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 20))) for _ in range(number)]
