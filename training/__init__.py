"""How the embedded model was made: text, tokenizer, training, evaluation. Not part of the package."""
