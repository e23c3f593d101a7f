"""Training, evaluation and compression of Hugging Face language models: tokens to a model that serves."""

from foundation.log_filters import quiet_torchao

quiet_torchao()
