"""Training, evaluation and compression of Hugging Face language models: tokens to a model that serves."""

from headrace.base.log_filters import quiet_torchao

quiet_torchao()
