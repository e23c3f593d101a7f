from headrace.base.log_filters import quiet_torchao
from headrace.base.moved import say_new_names

say_new_names()
quiet_torchao()
