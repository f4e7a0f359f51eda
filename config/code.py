# For a model of source code: one unlikely token can break a program, so sample only likely tokens.
temperature = 0.2
top_k = 40
num_samples = 5
max_new_tokens = 256
