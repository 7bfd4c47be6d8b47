"""Tokenizers: from a Hugging Face folder, or trained on the corpus itself.

In: `HuggingFaceTokenizer.Config` or `CorpusTokenizer.Config`. Out: a `BaseTokenizer`.
"""

from hp_components.tokenizer.base import BaseTokenizer
from hp_components.tokenizer.corpus import CorpusTokenizer
from hp_components.tokenizer.hugging_face import HuggingFaceTokenizer

__all__ = ["BaseTokenizer", "CorpusTokenizer", "HuggingFaceTokenizer"]
