"""Train: a small language model on real text, so that strategies are compared on a router that learns.

``train`` runs on every rank and yields one ``StepResult`` a step. Seeds give data and initial weights, together with
nothing else: every strategy trains the same model on the same text.
"""

from moesys.train.language_model import LanguageModel
from moesys.train.loop import StepResult, train
from moesys.train.text import Text, load_text

__all__ = ["LanguageModel", "StepResult", "Text", "load_text", "train"]
