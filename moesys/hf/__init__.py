"""transformers' MoE models on the experts of this package: ``experts_implementation="moesys"``.

ms.hf.register()
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moesys")
"""

from moesys.hf.registration import register

__all__ = ["register"]
