# For a model of source code: stay close to what is likely, where a wild token breaks the program.
temperature = 0.2
top_k = 40
num_samples = 5
max_new_tokens = 256
