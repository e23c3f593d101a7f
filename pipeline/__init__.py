"""Training, evaluation and compression of Hugging Face language models: tokens to a model that serves."""

from headrace.base.log_filters import quiet_torchao
from headrace.base.renamed_modules import name_moved_modules

name_moved_modules()
quiet_torchao()
