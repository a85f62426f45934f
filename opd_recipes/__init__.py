"""opd_recipes: on-policy distillation of vision-language models from privileged views, as a plugin for verl."""

__version__ = "0.1.0"
