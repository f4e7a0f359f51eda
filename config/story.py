# For prose: nearly the model's own distribution, without the long tail of odd tokens.
temperature = 0.9
top_k = 100
num_samples = 3
max_new_tokens = 800
