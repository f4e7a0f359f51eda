# Always the most likely token. Nothing is random, so every sample is the same and one is enough.
temperature = 0.0
num_samples = 1
