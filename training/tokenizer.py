"""Trains the tokenizer of the embedded model: `python -m training.tokenizer --work DIR`.

Byte-level BPE, so that every text comes back as it went in; digits stand alone; special tokens for the end of
a text and for ChatML.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.corpus import KINDS, MIX, MODEL, WORK, CorpusConfig, Document, load_documents, log, order

VOCABULARY = 8192
CONTEXT = 8192
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Words with their leading space, single digits, runs of punctuation, line breaks, and indentation cut so that the
# last space stays with its word. A run of ideographs is one piece.
SPLIT = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train(texts: Iterator[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of exactly `vocabulary` tokens; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,  # bytes; longer ones are rulers and banners
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the text gave {tokenizer.get_vocab_size()} tokens instead of {vocabulary}")
    return tokenizer


def balanced_sample(documents: Sequence[Document], seed: int, chars: int = 12_000_000) -> Iterator[str]:
    """Training texts in the shares of the mix; Chinese counts threefold, since its characters say more."""
    weights = {kind: MIX[kind] / (3.0 if kind == "chinese" else 1.0) for kind in KINDS}
    for kind in KINDS:
        budget = chars * weights[kind] / sum(weights.values())
        for document in order((d for d in documents if d.kind == kind), seed, "tokenizer"):
            if budget <= 0:
                break
            budget -= len(document.text)
            yield document.text


def tokenizer_config() -> dict:
    """What AutoTokenizer reads beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "additional_special_tokens": list(SPECIAL[1:]),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def build(work: Path, folder: Path) -> Tokenizer:
    """Trains on the gathered training documents and writes the two files of the tokenizer."""
    documents = load_documents(work / "documents.train.jsonl")
    tokenizer = train(balanced_sample(documents, CorpusConfig().seed))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--out", type=Path, default=MODEL)
    args = parser.parse_args()
    tokenizer = build(args.work, args.out)
    for kind in KINDS:
        texts = [d.text for d in load_documents(args.work / "documents.held.jsonl") if d.kind == kind]
        tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
        log(f"{kind}: {sum(map(len, texts)) / tokens:.2f} held-out characters a token, {tokens:,} tokens")


if __name__ == "__main__":
    main()
