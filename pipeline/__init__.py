from headrace.base.moved import say_new_names

say_new_names()
