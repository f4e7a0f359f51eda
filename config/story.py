# For prose: close to the model's own distribution, but without its long tail of unlikely tokens.
temperature = 0.9
top_k = 100
num_samples = 3
max_new_tokens = 800
